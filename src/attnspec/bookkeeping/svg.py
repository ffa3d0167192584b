"""Pieces of pictures as SVG, in colours for light and for dark ground."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from jaxtyping import Shaped

FONT = 11
INK = "light-dark(#24292f, #d7dce2)"
DIM = "light-dark(#57606a, #a9b1bb)"
PAPER = "light-dark(#ffffff, #22262e)"
_PALE, _DEEP = ((255, 255, 255), (9, 60, 130)), ((34, 38, 46), (150, 200, 255))
_CELL, _ROW = 46, 26
_INK_TURNS = (0.69, 0.5)  # where black and white stand out alike on light's and on dark's grounds


@dataclass(frozen=True)
class Piece:
    """Part of a picture, and the room that it takes."""

    svg: str
    width: float
    height: float


def text(x: float, y: float, words: str, *, fill: str = INK, anchor: str = "middle", bold: bool = False, turn: bool = False) -> str:
    """Words; turned, they run upwards."""
    turned = f' transform="rotate(-90 {x:.0f} {y:.0f})"' if turn else ""
    weight = ' font-weight="700"' if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" style="fill:{fill}"{weight}{turned}>{escape(words)}</text>'


def line(start: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1.2) -> str:
    """A straight line."""
    (x1, y1), (x2, y2) = start, end
    place = f'x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"'
    return f'<line {place} style="stroke:{colour};stroke-width:{width:g}"/>'


def box(x: float, y: float, width: float, height: float, *, fill: str = PAPER) -> str:
    """A rectangle."""
    place = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<rect {place} rx="2" style="fill:{fill};stroke:{DIM};stroke-width:1"/>'


def document(piece: Piece, title: str, description: str, /) -> str:
    """Make a picture of a piece.

    Args:
        piece: what is drawn.
        title: what it is, in a few words; pictures on one page differ in it.
        description: what it shows, for those who do not see it.

    Returns:
        The picture as SVG, to stand in a page.
    """
    width, height = math.ceil(piece.width), math.ceil(piece.height)
    key = re.sub(r"\W+", "-", title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{key}-title {key}-text" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" style="font:{FONT}px ui-monospace,monospace">'
        f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-text">{escape(description)}</desc>{piece.svg}</svg>'
    )


def standalone(picture: str, /) -> str:
    """Make a picture a file of its own, which follows the mode of whoever shows it.

    Args:
        picture: a picture as SVG.

    Returns:
        The text of the file.
    """
    head, opening, rest = picture.partition(">")
    return f"{head}{opening}<style>:root{{color-scheme:light dark}}</style>{rest}\n"


def grid(
    shares: Shaped[np.ndarray, "_rows _columns"], rows: Sequence[str], columns: Sequence[str], /, *, write: Callable[[float], str]
) -> Piece:
    """Draw numbers from 0 to 1 as cells, the deeper the larger, with what they are written in each.

    Args:
        shares: the numbers.
        rows: what stands beside each row.
        columns: what stands above each column.
        write: what stands in a cell, from its number.

    Returns:
        The cells with their labels.
    """
    left, cell = 8 + 7 * max(map(len, rows)), max(_CELL, 6 + 7 * max(map(len, columns)))
    parts = [text(left + (j + 0.5) * cell, 14, column, bold=True) for j, column in enumerate(columns)]
    for i, row in enumerate(rows):
        parts.append(text(left - 6, 37 + i * _ROW, row, anchor="end", bold=True))
        for j, share in enumerate(map(float, shares[i])):
            x, y = left + j * cell, 20 + i * _ROW
            ground, ink = _colours(share)
            parts += [box(x, y, cell, _ROW, fill=ground), text(x + cell / 2, y + 17, write(share), fill=ink)]
    return Piece("".join(parts), left + len(columns) * cell + 2, 24 + len(rows) * _ROW)


def _colours(share: float) -> tuple[str, str]:
    """The ground of a cell, and the ink that can be read on it; each for light and for dark."""
    grounds = (bytes(round(a + (b - a) * share) for a, b in zip(pale, deep, strict=True)) for pale, deep in (_PALE, _DEEP))
    light, dark = (share > turn for turn in _INK_TURNS)
    inks = ("#fff" if light else "#000", "#000" if dark else "#fff")
    return f"light-dark({', '.join('#' + ground.hex() for ground in grounds)})", f"light-dark({', '.join(inks)})"
