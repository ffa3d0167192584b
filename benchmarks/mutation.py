# ruff: noqa: INP001, T201
"""Evidence for the tests: which small changes of the specification and of the oracle they notice.

    pip install cosmic-ray==8.4.6                         whose operators make the changes; no dependency of the project
    python benchmarks/mutation.py spec [PLACES [SEED]]    a sample of src/attnspec/spec/, continued where it was interrupted
    python benchmarks/mutation.py oracle [PLACES [SEED]]  a sample of src/attnspec/oracle/
    python benchmarks/mutation.py again AREA [TEST ...]   what was not killed, once more; these new tests come first

All mutants of an area are listed, except those of annotations. A sample of the places where there are any is drawn, and one mutant of each.
Each is put into a copy of the project, where the tests that fit its module best run first, then the others of its area that are not slow.
`benchmarks/results/mutation.json` is written after each. `SURVIVORS` says why no test notices a mutant that is left.
"""

import ast
import difflib
import importlib.util
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutation.json"
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider")
PLACES, SEED = 40, 0
SECONDS = {"new": 300, "first": 300, "other": 1200}  # of a processor, for one run of tests; four times as long by the clock

AREAS = {
    "spec": "kinds proof planted_options laws step messages axes exactness planted heads distributed layouts layer options numpy_kernel"
    " backends",
    "oracle": "oracle tolerance oracle_properties oracle_gradients oracle_stores oracle_show oracle_command oracle_faults oracle_isolation"
    " oracle_plugin oracle_evidence cli",
}
FITTING = {  # by the beginning of a module's path; the first that fits
    "spec/parameters": "kinds messages proof laws step planted heads distributed",
    "spec/": "kinds messages proof planted_options laws step axes exactness planted heads",
    "oracle/faults/": "oracle_faults",
    "oracle/diagnosis": "oracle_faults oracle",
    "oracle/decoder": "oracle_faults oracle",
    "oracle/caching": "oracle_faults oracle",
    "oracle/error": "tolerance oracle_faults",
    "oracle/rounding": "tolerance oracle_faults",
    "oracle/tolerance": "tolerance oracle_faults",
    "oracle/gradient_tolerance": "tolerance oracle_gradients",
    "oracle/gradients": "oracle_gradients",
    "oracle/backward": "oracle_gradients",
    "oracle/laws": "oracle_properties oracle",
    "oracle/properties": "oracle_properties oracle",
    "oracle/bench": "oracle_properties oracle",
    "oracle/show": "oracle_show oracle",
    "oracle/html": "oracle_show oracle",
    "oracle/written": "oracle_command",
    "oracle/settings": "oracle_command",
    "oracle/command": "oracle_command",
    "oracle/child": "oracle_isolation",
    "oracle/isolation": "oracle_isolation",
    "oracle/job": "oracle_isolation oracle_command",
    "oracle/problem": "oracle_properties oracle_faults oracle",
    "oracle/": "oracle_stores oracle_properties oracle_show oracle",
}
FIRST = ("area", "file", "line", "operator", "occurrence", "before", "after")  # what is known of a mutant before a test runs
SURVIVORS = {  # "file: the changed line", whatever it became, or "file: what it became"
    "spec/attend.py: return xp.where(finite, rows, 1.0), xp.any(~finite, axis=-1).mT": "What is not finite is multiplied by a weight of 0,"
    " or makes the whole result NaN; which number stands for it meanwhile is never seen.",
    "oracle/bench.py: rounding: float = 1e-9": "The default is never used: who makes a bench says the rounding.",
    "oracle/bench.py: seconds: float = 0.0": "It only tells slow implementations, by the mean over many questions; a second more or less"
    " alters how many are put, not what is found.",
    "oracle/faults/fits.py: return shares / np.where(total == 0, 1.0, total)": "Something positive has been added to the total, so it"
    " is never 0.",
    "oracle/gradient_tolerance.py: return noise(y if b is None else y + given(b, y)[:, None, :], 0.0, 1.0)": "Not equivalent:"
    " at widths of 1 to 24 the tolerance is up to 10 % smaller, where one that is drawn anew is 3 to 24 % another.",
    "oracle/settings.py: if found.get(name, choices[0]) not in choices:": "Any of the choices does in place of"
    " one that is not said: each is among the choices.",
    "oracle/faults/fits.py: _Fit(_filled, -np.geomspace(1e-2, 1e6, 60), _MASKED),": "The grid is only where the search"
    " begins, and as good if its end is off by a millionth.",
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: the file, below `src/attnspec/`.
        line: where it is changed.
        operator: which of cosmic-ray's operators changes it.
        occurrence: at which of the operator's places in the file.
    """

    file: str
    line: int
    operator: str
    occurrence: int

    def code(self) -> str:
        """The changed file."""
        from cosmic_ray.mutating import mutate_code

        return str(mutate_code(source(self.file), operators()[self.operator], self.occurrence))

    def row(self) -> dict[str, Any] | None:
        """What there is to say before a test runs; None if the change is none, or is no Python."""
        code = self.code()
        try:
            if ast.dump(ast.parse(code)) == ast.dump(ast.parse(source(self.file))):
                return None
        except SyntaxError:
            return None
        changed = list(difflib.ndiff(source(self.file).splitlines(), code.splitlines()))
        before, after = (" ".join(line[2:].strip() for line in changed if line.startswith(sign)).strip() for sign in "-+")
        return {**vars(self), "before": before, "after": after}


@cache
def source(file: str) -> str:
    """The text of a file."""
    return (ROOT / "src" / "attnspec" / file).read_text()


@cache
def operators() -> dict[str, Any]:
    """Cosmic-ray's operators, except those that want to be told names of variables."""
    import cosmic_ray.plugins

    kinds = {name: cosmic_ray.plugins.get_operator(name) for name in cosmic_ray.plugins.operator_names()}
    return {name.removeprefix("core/"): kind() for name, kind in kinds.items() if not kind.arguments()}


def mutants(file: str) -> Iterator[tuple[Any, Mutant]]:
    """List the mutants of a file outside of its annotations, each with its place: where it is, and which kind of operator is at work."""
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes, spans = list(ast_nodes(get_ast(source(file)))), list(annotations(ast.parse(source(file))))
    for name, operator in operators().items():
        places = ((start, end) for node in nodes for start, end in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(places):
            if not any(first <= start and end <= last for first, last in spans):
                yield (file, start, end, name.partition("_")[0]), Mutant(file, start[0], name, occurrence)


def annotations(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where the annotations of a file stand."""
    for node in ast.walk(tree):
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(note, ast.expr) and note.end_lineno is not None and note.end_col_offset is not None:
                yield (note.lineno, note.col_offset), (note.end_lineno, note.end_col_offset)


def sample(area: str, places: int, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draw places, and a mutant of each."""
    files = sorted(path.relative_to(ROOT / "src" / "attnspec").as_posix() for path in (ROOT / "src" / "attnspec" / area).rglob("*.py"))
    by_place: dict[Any, list[Mutant]] = {}
    for place, mutant in (pair for file in files for pair in mutants(file)):
        by_place.setdefault(place, []).append(mutant)
    chance, rows = random.Random(seed), []  # noqa: S311  # no secret
    for place in chance.sample(list(by_place), len(by_place)):
        row = chance.choice(by_place[place]).row()
        if row is not None:
            rows.append({"area": area, **row})
        if len(rows) == places:
            break
    git = ("git", "log", "-1", "--format=%h", "--", f"src/attnspec/{area}")
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603
    listed = {"commit": commit, "files": len(files), "mutants": sum(map(len, by_place.values())), "places": len(by_place), "seed": seed}
    part = json.loads(RESULTS.read_text()).get(area, {"cases": []}) if RESULTS.exists() else {"cases": []}
    known = {tuple(row[name] for name in FIRST): row for row in part["cases"]}  # of a run that was interrupted
    return listed, [known.get(tuple(row.values()), row) for row in rows]


def chosen(row: dict[str, Any], tests: str) -> list[str]:
    """The files of the tests that fit a mutant's module, or the others of its area."""
    first = next(names for start, names in FITTING.items() if row["file"].startswith(start)).split()
    names = first if tests == "first" else [name for name in AREAS[row["area"]].split() if name not in first]
    return [f"tests/test_{name}.py" for name in names]


def ask(project: Path, row: dict[str, Any], tests: str, new: list[str]) -> dict[str, Any]:
    """Put a mutant into the copy of the project, and run the `new` tests, the `first` or the `other` ones until one fails."""
    start, path = time.perf_counter(), project / "src" / "attnspec" / row["file"]
    mutant = Mutant(row["file"], row["line"], row["operator"], row["occurrence"])
    if mutant.row() != {name: row[name] for name in FIRST[1:]}:
        sys.exit(f"mutation.py: {row['file']} is another than when {row['after']!r} was drawn; draw anew.")
    path.write_text(mutant.code())
    outcome, killer = run(project, new if tests == "new" else chosen(row, tests), SECONDS[tests])
    path.write_text(source(row["file"]))
    seconds = row.get("seconds", 0) + round(time.perf_counter() - start)
    return {**row, "outcome": outcome, "killer": killer, "seconds": seconds, "tests": "all" if tests == "other" else tests}


def run(project: Path, tests: list[str], seconds: int) -> tuple[str, str | None]:
    """Run tests; whether the mutant survived, and else which test noticed it."""
    path = os.pathsep.join([str(project / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}  # a mutant may be as old and as long as the original
    child = subprocess.Popen(  # noqa: S603
        (*PYTEST, *tests), cwd=project, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    resource.prlimit(child.pid, resource.RLIMIT_CPU, (seconds, seconds + 5))
    try:
        said, _ = child.communicate(timeout=4 * seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return "timed out", None
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timed out", None
    if child.returncode == 0:
        return "survived", None
    noticed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", said, re.MULTILINE)
    return "killed", noticed.group(1) if noticed else "the import of the package"


def explained(row: dict[str, Any]) -> dict[str, Any]:
    """Say why a mutant that survived is right too."""
    if row["outcome"] == "killed":
        return row
    sentences = (SURVIVORS.get(f"{row['file']}: {line}") for line in (row["after"], row["before"]))
    return {**row, "explanation": next(filter(None, sentences), None)}


def copied(folder: str) -> Path:
    """Copy what the tests need; they must pass without a mutant."""
    for name in ("src", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    for path in (path for path in ROOT.iterdir() if path.is_file()):
        shutil.copy(path, folder)
    return Path(folder)


def keep(area: str, listed: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write one part of the results."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    machine = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__, "processor": platform.machine()}
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in ("killed", "timed out", "survived")}
    results[area] = {"date": time.strftime("%Y-%m-%d"), **machine, **listed, "asked": len(rows), **counts, "cases": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def ask_all(area: str, listed: dict[str, Any], rows: list[dict[str, Any]], new: list[str]) -> None:
    """Ask about mutants, one after the other: all with the tests that fit best, then those that survive with the others."""
    with tempfile.TemporaryDirectory() as folder:
        project = copied(folder)
        for tests in (*(["new"] if new else []), "first", "other"):
            for index, row in enumerate(rows):
                if row.get("outcome", "survived") != "survived" or row.get("tests") in (tests, "all"):
                    continue
                rows[index] = found = ask(project, row, tests, new)
                print(f"{found['file']}:{found['line']} {found['operator']}: {found['outcome']} {found['killer'] or ''}", flush=True)
                if found["outcome"] != "killed":
                    print(f"    - {found['before']}\n    + {found['after']}", flush=True)
                keep(area, listed, [explained(row) for row in rows if "outcome" in row])


def again(area: str, new: list[str]) -> None:
    """Ask once more about what was not killed."""
    part = json.loads(RESULTS.read_text())[area]
    rows = [row if row["outcome"] == "killed" else {**row, "outcome": "survived", "tests": "none"} for row in part["cases"]]
    ask_all(area, {name: part[name] for name in ("commit", "files", "mutants", "places", "seed")}, rows, new)


def main() -> None:
    """Run the part that is named."""
    if importlib.util.find_spec("cosmic_ray") is None:
        sys.exit("mutation.py needs cosmic-ray, which is no dependency of the project: pip install cosmic-ray==8.4.6")
    part, *rest = sys.argv[1:] or [""]
    if part == "again" and rest and rest[0] in AREAS:
        again(rest[0], rest[1:])
    elif part in AREAS:
        places, seed = [*(int(number) for number in rest), *(PLACES, SEED)[len(rest) :]]
        ask_all(part, *sample(part, places, seed), [])
    else:
        sys.exit(str(__doc__))


if __name__ == "__main__":
    main()
