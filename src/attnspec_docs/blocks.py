"""What stands in pages for what is generated: `[[name word key=value]]`, alone on a line or in the middle of one.

A block is a function that returns Markdown, or a `<figure>`; it is registered by `@block` under its own name. What stands in
the middle of a line must be one line. Nothing inside a fence is a block.
"""

import importlib
import pkgutil
import re
import shlex
from collections.abc import Callable
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

_CALL = re.compile(r"\[\[(?P<call>[a-z_]+( [^\]]*)?)\]\]")
_blocks: dict[str, Callable[..., str]] = {}
_BEFORE_FENCES = 28


def block(function: Callable[..., str]) -> Callable[..., str]:
    """Let pages call a function by its name; words of the line are its positional arguments, `key=value` the others."""
    _blocks[function.__name__] = function
    return function


def render(call: str, /) -> str:
    """Run one block.

    Args:
        call: what stands between the brackets.

    Returns:
        What stands in its place.

    Raises:
        ValueError: there is no such block.
    """
    name, *words = shlex.split(call)
    if name not in _blocks:
        raise ValueError(f"[[{call}]]: there is no block {name!r}; there are {', '.join(sorted(_blocks))}.")
    keywords = dict(word.split("=", 1) for word in words if "=" in word)
    return _blocks[name](*(word for word in words if "=" not in word), **keywords)


class _Generated(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        found, fenced = [], False
        for line in lines:
            fenced ^= line.lstrip().startswith("```")
            if fenced:
                found.append(line)
            elif match := _CALL.fullmatch(line):
                found += ["", *render(match["call"]).split("\n"), ""]
            else:
                found.append(_CALL.sub(lambda match: render(match["call"]), line))
        return found


class Blocks(Extension):
    """Registers the blocks of every module of this package."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # Python-Markdown's name
        """Register the blocks before anything else reads the page."""
        package = importlib.import_module(__package__ or "")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
        md.preprocessors.register(_Generated(md), "attnspec-blocks", _BEFORE_FENCES)


def makeExtension(**settings: Any) -> Blocks:  # noqa: N802  # Python-Markdown's name
    """Make the extension, as Python-Markdown asks for it."""
    return Blocks(**settings)
