"""The static types: NumPy in, NumPy out; PyTorch in, PyTorch out; a mixture is an error in the editor."""

import re
from pathlib import Path

import pytest
from mypy import api

HERE = Path(__file__).parent
CASES = HERE / "typing_cases.py"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_type_checker_reveals_and_refuses_what_it_should():
    report, trouble, _ = api.run(["--strict", "--config-file", str(HERE.parent / "pyproject.toml"), str(CASES)])
    assert not trouble
    found: dict[int, set[str]] = {}
    for line, code in re.findall(r"typing_cases\.py:(\d+): error: .*\[([\w-]+)\]", report):
        found.setdefault(int(line), set()).add(code)
    lines = CASES.read_text().splitlines()
    wanted = {n: set(line.split("# error: ")[1].split()) for n, line in enumerate(lines, 1) if "# error: " in line}
    assert len(wanted) == 9
    assert found == wanted, report
