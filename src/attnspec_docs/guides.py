"""What the guides show of the library: options from docstrings, errors from the examples in them, steps where they stand."""

import doctest
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe

import attnspec
from attnspec import errors
from attnspec.bookkeeping.network import crossings
from attnspec.bookkeeping.show import short_bytes, short_count
from attnspec.spec.parameters import Heads

from .blocks import block
from .steps import code_of, linked_axis
from .writing import first_line, table

_ROOT = Path(__file__).parents[2]
_FAMILY = (errors.ShapeError, errors.DtypeError, errors.BackendError, errors.ConfigError)


@cache
def _package() -> griffe.Module:
    return griffe.load("attnspec", search_paths=[str(_ROOT / "src")], submodules=True)  # type: ignore[return-value]


def described(path: str, section: str, /) -> dict[str, tuple[str | None, str]]:
    """Read what a docstring says of parameters or attributes, without importing what it belongs to.

    Args:
        path: where the function or class is defined, behind `attnspec.`.
        section: `parameters` or `attributes`.

    Returns:
        For each its default, None if it has none, and its meaning.

    Raises:
        ValueError: the docstring has no such section.
    """
    docstring = _package()[path].docstring
    for found in docstring.parse("google") if docstring else ():
        if found.kind.value == section:
            return {one.name.strip("*"): (_default(one), " ".join(one.description.split())) for one in found.value}
    raise ValueError(f"the docstring of attnspec.{path} has no section of {section}.")


def _default(one: Any) -> str | None:
    return None if one.value is None else str(one.value).replace("DEFAULT", "Policy()")


@block
def options(path: str) -> str:
    """The parameters of a function as a table: `[[options layers.torch_layer.MultiHeadAttention.__init__]]`."""
    rows = [
        (f"`{name}`", f"`{default}`" if default else "needed", meaning[0].upper() + meaning[1:])
        for name, (default, meaning) in described(path, "parameters").items()
    ]
    return table(("option", "by default", "meaning"), rows, numbers_from=3)


@block
def family() -> str:
    """The errors: what each is about, what else it can be caught as, and the sentence of its example."""
    rows = [(f"[`{kind.__name__}`][attnspec.{kind.__name__}]", first_line(kind), f"`{_builtin(kind)}`", _example(kind)) for kind in _FAMILY]
    return table(("error", "when", "is also a", "for example"), rows, numbers_from=4)


def _builtin(kind: type) -> str:
    return next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")


def _example(kind: type) -> str:
    """The sentence that the call in a docstring is refused with."""
    (said,) = (one.exc_msg for one in doctest.DocTestParser().get_examples(inspect.getdoc(kind) or "") if one.exc_msg)
    return said.partition(": ")[2].strip()


@block
def network(**given: str) -> str:
    """What crosses the network at several numbers of ranks: `[[network d_model=4096 h=32 h_kv=8 batch=8 seq=2048 tp=1,2,4,8]]`."""
    sizes = {name: int(size) for name, size in given.items() if name != "tp"}
    batch, seq = sizes.pop("batch"), sizes.pop("seq")
    layer = Heads(**sizes)
    titles = ("ranks", "heads of each", "parameters", "multiply-adds", "results kept", "one all-reduce adds up", "of", "each sends")
    head = [f"| {' | '.join(titles)} |", "|---:|---:|---:|---:|---:|---|---:|---:|"]
    rows = []
    for ranks in map(int, given["tp"].split(",")):
        share = attnspec.ledger(layer.split(ranks), batch=batch, seq=seq)
        output, *_ = crossings(share, ranks, cross=False)
        numbers = (
            short_count(share.parameters),
            short_count(share.multiply_adds),
            short_bytes(share.bytes),
            " ".join(map(linked_axis, output.cell.axes)),
        )
        rows.append(f"| {ranks} | {layer.h // ranks} | {' | '.join(numbers)} | {short_bytes(output.bytes)} | {short_bytes(output.sent)} |")
    return "\n".join([*head, *rows])


_PLACES = ("src/attnspec/spec/*.py", "src/attnspec/__init__.py", "tests/options.py", "tests/enclosure.py", "tests/test_options.py",
           "tests/test_planted_options.py")  # fmt: skip


@block
def places(*words: str) -> str:
    """Where a step and what asks for it stand in the repository, line by line: `[[places gate gates]]`."""
    return "\n\n".join(found for pattern in _PLACES for found in _lines(pattern, re.compile(rf"\b({'|'.join(words)})\b")))


def _lines(pattern: str, word: re.Pattern[str]) -> list[str]:
    found = []
    for path in sorted(_ROOT.glob(pattern)):
        lines = [f"{number:4}  {line.strip()}" for number, line in enumerate(path.read_text().splitlines(), 1) if word.search(line)]
        if lines:
            found.append("\n".join([f"`{path.relative_to(_ROOT)}`:", "", "```text", *lines, "```"]))
    if not found:
        raise ValueError(f"{word.pattern} is not in {pattern}, where every step has its place.")
    return found


@block
def code(name: str) -> str:
    """The code of a step without its docstring."""
    return f"```python\n{code_of(getattr(attnspec, name))}\n```"
