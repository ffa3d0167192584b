"""The laws: sentences in docstrings, each the name of a property test."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import attnspec

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


def laws_of(function: Any, /) -> list[str]:
    """The laws that a function claims.

    Args:
        function: what has a docstring.

    Returns:
        The sentences of its section of laws.
    """
    section = re.search(r"^Laws:\n((?: +\S.*\n?)+)", inspect.getdoc(function) or "", re.MULTILINE)
    return [line.strip() for line in section[1].splitlines()] if section else []


@cache
def claims() -> dict[str, dict[str, list[str]]]:
    """For each law the sentences that claim it, each with the names of its functions, by the name of its test without `test_`."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, function in vars(attnspec).items():
        if inspect.isfunction(function):
            for law in laws_of(function):
                found.setdefault(slug_of(law), {}).setdefault(law, []).append(name)
    return found


@block
def laws() -> str:
    """Every law with its test."""
    return "\n\n".join(_entry(name, note, code) for name, (note, code) in law_tests().items())


def _entry(name: str, note: str, code: str) -> str:
    if name not in claims():
        raise ValueError(f"tests/test_laws.py has test_{name}, but no docstring claims this law.")
    sentence, users = next(iter(claims()[name].items()))
    body = "\n".join(f"    {line}" for line in f"```python\n{code}\n```".splitlines())
    claimed = ", ".join(map(_link, users))
    return f'### {sentence.rstrip(".")} {{ #law-{name} }}\n\n{note}\n\nA law of {claimed}.\n\n??? quote "The test"\n\n{body}'


def _link(name: str) -> str:
    """Link a function, if it has a page."""
    return f'<autoref optional identifier="attnspec.{name}"><code>{name}</code></autoref>'
