"""Faults of rotary positions."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ...spec.policy import Rotation
from ..problem import Array, Problem
from .fault import Fault


def rotation_faults() -> Iterator[Fault]:
    """Faults of rotary positions."""

    def rotated(problem: Problem) -> bool:
        return problem.policy.rotation is not None

    def other(change: Callable[..., Rotation]) -> dict[str, Any]:
        return {"change": lambda p: replace(p, policy=replace(p.policy, rotation=change(p.policy.rotation, p))), "applies": rotated}

    kind = "rope_pairing"
    exchanged = other(lambda r, _: replace(r, pairing="interleaved" if r.pairing == "half" else "half"))
    yield Fault(kind, "channels are paired in the other way: i with i + width/2, or 2i with 2i + 1", **exchanged)
    still = "positions have no influence: nothing turns, or all tokens of a head turn by the same angle, which comes to the same"
    yield Fault("rope_wrong_axis", still, change=lambda p: replace(p, policy=replace(p.policy, rotation=None)), applies=rotated)
    yield Fault(kind, "all channels turn, not only the first ones", **other(lambda r, _: replace(r, width=None)))
    yield Fault(kind, "half of the channels turn", **other(lambda r, p: replace(r, width=max(2, p.sizes["d_k"] // 4 * 2))))
    for base in (100.0, 1e3, 1e4, 1e5, 5e5, 1e6):
        yield Fault(kind, f"the base of the angles is {base:g}", **other(lambda r, _, b=base: replace(r, base=b)))
    for text, turn in _TURNS:
        yield Fault(kind, text, steps=lambda p, f=turn: {"rotate": f(p)}, applies=rotated)
    yield Fault("rope_wrong_axis", "the angle grows with the number of the head, not with the position", steps=_by_head, applies=rotated)
    for text, where in _WHERE:
        yield Fault("rope_position", text, steps=lambda p, f=where: {"rotate": _placed(p, f)}, applies=rotated)


def _turned_far(tokens: Array, positions: Array, options: dict[str, Any]) -> Array:
    """Turn as many channels as are said to, but pair them over the whole width."""
    whole = tokens.shape[-1]
    half = (options.get("width") or whole) // 2
    theta = positions[:, None, :, None] * options.get("base", 1e4) ** -(np.arange(half) * 2 / whole)
    first, second, found = tokens[..., :half], tokens[..., whole // 2 : whole // 2 + half], tokens.copy()
    found[..., :half] = first * np.cos(theta) - second * np.sin(theta)
    found[..., whole // 2 : whole // 2 + half] = first * np.sin(theta) + second * np.cos(theta)
    return found


def _turned(
    tokens: Array, positions: Array, options: dict[str, Any], *, angles: str = "", sign: float = 1.0, joined: str = "", far: bool = False
) -> Array:
    """Turn pairs of channels, with the angles or the result in another order."""
    if far:
        return _turned_far(tokens, positions, options)
    width = options.get("width") or tokens.shape[-1]
    half, pairing = width // 2, options.get("pairing", "half")
    exponent = np.arange(half) * 2 / (tokens.shape[-1] if angles == "whole width" else width)
    theta = sign * positions[:, None, :, None] * options.get("base", 1e4) ** -exponent
    theta = np.repeat(theta, 2, -1) if angles == "adjacent" else np.concatenate([theta, theta], -1)
    x = tokens[..., :width]
    if pairing == "half":
        turned, first, second = np.concatenate([-x[..., half:], x[..., :half]], -1), x[..., :half], x[..., half:]
    else:
        first, second = x[..., ::2], x[..., 1::2]
        turned = np.stack([-second, first], -1).reshape(x.shape)
        theta = theta if angles == "halves" else np.repeat(theta[..., :half], 2, -1)
    found = x * np.cos(theta) + turned * np.sin(theta)
    if joined == "apart":
        found = np.concatenate([found[..., ::2], found[..., 1::2]], -1)
    return np.concatenate([found, tokens[..., width:]], -1)


def _turn(**how: Any) -> Callable[[Problem], Callable[..., Any]]:
    return lambda _: lambda _, tokens, positions, **options: _turned(tokens, positions, options, **how)


def _one_side(first: bool, change: Callable[..., Array]) -> Callable[[Problem], Callable[..., Any]]:  # noqa: FBT001
    """Do it to the queries alone, which are turned first, or to the keys alone."""

    def make(_: Problem) -> Callable[..., Any]:
        calls: list[int] = []

        def rotate(step: Any, tokens: Array, positions: Array, **options: Any) -> Any:
            calls.append(1)
            mine = (len(calls) % 2 == 1) == first
            return change(tokens, positions, options) if mine else step(tokens, positions, **options)

        return rotate

    return make


def _apart(tokens: Array, positions: Array, options: dict[str, Any]) -> Array:
    return _turned(tokens, positions, options, joined="apart")


_TURNS: tuple[tuple[str, Callable[..., Callable[..., Any]]], ...] = (
    ("channels are paired i with i + width/2, but the angles stand as t0, t0, t1, t1", _turn(angles="adjacent")),
    ("channels are paired 2i with 2i + 1, but the angles stand as t0, t1, t0, t1", _turn(angles="halves")),
    ("the rates of the angles are spread over the whole width of a head, not over the channels that turn", _turn(angles="whole width")),
    ("channel i is paired with i + d_k/2, though fewer channels turn, and their rates are spread over the whole width", _turn(far=True)),
    ("queries and keys turn the other way", _turn(sign=-1.0)),
    ("only the keys turn with their position", _one_side(first=True, change=lambda tokens, *_: tokens)),
    ("only the queries turn with their position", _one_side(first=False, change=lambda tokens, *_: tokens)),
    ("the queries turn the other way", _one_side(first=True, change=lambda t, p, o: _turned(t, p, o, sign=-1.0))),
    ("the keys turn the other way", _one_side(first=False, change=lambda t, p, o: _turned(t, p, o, sign=-1.0))),
    ("the turned channels of the queries are not put back in their order", _one_side(first=True, change=_apart)),
    ("the turned channels of the keys are not put back in their order", _one_side(first=False, change=_apart)),
)


def _by_head(_: Problem) -> dict[str, Any]:
    def rotate(step: Any, tokens: Array, _: Array, **options: Any) -> Any:
        return step(tokens.swapaxes(1, 2), np.arange(tokens.shape[1])[None], **options).swapaxes(1, 2)

    return {"rotate": rotate}


_WHERE: tuple[tuple[str, Callable[..., Array]], ...] = (
    ("the positions that are given are ignored: tokens count from 0", lambda at, _, __: np.arange(at.shape[1])[None]),
    ("the queries count from 0, whatever came before", lambda at, q, _: at - at[:, :1] if q else at),
    ("the keys count from 0, whatever came before", lambda at, q, _: at if q else at - at[:, :1]),
    ("the positions of the queries are one too high", lambda at, q, _: at + q),
    ("the positions of the queries are one too low", lambda at, q, _: at - q),
    ("the positions of the first sample are used for all", lambda at, _, __: at[:1]),
    ("queries and keys all stand at the position of the last", lambda at, _, __: at * 0 + at[:, -1:]),
    ("the positions are reversed", lambda at, _, __: at[:, ::-1]),
    ("the tokens before count twice in the positions of the queries", lambda at, q, p: at + q * (p.past or p.options.get("offset", 0))),
)


def _placed(problem: Problem, where: Callable[..., Array]) -> Callable[..., Any]:
    calls: list[int] = []

    def rotate(step: Any, tokens: Array, positions: Array, **options: Any) -> Any:
        calls.append(1)
        return step(tokens, where(positions, len(calls) % 2 == 1, problem), **options)

    return rotate
