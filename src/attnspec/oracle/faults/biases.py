"""Faults of the cap of the scores and of what is added to them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..problem import Array, Problem
from .fault import Fault, asks
from .scales import has_cap


def cap_faults() -> Iterator[Fault]:
    """Faults of the cap of the scores."""
    kind = "softcap_order_or_missing"
    yield Fault(kind, "the scores are not capped", steps=lambda _: {"cap": _unchanged}, applies=has_cap)
    yield Fault(
        kind, "the cap comes behind bias and mask, where it revives dropped keys", applies=has_cap,
        change=lambda p: replace(p, policy=replace(p.policy, cap_order="after")), declare='Policy(cap_order="after")',
    )  # fmt: skip
    text = "the cap comes behind the bias, but before the mask"
    yield Fault(kind, text, steps=lambda p: {"cap": _unchanged, "bias": _cap_bias(p)}, applies=has_cap)
    for text, bend in (
        ("tanh(score / cap) is not multiplied by the cap", lambda s, c: np.tanh(s / c)),
        ("the scores are not divided by the cap before tanh", lambda s, c: c * np.tanh(s)),
        ("the scores are cut off at the cap, not bent", lambda s, c: np.clip(s, -c, c)),
        ("the scores are multiplied by the cap before tanh", lambda s, c: np.tanh(s * c) / c),
        ("the cap is used as 1/cap", lambda s, c: np.tanh(s * c) / c),
    ):
        yield Fault(kind, text, steps=lambda _, f=bend: {"cap": lambda _, scores, *, limit: f(scores, limit)}, applies=has_cap)


def _unchanged(_: Any, scores: Array, **__: Any) -> Array:
    return scores


def _cap_bias(problem: Problem) -> Callable[..., Array]:
    limit = problem.effective_policy.cap
    return lambda step, scores, addend: limit * np.tanh(step(scores, addend) / limit)


def position_bias_faults() -> Iterator[Fault]:
    """Faults of what is added to the scores."""
    kind = "additive_position_bias"
    for text, change in (
        ("the bias is left out", lambda _: 0.0),
        ("the bias is subtracted", lambda b: -b),
        ("the bias is used as a mask: whether it is 0", lambda b: np.where(b != 0, 0.0, -np.inf)),
        ("the bias of the first sample is used for all", lambda b: b[:1]),
        ("the bias of the first head is used for all", lambda b: b[:, :1]),
        ("the bias of the first query is used for all", lambda b: b[:, :, :1]),
        ("the bias is off by one head", lambda b: np.roll(b, 1, 1)),
        ("the bias is off by one head, the other way", lambda b: np.roll(b, -1, 1)),
        ("the bias is off by one key", lambda b: np.roll(b, 1, 3)),
        ("the bias is off by one key, the other way", lambda b: np.roll(b, -1, 3)),
        ("the bias is off by one query", lambda b: np.roll(b, 1, 2)),
        ("the bias is off by one query, the other way", lambda b: np.roll(b, -1, 2)),
        ("the bias is reversed along the keys", lambda b: b[..., ::-1]),
        ("the bias is added twice", lambda b: 2 * b),
    ):
        name = "mask_type_confusion" if "mask" in text else kind
        yield Fault(name, text, steps=lambda _, f=change: {"bias": _other_bias(f)}, applies=asks("bias"))
    yield Fault(
        kind, "the bias has queries and keys exchanged", steps=lambda _: {"bias": _other_bias(lambda b: b.swapaxes(2, 3))},
        applies=lambda p: "bias" in p.options and p.sizes["seq_q"] == p.sizes["seq_k"],
    )  # fmt: skip
    yield Fault(kind, "the bias is added to the weights, behind the softmax", steps=_bias_behind, applies=asks("bias"))
    for text, slopes in _SLOPES:
        yield Fault(kind, text, change=lambda p, f=slopes: p.change(slopes=f(p.options["slopes"])), applies=asks("slopes"))
    for text, distance in _DISTANCES:
        yield Fault(kind, text, steps=lambda _, f=distance: {"linear_bias": _other_distance(f)}, applies=asks("slopes"))


_SLOPES: tuple[tuple[str, Callable[..., Array]], ...] = (
    ("the bias that falls with the distance is left out", lambda m: 0 * m),
    ("the bias grows with the distance", lambda m: -m),
    ("the slopes are one step too steep: the first is 1", lambda m: m * (m[0] / m[1] if len(m) > 1 else 2.0)),
    ("the slopes are one step too flat", lambda m: m * (m[1] / m[0] if len(m) > 1 else 0.5)),
    ("the slopes stand in reverse order", lambda m: m[::-1]),
    ("the slopes are off by one head", lambda m: np.roll(m, 1)),
    ("the slopes are off by one head, the other way", lambda m: np.roll(m, -1)),
    ("all heads have the slope of the first", lambda m: 0 * m + m[0]),
    ("the slopes are 2^(-8 i / h), for every h", lambda m: 2.0 ** (-8 * np.arange(1, len(m) + 1) / len(m))),
    ("the slopes are 2^(-8 i / h) counted from 0, for every h", lambda m: 2.0 ** (-8 * np.arange(len(m)) / len(m))),
)


_DISTANCES: tuple[tuple[str, Callable[..., Array]], ...] = (
    ("the bias falls with the position of the key, not with its distance", lambda q, k: k + 0 * q),
    ("the bias grows with the position of the key", lambda q, k: -k + 0 * q),
    ("the distance has a sign: keys behind the query are raised", lambda q, k: q - k),
    ("the distance has a sign: keys before the query are raised", lambda q, k: k - q),
    ("the distance counts from the first query, whatever its position", lambda q, k: np.abs(q - q[:, :, :1] - k)),
    ("the distance counts from the last query at the last key", lambda q, k: np.abs(q - k + k[..., -1:] - q[:, :, -1:])),
    ("the distance is off by one", lambda q, k: np.abs(q - k - 1)),
    ("the distance is off by one, the other way", lambda q, k: np.abs(q - k + 1)),
)


def _other_bias(change: Callable[..., Any]) -> Callable[..., Array]:
    return lambda _, scores, addend: scores + change(addend)


def _bias_behind(problem: Problem) -> dict[str, Any]:
    addend = problem.options["bias"]
    return {"bias": lambda _, scores, __: scores, "softmax": lambda step, *arrays, **options: step(*arrays, **options) + addend}


def _other_distance(distance: Callable[..., Array]) -> Callable[..., Array]:
    return lambda _, slopes, q, k: slopes[:, None, None] * -distance(q[:, None, :, None], k[:, None, None, :]).astype(float)
