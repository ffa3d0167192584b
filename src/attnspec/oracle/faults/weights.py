"""Faults of dropout, and of the weights that are returned."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..problem import Answer, Array, Problem
from .fault import Fault, asks


def dropout_faults() -> Iterator[Fault]:
    """Faults of dropout with given survivors."""
    kind, given = "dropout_arithmetic", asks("survivors")
    for text, drop in (
        ("the surviving weights are not raised by 1/(1 - p)", lambda w, s, _: w * s),
        ("the surviving weights are divided by p, not by 1 - p", lambda w, s, p: w * s / p),
        ("the surviving weights are multiplied by 1 - p", lambda w, s, p: w * s * (1 - p)),
        ("the surviving weights are multiplied by p", lambda w, s, p: w * s * p),
        ("the survivors are dropped, and the others stay", lambda w, s, p: w * ~s / (1 - p)),
        ("all weights are raised by 1/(1 - p), and none is dropped", lambda w, _, p: w / (1 - p)),
        ("the surviving weights are normalised again", lambda w, s, _: w * s / np.maximum((w * s).sum(-1, keepdims=True), 1e-300)),
    ):
        yield Fault(kind, text, steps=lambda _, f=drop: {"drop": lambda _, w, s, *, rate: f(w, s, rate)}, applies=given)
    yield Fault("dropout_mode", "nothing is dropped", steps=lambda _: {"drop": lambda _, weights, *__, **___: weights}, applies=given)


def weights_faults() -> Iterator[Fault]:
    """Faults of the weights that are returned, where the output is right."""
    for text, other in _RETURNED:
        yield Fault(
            "returned_weights", text, after=lambda a, p, f=other: Answer(a.y, f(a.weights, p)), applies=asks("return_weights"),
        )  # fmt: skip


def _dropped(weights: Array, problem: Problem) -> Any:
    survivors = problem.options.get("survivors")
    return weights if survivors is None else weights * survivors / (1 - problem.options["dropout"])


_RETURNED: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("the weights that are returned are those behind dropout", _dropped),
    ("the weights that are returned are the mean of the heads", lambda w, _: w.mean(1)),
    ("the weights that are returned are the mean of the heads", lambda w, _: np.broadcast_to(w.mean(1, keepdims=True), w.shape)),
    ("the weights that are returned are the sum of the heads", lambda w, _: w.sum(1)),
    ("the weights that are returned are those of the first head", lambda w, _: w[:, 0]),
    ("the weights that are returned have queries and keys exchanged", lambda w, _: w.swapaxes(2, 3)),
    ("the weights that are returned have the heads before the samples", lambda w, _: w.swapaxes(0, 1)),
    ("the logarithms of the weights are returned", lambda w, _: np.log(w)),
)
