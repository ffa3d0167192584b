"""Pieces of pages that several blocks write: tables, figures, what opens on a title, first sentences."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], /, *, numbers_from: int = 1) -> str:
    """Write a Markdown table; columns of numbers stand to the right."""
    line = [("---:" if place >= numbers_from else "---") for place in range(len(head))]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, line, *rows))


def folded(title: str, body: str, /) -> str:
    """Put Markdown under a title on which it opens."""
    return f'??? note "{title}"\n\n' + "\n".join(f"    {line}".rstrip() for line in body.splitlines())


def figure(content: str, /, *, kind: str = "step", caption: str = "") -> str:
    """Put a picture into a box of its own, in which it scrolls where it is wide."""
    said = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure class="{kind}" markdown="0">{content}{said}</figure>'


def first_line(thing: Any, /) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(thing) or "").split("\n", 1)[0]
