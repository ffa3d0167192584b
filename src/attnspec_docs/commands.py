"""The command line: its commands from the program itself, and what they print."""

import io
import os
import shlex
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import typer

from attnspec import cli

from .blocks import block
from .writing import table

_WORDS = {int: "number", float: "number", str: "text", Path: "path"}
_WIDTH = "84"


@block
def command(name: str) -> str:
    """What a command takes, as a table: `[[command shapes]]`."""
    found: Any = typer.main.get_command(cli.app)
    one = found.commands[name]
    hints = typing.get_type_hints(one.callback)
    rows = [(_written(param, hints[param.name]), _default(param), param.help) for param in one.params if not param.hidden]
    return "\n".join([*_paragraphs(one.help), table(("argument, option", "by default", "meaning"), rows, numbers_from=3)])


@block
def commands() -> str:
    """Every command with its first sentence, and a link to its section."""
    found: Any = typer.main.get_command(cli.app)
    return "\n".join(f"- [`attnspec {name}`](#{name}): {one.help.splitlines()[0]}" for name, one in found.commands.items())


def _paragraphs(text: str) -> Iterator[str]:
    for line in text.split("\n\n"):
        yield from (" ".join(line.split()), "")


def _written(param: Any, hint: Any) -> str:
    kinds = [_WORDS[kind] for kind in (typing.get_args(hint) or (hint,)) if kind in _WORDS]
    if param.param_type_name == "argument":
        return f"`{param.name.upper()}`"
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    return names if param.is_flag else f"{names} {kinds[0]}"


def _default(param: Any) -> str:
    if param.required:
        return "needed"
    return "" if param.default in {None, False} else f"`{param.default}`"


@block
def output(*words: str) -> str:
    """Run a command while the pages are built, and show what it prints and its exit status, if that is not 0."""
    printed, status = _run(words)
    end = f"\n\nIts exit status is {status}." if status else ""
    return f"```sh\nattnspec {shlex.join(words)}\n```\n\n```text\n{printed}\n```{end}"


def _run(words: tuple[str, ...]) -> tuple[str, int]:
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed), _changed(sys, "argv", ["attnspec", *words]), _width():
        try:
            cli.main()
        except SystemExit as end:
            status = end.code
    return "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines()), int(status or 0)


@contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _width() -> Iterator[None]:
    before = os.environ.copy()
    os.environ.update(COLUMNS=_WIDTH, NO_COLOR="1", TERM="dumb")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
