"""Faults of windows."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..problem import Array, Problem
from .causal import anchored
from .fault import Fault


def window_faults() -> Iterator[Fault]:
    """Faults of windows."""
    for text, left, right in (
        ("the window is one key too wide", 1, 0),
        ("the window is one key too narrow", -1, 0),
        ("the window is one key too wide on the right", 0, 1),
        ("the window is one key too narrow on the right", 0, -1),
        ("the window is one key too wide on both sides", 1, 1),
        ("the window is one key too narrow on both sides", -1, -1),
    ):
        yield Fault("window_off_by_one", text, change=lambda p, a=left, b=right: _widened(p, a, b), applies=_windowed)
    yield from _region_faults()


def _windowed(problem: Problem) -> bool:
    return problem.effective_policy.window != (None, None)


def _region_faults() -> Iterator[Fault]:
    """The window lies elsewhere, or has another width."""
    kind = "window_wrong_region"
    for text, change in (
        ("the window lies on the other side of the query", lambda left, right: (right, left)),
        ("the window reaches as far to the right as to the left", lambda left, _: (left, left)),
        ("the window has no end on the right", lambda left, _: (left, None)),
        ("the window has no end on the left", lambda _, right: (None, right)),
        ("the window is twice as wide", lambda left, right: (_twice(left), _twice(right))),
        ("the window is half as wide on both sides", lambda left, _: (_half(left), _half(left))),
        ("the window is half as wide", lambda left, right: (_half(left), _half(right))),
    ):
        yield Fault(kind, text, change=lambda p, f=change: _with_window(p, f), applies=_windowed)
    for text, rule in (
        ("a query sees what lies outside its window", lambda a, left, right: ~((-a <= left) & (a <= right))),
        ("a query sees the keys before its window, not those in it", lambda a, left, _: -a >= left),
        ("a query sees the keys up to its own position, whatever the window", lambda a, *_: a <= 0),
        ("the lower end of the window has the wrong sign", lambda a, left, right: (a >= left) & (a <= right)),
        ("the sign of the lower end of the window is wrong, so that old keys stay visible", lambda a, left, _: a <= left),
    ):
        yield Fault(kind, text, steps=lambda _, f=rule: {"keep_window": _other_window(f)}, applies=_windowed, rank=2)
    text = "the window is anchored at the last query and key, not at the first"
    yield Fault(kind, text, change=lambda p: anchored(p, "bottom_right"), applies=_windowed, rank=2)
    text = "the window is anchored at the first query and key"
    yield Fault(kind, text, change=lambda p: anchored(p, "top_left"), applies=_windowed, rank=2)
    text = "a key is seen if it is in the window or another rule keeps it"
    yield Fault(kind, text, steps=lambda _: {"keep_both": lambda _, a, b: a | b}, applies=_windowed, rank=2)
    for clamp in ("seq_q", "seq_k"):
        text = f"the window is counted from queries that are clamped to {clamp}"
        yield Fault(kind, text, steps=lambda p, c=clamp: {"keep_window": _clamped(p.sizes[c])}, applies=_windowed, rank=3)


def _twice(side: int | None) -> int | None:
    return None if side is None else 2 * side


def _half(side: int | None) -> int | None:
    return None if side is None else side // 2


def _with_window(problem: Problem, change: Callable[[Any, Any], tuple[Any, Any]]) -> Problem | None:
    left, right = change(*problem.effective_policy.window)
    if any(side is not None and side < 0 for side in (left, right)):
        return None
    options = {name: value for name, value in problem.options.items() if name not in ("window", "window_left", "window_right")}
    return replace(problem, options=options, policy=replace(problem.policy, window=(left, right)))


def _widened(problem: Problem, left: int, right: int) -> Problem | None:
    return _with_window(problem, lambda a, b: (None if a is None else a + left, None if b is None else b + right))


def _other_window(rule: Callable[..., Array]) -> Callable[..., Array]:
    def keep_window(_: Any, q: Array, k: Array, *, left: int | None, right: int | None) -> Array:
        ahead = k[:, None, None, :] - q[:, None, :, None]
        return rule(ahead, math.inf if left is None else left, math.inf if right is None else right)

    return keep_window


def _clamped(size: int) -> Callable[..., Array]:
    return lambda step, q, k, **sides: step(np.minimum(q, size - 1), k, **sides)
