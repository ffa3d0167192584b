"""Pictures of the steps, drawn from their annotations, as SVG that follows light and dark mode."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ..axes import Axis, Shape, shapes_of
from ..errors import ConfigError
from ..spec.multi_head import multi_head_attention
from ..step import function_of
from .glossary import GLOSSARY, Word

_FONT = 11
_GAP = 30
_CARD = 5
_INK = "light-dark(#24292f, #d7dce2)"
_DIM = "light-dark(#57606a, #a9b1bb)"
_PAPER = "light-dark(#ffffff, #22262e)"


def colour_of(axis: str, /) -> str:
    """The colour of an axis as CSS, for light and for dark ground.

    Args:
        axis: its name, or an expression of names, whose first name counts.

    Returns:
        `light-dark(..., ...)`.
    """
    return f"light-dark({', '.join(_word(axis).colour)})"


def _word(axis: str) -> Word:
    name = re.findall(r"[^\W\d]\w*", axis)
    if not name:
        return Word(axis, "", ("#57606a", "#a9b1bb"), 16)
    if name[0] not in GLOSSARY:
        raise ConfigError(f"figures: the axis {name[0]!r} is not in the glossary.")
    return GLOSSARY[name[0]]


def _length(axis: str) -> int:
    """An expression is as long as its parts together: `past+seq_k`; a product is that of the wide stream: `h*d_v`."""
    if "*" in axis:
        return GLOSSARY["d_model"].length
    return sum(_word(part).length for part in axis.split("+"))


@dataclass(frozen=True)
class _Piece:
    """Part of a picture, and the room that it takes."""

    svg: str
    width: float
    height: float


def _text(x: float, y: float, words: str, *, fill: str = _INK, anchor: str = "middle", bold: bool = False, turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:.0f} {y:.0f})"' if turn else ""
    weight = ' font-weight="700"' if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" style="fill:{fill}"{weight}{turned}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 2) -> str:
    return f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" style="stroke:{colour};stroke-width:{width:g}"/>'


def _box(x: float, y: float, width: float, height: float, *, fill: str = _PAPER, stroke: str = _DIM) -> str:
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="2" style="fill:{fill};stroke:{stroke};stroke-width:1"/>'


def _said(axis: Axis) -> str:
    return f"{axis.text} or 1" if axis.broadcast else axis.text


def _array(name: str, shape: Shape) -> _Piece:
    """An array as a card of its last two axes; the axes before them say how many such cards there are."""
    *leading, last = shape.axes
    rows = leading.pop() if leading else None
    across, down = _length(last.text), _length(rows.text) if rows else 14
    stacked = len(leading) and 2
    room = max(across + 22, 7 * max(len(_said(last)), len(name)) + 8)
    left, top = (room - across) / 2 + 6, 20 + stacked * _CARD
    cards = [_box(left + step * _CARD, top - step * _CARD, across, down) for step in range(stacked, -1, -1)]
    svg = [*cards, _line(left, top, left + across, top, colour_of(last.text), 3)]
    svg.append(_text(left + across / 2, top - stacked * _CARD - 7, _said(last), fill=colour_of(last.text)))
    if rows:
        svg += [_line(left, top, left, top + down, colour_of(rows.text), 3)]
        svg.append(_text(left - 6, top + down / 2, _said(rows), fill=colour_of(rows.text), turn=True))
    svg.append(_text(left + across / 2, top + down + 17, name, bold=True))
    bottom = top + down + 17
    for axis in reversed(leading):
        bottom += 14
        svg.append(_text(left + across / 2, bottom, f"× {_said(axis)}", fill=colour_of(axis.text)))
    return _Piece("".join(svg), room + 8, bottom + 6)


def _beside(pieces: Iterable[_Piece]) -> _Piece:
    """Pieces from left to right, their middles on one line."""
    svg, x, placed = [], 0.0, list(pieces)
    height = max(piece.height for piece in placed)
    for piece in placed:
        svg.append(f'<g transform="translate({x:.0f} {(height - piece.height) / 2:.0f})">{piece.svg}</g>')
        x += piece.width
    return _Piece("".join(svg), x, height)


def _arrow(label: str) -> _Piece:
    width = 7 * len(label) + 24
    head = f'<path d="M{width - 6} 26 l-8 -5 v10 z" style="fill:{_INK}"/>'
    return _Piece(_text(width / 2, 14, label, bold=True) + _line(6, 26, width - 10, 26, _INK, 1.5) + head, width, 52)


def _svg(piece: _Piece, title: str, description: str) -> str:
    width, height = math.ceil(piece.width), math.ceil(piece.height)
    key = re.sub(r"\W+", "-", title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{key}-title {key}-text" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" style="font:{_FONT}px ui-monospace,monospace">'
        f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-text">{escape(description)}</desc>{piece.svg}</svg>'
    )


def standalone(svg: str, /) -> str:
    """Make a picture a file of its own, which follows the mode of whoever shows it.

    Args:
        svg: a picture.

    Returns:
        The text of the file.
    """
    head, opening, rest = svg.partition(">")
    return f"{head}{opening}<style>:root{{color-scheme:light dark}}</style>{rest}\n"


def step_figure(name: str, /) -> str:
    """Draw what a step takes and what it gives, each axis with its name and in its colour.

    Args:
        name: the name of the step.

    Returns:
        The picture as SVG.

    Raises:
        ConfigError: there is no such step.
    """
    shapes = {label: alternatives[0] for label, alternatives in shapes_of(function_of(name, "step_figure")).items()}
    result = shapes.pop("return")
    pieces = [*(_array(label, shape) for label, shape in shapes.items()), _arrow(name), _array("result", result)]
    taken = "; ".join(f"{label} ({shape})" for label, shape in shapes.items())
    return _svg(_beside(pieces), f"The shapes of {name}", f"{name} takes {taken} and gives ({result}).")


_LANES = 4
_LANE = 132
_LEFT = 96


def chain_figure() -> str:
    """Draw the whole chain: one input fans out into heads, each attends by itself, and what they found fans in to one output.

    Returns:
        The picture as SVG; a few heads stand for all of them.
    """
    parts = [_rail(), *(_lane(lane) for lane in range(_LANES)), _fan_in()]
    text = (
        "One x is projected to queries, keys and values of each head; each head scores, scales, masks and blends by itself; "
        "what they found is concatenated and mixed to one y."
    )
    return _svg(_Piece("".join(parts), _LEFT + _LANES * _LANE + 20, 640), "The chain of multi-head attention", text)


def _rail() -> str:
    """What stands once, for all heads: the stages, the input, and the lines from it."""
    x, width = _LEFT, _LANES * _LANE - 12
    middle = x + width / 2
    marks = [
        _text(8, y, words, fill=_DIM, anchor="start", bold=True)
        for y, words in ((36, "input"), (124, "fan out"), (262, "attend"), (520, "fan in"), (612, "output"))
    ]
    bands = [
        f'<line x1="8" y1="{y}" x2="{x + width}" y2="{y}" style="stroke:{_DIM};stroke-width:1;stroke-dasharray:2 4"/>'
        for y in (88, 196, 448)
    ]
    box = _box(x, 22, width, 22) + _line(x, 22, x + width, 22, colour_of("d_model"), 3) + _text(middle, 37, "x", bold=True)
    label = _text(x + width, 16, _axes("x", multi_head_attention), anchor="end")
    fan = [_line(middle, 44, _LEFT + lane * _LANE + 60, 100, colour_of("h"), 1.5) for lane in range(_LANES)]
    return "".join([*marks, *bands, box, label, *fan])


def _axes(label: str, function: object) -> str:
    return f"{shapes_of(function)[label][0]}"  # type: ignore[arg-type]


def _lane(lane: int) -> str:
    """One head from its projections to what it found."""
    left = _LEFT + lane * _LANE
    middle = left + 60
    ends = {0: "head 1", _LANES - 1: "head h"}
    title = _text(middle, 114, ends.get(lane, "head 2" if lane == 1 else "…"), fill=colour_of("h"), bold=True)
    tokens = []
    for index, (letter, axis) in enumerate((("Q", "d_k"), ("K", "d_k"), ("V", "d_v"))):
        x = left + 6 + index * 38
        rows = "seq_q" if letter == "Q" else "seq_k"
        tokens += [_box(x, 128, 30, 40), _line(x, 128, x + 30, 128, colour_of(axis), 3), _line(x, 128, x, 168, colour_of(rows), 3)]
        tokens += [_text(x + 15, 152, letter, bold=True), _text(x + 15, 183, axis, fill=colour_of(axis))]
    flow = [_line(middle - 18, 188, middle - 4, 212, _DIM, 1.2), _line(left + 97, 188, left + 97, 388, _DIM, 1.2)]
    for y, name in ((214, "scores"), (306, "weights")):
        flow += [_box(middle - 38, y, 56, 44), _line(middle - 38, y, middle + 18, y, colour_of("seq_k"), 3)]
        flow += [_line(middle - 38, y, middle - 38, y + 44, colour_of("seq_q"), 3), _text(middle - 10, y + 27, name, bold=True)]
    flow += [
        _text(middle - 10, 276, "scale, mask,", fill=_DIM),
        _text(middle - 10, 290, "softmax", fill=_DIM),
        _line(middle - 10, 293, middle - 10, 304, _DIM, 1.2),
    ]
    flow += [_line(middle - 10, 258, middle - 10, 265, _DIM, 1.2), _line(middle - 10, 352, middle - 10, 388, _DIM, 1.2)]
    found = [_box(middle - 38, 390, 76, 40), _line(middle - 38, 390, middle + 38, 390, colour_of("d_v"), 3)]
    found += [_line(middle - 38, 390, middle - 38, 430, colour_of("seq_q"), 3), _text(middle, 414, "blended", bold=True)]
    return "".join([title, *tokens, *flow, *found])


def _fan_in() -> str:
    """The slots of the heads beside each other, mixed to the output."""
    width = _LANES * _LANE - 12
    slot = width / _LANES
    parts = []
    for lane in range(_LANES):
        x = _LEFT + lane * slot
        parts += [_line(_LEFT + lane * _LANE + 60, 430, x + slot / 2, 480, colour_of("h"), 1.5), _box(x, 482, slot, 26)]
        parts += [
            _line(x, 482, x + slot, 482, colour_of("d_v"), 3),
            _text(x + slot / 2, 499, f"slot {lane + 1}" if lane < 2 else "…" if lane < _LANES - 1 else "slot h"),
        ]
    middle = _LEFT + width / 2
    parts += [_text(_LEFT + width, 524, "concatenated: " + _axes("return", function_of("concatenate", "chain_figure")), anchor="end")]
    parts += [_line(middle, 508, middle, 590, _INK, 1.5), _text(middle + 8, 560, "mix with w_o", anchor="start", bold=True)]
    parts += [
        _box(_LEFT, 592, width, 22),
        _line(_LEFT, 592, _LEFT + width, 592, colour_of("d_model"), 3),
        _text(middle, 607, "y", bold=True),
    ]
    parts += [_text(_LEFT + width, 630, _axes("return", multi_head_attention), anchor="end")]
    return "".join(parts)
