"""The laws: sentences in docstrings, each the name of a property test."""

import ast
import re
from functools import cache
from pathlib import Path

from .blocks import block

_TESTS = Path(__file__).parents[2] / "tests" / "test_laws.py"


def slug_of(law: str, /) -> str:
    """The name of a law's test, without `test_`.

    Args:
        law: its sentence.
    """
    return re.sub(r"[^a-z0-9_]+", "_", law.lower()).strip("_")


@cache
def law_tests() -> dict[str, tuple[str, str]]:
    """For each law its note and the code of its test, by the name of the test without `test_`."""
    source = _TESTS.read_text()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            lines = source.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno]
            found[node.name.removeprefix("test_")] = (ast.get_docstring(node) or "", "\n".join(lines))
    return found


def reference_to(law: str, /) -> str:
    """Link a law to its test.

    Args:
        law: its sentence, as a docstring has it.

    Returns:
        A reference.

    Raises:
        ValueError: there is no test of that name.
    """
    name = slug_of(law)
    if name not in law_tests():
        raise ValueError(f"the law {law!r} has no test: tests/test_laws.py has no test_{name}.")
    return f"[{law.rstrip('.')}][law-{name}]"


@block
def laws() -> str:
    """Every law with its test."""
    return "\n\n".join(_entry(name, note, code) for name, (note, code) in law_tests().items())


def _entry(name: str, note: str, code: str) -> str:
    sentence = name.replace("_", " ").replace("b o", "`b_o`").replace("b k", "`b_k`").replace("w o", "`w_o`").replace("d k", "`d_k`")
    body = "\n".join(f"    {line}" for line in f"```python\n{code}\n```".splitlines())
    return f'### {sentence[0].upper()}{sentence[1:]} {{ #law-{name} }}\n\n{note}\n\n??? quote "The test"\n\n{body}'
