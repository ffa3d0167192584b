"""Pictures of the steps, drawn from their annotations, as SVG that follows light and dark mode."""

import re
from collections.abc import Iterable

from ..axes import Axis, Shape, shapes_of
from ..errors import ConfigError
from ..spec.multi_head import multi_head_attention
from ..step import function_of
from .glossary import GLOSSARY, Word
from .svg import DIM, INK, Piece, box, document, line, text

_CARD = 5


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


def _top(x: float, y: float, length: float, axis: str) -> str:
    """An axis that runs to the right."""
    return line((x, y), (x + length, y), colour_of(axis), 3)


def _side(x: float, y: float, length: float, axis: str) -> str:
    """An axis that runs down."""
    return line((x, y), (x, y + length), colour_of(axis), 3)


def _said(axis: Axis) -> str:
    return f"{axis.text} or 1" if axis.broadcast else axis.text


def _array(name: str, shape: Shape) -> Piece:
    """An array as a card of its last two axes; the axes before them say how many such cards there are."""
    *leading, last = shape.axes
    rows = leading.pop() if leading else None
    across, down = _length(last.text), _length(rows.text) if rows else 14
    stacked = len(leading) and 2
    room = max(across + 22, 7 * max(len(_said(last)), len(name)) + 8)
    left, top = (room - across) / 2 + 6, 20 + stacked * _CARD
    cards = [box(left + step * _CARD, top - step * _CARD, across, down) for step in range(stacked, -1, -1)]
    svg = [*cards, _top(left, top, across, last.text)]
    svg.append(text(left + across / 2, top - stacked * _CARD - 7, _said(last), fill=colour_of(last.text)))
    if rows:
        svg += [_side(left, top, down, rows.text)]
        svg.append(text(left - 6, top + down / 2, _said(rows), fill=colour_of(rows.text), turn=True))
    svg.append(text(left + across / 2, top + down + 17, name, bold=True))
    bottom = top + down + 17
    for axis in reversed(leading):
        bottom += 14
        svg.append(text(left + across / 2, bottom, f"× {_said(axis)}", fill=colour_of(axis.text)))
    return Piece("".join(svg), room + 8, bottom + 6)


def _beside(pieces: Iterable[Piece]) -> Piece:
    """Pieces from left to right, their middles on one line."""
    svg, x, placed = [], 0.0, list(pieces)
    height = max(piece.height for piece in placed)
    for piece in placed:
        svg.append(f'<g transform="translate({x:.0f} {(height - piece.height) / 2:.0f})">{piece.svg}</g>')
        x += piece.width
    return Piece("".join(svg), x, height)


def _arrow(label: str) -> Piece:
    width = 7 * len(label) + 24
    head = f'<path d="M{width - 6} 26 l-8 -5 v10 z" style="fill:{INK}"/>'
    return Piece(text(width / 2, 14, label, bold=True) + line((6, 26), (width - 10, 26), INK) + head, width, 52)


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
    return document(_beside(pieces), f"The shapes of {name}", f"{name} takes {taken} and gives ({result}).")


_LANES = {0: "head 1", 1: "head 2", 2: "…", 3: "head h"}
_LANE = 132
_LEFT = 96
_WIDTH = len(_LANES) * _LANE - 12
_MIDDLE = _LEFT + _WIDTH / 2


def chain_figure() -> str:
    """Draw the whole chain: one input fans out into heads, each attends by itself, and what they found fans in to one output.

    Returns:
        The picture as SVG; a few heads stand for all of them.
    """
    parts = [_stages(), _wide("x", 22, "x"), *map(_head, _LANES), _slots(), _wide("y", 592, "return")]
    said = (
        "One x is projected to queries, keys and values of each head; each head scores, scales, masks and blends by itself; "
        "what they found is concatenated and mixed to one y."
    )
    return document(Piece("".join(parts), _LEFT + _WIDTH + 20, 640), "The chain of multi-head attention", said)


def _stages() -> str:
    """What stands beside: the stages, and the borders between them."""
    words = {36: "input", 124: "fan out", 262: "attend", 520: "fan in", 607: "output"}
    names = [text(8, y, word, fill=DIM, anchor="start", bold=True) for y, word in words.items()]
    return "".join([*names, *(line((8, y), (_LEFT + _WIDTH, y), DIM, 0.5) for y in (84, 196, 450, 574))])


def _wide(name: str, y: int, label: str) -> str:
    """An array of the residual stream, which stands once for all heads."""
    axes = str(shapes_of(multi_head_attention)[label][0])
    bar = box(_LEFT, y, _WIDTH, 22) + _top(_LEFT, y, _WIDTH, "d_model") + text(_MIDDLE, y + 15, name, bold=True)
    return bar + text(_LEFT + _WIDTH, y + 38 if label == "return" else y - 6, axes, anchor="end")


def _head(lane: int) -> str:
    """One head from its projections to what it found."""
    left, middle = _LEFT + lane * _LANE, _LEFT + lane * _LANE + 60
    parts = [line((_MIDDLE, 44), (middle, 100), colour_of("h"), 1.5), text(middle, 114, _LANES[lane], fill=colour_of("h"), bold=True)]
    for x, name, step in ((left + 6, "Q", "project_queries"), (left + 44, "K", "project_keys"), (left + 82, "V", "project_values")):
        width = _result(step).axes[-1].text
        parts += [_card(x, 128, 30, name, step), text(x + 15, 183, width, fill=colour_of(width))]
    flow = left + 42
    parts += [
        line((left + 21, 186), (flow, 212), DIM),
        line((left + 59, 186), (flow, 212), DIM),
        line((left + 97, 186), (left + 97, 388), DIM),
    ]
    parts += [_card(flow - 30, 214, 60, "scores", "score"), _card(flow - 30, 306, 60, "weights", "softmax")]
    parts += [text(flow, y, word, fill=DIM) for y, word in ((276, "scale, mask,"), (290, "softmax"))]
    parts += [line((flow, top), (flow, bottom), DIM) for top, bottom in ((254, 265), (294, 304), (346, 388))]
    parts += [
        _card(middle - 38, 390, 76, "blended", "blend"),
        line((middle, 430), (_LEFT + (lane + 0.5) * _WIDTH / len(_LANES), 480), colour_of("h"), 1.5),
    ]
    return "".join(parts)


def _result(step: str) -> Shape:
    return shapes_of(function_of(step, "chain_figure"))["return"][0]


def _card(x: float, y: float, width: float, name: str, step: str) -> str:
    """What a step gives in one head: its last two axes."""
    rows, columns = (axis.text for axis in _result(step).axes[-2:])
    return box(x, y, width, 40) + _top(x, y, width, columns) + _side(x, y, 40, rows) + text(x + width / 2, y + 25, name, bold=True)


def _slots() -> str:
    """What the heads found, side by side, and how it is mixed."""
    slot = _WIDTH / len(_LANES)
    parts = []
    for lane, name in _LANES.items():
        x = _LEFT + lane * slot
        parts += [
            box(x, 482, slot, 26),
            _top(x, 482, slot, _result("blend").axes[-1].text),
            text(x + slot / 2, 499, name.replace("head", "slot")),
        ]
    parts += [
        text(_LEFT + _WIDTH, 524, f"concatenated: {_result('concatenate')}", anchor="end"),
        line((_MIDDLE, 508), (_MIDDLE, 590), INK),
    ]
    return "".join([*parts, text(_MIDDLE + 8, 556, "mix with w_o", anchor="start", bold=True)])
