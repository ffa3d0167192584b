"""The head explorer: what real heads did with each word, as data for the page's script and as what the page shows without it."""

import base64
import inspect
import json
from collections.abc import Sequence
from functools import cache
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from attnspec import concatenate, gate, mix
from attnspec.bookkeeping.figures import colour_of
from attnspec.heads.habits import Habit, place_name
from attnspec.heads.replay import Replay, replay
from attnspec.heads.run import Run
from attnspec.heads.shipped import shipped
from attnspec.step import Call, function_of

from .blocks import block
from .steps import axes_of

_LARGEST = 2**15 - 1  # of 16 bits with a sign
_WORD = "sat"  # shown first
_FOLLOWS_HEADS = ("concatenate", "mix")  # these steps the script does again, without the heads that are off


@cache
def _replayed() -> tuple[Run, tuple[Replay, ...]]:
    run = shipped()
    return run, tuple(replay(layer) for layer in run.layers)


def explorer_data() -> dict[str, Any]:
    """What the page's script needs: for each layer what `attnspec heads --json` says, each array, and what each head adds to y."""
    run, replays = _replayed()
    return {
        "text": run.text,
        "words": [place_name(i, run.tokens) for i in range(len(run.tokens))],
        "examples": run.examples,
        "word": run.tokens.index(_WORD),
        "layers": [_layer(one, run.tokens) for one in replays],
    }


def _layer(replayed: Replay, tokens: Sequence[str]) -> dict[str, Any]:
    said = replayed.to_dict(tokens)
    calls = replayed.steps.calls
    first, last = calls[0], replayed.steps["mix"]
    return {
        "layer": said["layer"],
        "heads": [{"habit": str(Habit(**head["most_look_at"])), "weights": head["weights"]} for head in said["heads"]],
        "arrays": {
            "x": _packed(first.arguments["x"], first.axes["x"]),
            **{call.step.name: _packed(call.result, call.axes["return"]) for call in calls if call.step.name not in _FOLLOWS_HEADS},
            "added": _packed(contributions(replayed), ("h", *last.axes["return"][1:])),
            "b_o": _packed(last.arguments["b_o"], last.axes["b_o"]),
        },
    }


def contributions(replayed: Replay, /) -> npt.NDArray[Any]:
    """What each head adds to the output of a layer: with the bias `b_o`, they sum up to it.

    Args:
        replayed: the layer.

    Returns:
        For each head and word, the output of this head alone, without the bias.
    """
    blended, w_o = replayed.steps["blend"].result, replayed.steps["mix"].arguments["w_o"]
    alone = np.eye(blended.shape[1], dtype=blended.dtype)
    return np.concatenate([mix(concatenate(gate(blended, one)), w_o) for one in alone])


def _packed(array: npt.NDArray[Any], axes: Sequence[str]) -> dict[str, Any]:
    """An array as whole numbers of 16 bits, in a unit in which the largest fits."""
    unit = float(np.abs(array).max()) / _LARGEST
    values = np.rint(array / unit).astype("<i2").tobytes()
    return {"axes": axes, "shape": array.shape, "unit": unit, "colour": colour_of(axes[-1]), "values": base64.b64encode(values).decode()}


@block
def explorer_about() -> str:
    """Which heads there are, and what they read, for the middle of a sentence."""
    run, replays = _replayed()
    layers = [str(one.layer.index) for one in replays]
    which = f"{', '.join(layers[:-1])} and {layers[-1]}"
    return f'the {len(replays[0].weights)} heads of the layers {which} of {run.model}, which reads "{run.text}"'


@block
def explorer_heads() -> str:
    """The weights of one head, words by words, and the data of all of them."""
    run, replays = _replayed()
    index, head = run.examples[0]
    weights = next(one for one in replays if one.layer.index == index).weights[head]
    columns = "".join(f'<th scope="col">{escape(token)}</th>' for token in run.tokens)
    rows = "".join(
        f'<tr><th scope="row">{escape(token)}</th>{"".join(map(_cell, row))}</tr>' for token, row in zip(run.tokens, weights, strict=True)
    )
    caption = f'<span id="shown-head">Layer {index}, head {head}</span>: how each word (row) shares its attention among the words (columns)'
    table = f'<table class="weights"><caption>{caption}</caption><thead><tr><td></td>{columns}</tr></thead><tbody>{rows}</tbody></table>'
    data = json.dumps(explorer_data(), separators=(",", ":")).replace("<", r"\u003c")
    return (
        f'<figure class="weights" markdown="0">{table}</figure>\n\n'
        f'<script type="application/json" id="explorer-data">{data}</script>\n\n<script src="assets/explorer.js" defer></script>\n\n'
        f"<noscript><p>This is one head of {sum(len(one.weights) for one in replays)}; the others, and all that can be moved here, "
        "need JavaScript.</p></noscript>"
    )


def _cell(weight: float) -> str:
    return f'<td style="--weight:{weight:.2f}">{weight:.2f}</td>'


@block
def explorer_path() -> str:
    """Every array between x and y, with its axes and sizes; the script adds what one word has there."""
    steps = _replayed()[1][0].steps
    start = f"`x`, what the layer is given: {axes_of('project_queries')['x']}, {_times(steps.calls[0].arguments['x'])}."
    return "\n\n".join(['<ol class="path" markdown="1">', _item("x", start), *map(_step, steps.calls), "</ol>"])


def _step(call: Call) -> str:
    name = call.step.name
    does = (inspect.getdoc(function_of(name, "explorer_path")) or "").split("\n", 1)[0]
    return _item(name, f"[`{name}`][attnspec.{name}] gives {axes_of(name)['return']}, {_times(call.result)}. {does}")


def _item(name: str, said: str) -> str:
    return f'<li data-array="{name}" markdown="1">\n\n{said}\n\n</li>'


def _times(array: npt.NDArray[Any]) -> str:
    return " × ".join(map(str, array.shape))
