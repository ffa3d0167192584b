"""Faults of the softmax."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..problem import Array, Problem
from .fault import Fault, asks
from .scales import factor_of


def softmax_faults() -> Iterator[Fault]:
    """Faults of the softmax."""
    axes = {"over the queries": (2,), "over the heads": (1,), "over the samples": (0,), "over queries and keys together": (2, 3)}
    for name, axis in axes.items():
        for empty in (math.nan, 0.0):
            yield Fault(
                "softmax_wrong_axis", f"the softmax runs {name}, not over the keys",
                steps=lambda _, a=axis, e=empty: {"softmax": _along(a, e)}, rank=1 + (empty == 0),
            )  # fmt: skip
    kind = "softmax_denominator"
    yield Fault(kind, "the sum of the softmax has a 1 too many, as if there were one more score of 0", steps=_denominator(lambda _: 1.0))
    yield Fault(kind, "the sum of the softmax has a 1 too many, behind the shift by the largest score", steps=_denominator(np.exp))
    for tile in (2, 3, 4, 8, 16, 32, 64, 128):
        yield from _padding_faults(tile)
        yield from _chunk_faults(tile)
    yield Fault(kind, "the softmax is not normalised", steps=lambda _: {"softmax": lambda _, s, *__, **___: np.exp(_finite(s))})
    shifted: dict[str, Any] = {"softmax": lambda _, s, *__, **___: _safe(np.exp(s - _peak(s)))}
    yield Fault(kind, "the softmax is not normalised, but shifted by the largest score", steps=lambda _: shifted)
    yield Fault(kind, "the weights of the softmax are squared", steps=lambda _: {"softmax": lambda step, *a, **o: step(*a, **o) ** 2})
    yield from _sink_faults()


def _padding_faults(tile: int) -> Iterator[Fault]:
    """Faults in what keys that fill up a tile count for."""
    padded = f"the keys are padded to a multiple of {tile}, and the padding counts with"
    for score, share, rank in (("a score of 0", lambda _: 1.0, 2), ("the largest score", np.exp, 3)):
        yield Fault(
            "softmax_denominator", f"{padded} {score}",
            steps=lambda p, t=tile, f=share: _denominator(lambda m: -p.sizes["seq_k"] % t * f(m))(p), rank=rank,
            applies=lambda p: p.history is None,
        )  # fmt: skip


def _sink_faults() -> Iterator[Fault]:
    """Faults of sinks."""
    kind, sink = "softmax_denominator", asks("sinks")
    for text, change in (
        ("the sink is left out", lambda s: np.full_like(s, -np.inf)),
        ("the sink counts twice", lambda s: s + math.log(2)),
        ("the sinks are off by one head", lambda s: np.roll(s, 1)),
        ("the sinks are off by one head, the other way", lambda s: np.roll(s, -1)),
        ("the sink of the first head is used for all", lambda s: 0 * s + s[0]),
        ("the sink is subtracted", lambda s: -s),
    ):
        yield Fault(kind, text, change=lambda p, f=change: p.change(sinks=f(p.options["sinks"])), applies=sink)
    yield Fault(kind, "the sink is added to every score", steps=_sink_on_scores, applies=sink)
    yield Fault(kind, "the sink is merged into every score, by log(exp(score) + exp(sink))", steps=_sink_in_scores, applies=sink)
    yield Fault(kind, "the sink is added to the sum without its exponential", steps=_raw_sink, applies=sink)
    yield Fault(
        kind, "the sink is scaled as the scores are", change=lambda p: p.change(sinks=p.options["sinks"] * factor_of(p)), applies=sink
    )


def _finite(scores: Array) -> Array:
    return np.minimum(scores, 700.0)


def _peak(scores: Array) -> Array:
    peak = scores.max(-1, keepdims=True)
    return np.where(np.isfinite(peak), peak, 0.0)


def _safe(x: Array) -> Array:
    return np.nan_to_num(x, nan=0.0)


def _along(axis: tuple[int, ...], empty: float) -> Callable[..., Array]:
    def softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Any:
        peak = scores.max(axis=axis, keepdims=True)
        shares = np.exp(scores - np.where(np.isfinite(peak), peak, 0.0))
        total = shares.sum(axis=axis, keepdims=True)
        return shares / np.where(total == 0, math.nan if math.isnan(empty) else 1.0, total)

    return softmax


def _denominator(more: Callable[..., Any]) -> Callable[[Problem], dict[str, Any]]:
    """Add something to the sum of the exponentials, given the largest score."""

    def softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Any:
        peak = _peak(scores)
        shares = np.exp(scores - peak)
        total = shares.sum(-1, keepdims=True) + more(peak) * np.exp(-peak)
        return shares / np.where(total == 0, 1.0, total)

    return lambda _: {"softmax": softmax}


def _chunks(seq: int, tile: int) -> list[slice]:
    return [slice(start, start + tile) for start in range(0, seq, tile)]


def _chunk_faults(tile: int) -> Iterator[Fault]:
    """Faults in how the results of several chunks of keys are put together."""
    kind = "softmax_denominator"

    def several(problem: Problem) -> bool:
        return problem.sizes["seq_k"] > tile

    for text, merge in (
        ("their results are averaged", lambda lse, *_: 1.0 / lse.shape[0]),
        ("their results are added up", lambda *_: 1.0),
        ("log-sum-exps are merged with the largest score scaled twice", lambda lse, m, f: _shares(m * f + (lse - m))),
        ("log-sum-exps are merged in another base", lambda lse, *_: _shares(lse * math.log2(math.e))),
        ("log-sum-exps are merged without the largest score", lambda lse, m, _: _shares(lse - m)),
        ("the last one alone counts", lambda lse, *_: (np.arange(len(lse)) == len(lse) - 1).reshape(-1, 1, 1, 1, 1)),
        ("the first one alone counts", lambda lse, *_: (np.arange(len(lse)) == 0).reshape(-1, 1, 1, 1, 1)),
    ):
        yield Fault(
            kind, f"the keys are taken in chunks of {tile}, and {text}",
            steps=lambda p, t=tile, f=merge: {"softmax": _in_chunks(t, f, factor_of(p))}, rank=3, applies=several,
        )  # fmt: skip
    text = f"the keys are taken in chunks of {tile}, and what came before is not rescaled when the largest score grows"
    yield Fault(kind, text, steps=lambda _: {"softmax": _unrescaled(tile)}, rank=3, applies=several)


def _shares(lse: Array) -> Any:
    shares = np.exp(lse - np.max(lse, axis=0, keepdims=True))
    return shares / shares.sum(0, keepdims=True)


def _in_chunks(tile: int, merge: Callable[..., Any], factor: float) -> Callable[..., Any]:
    def softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Any:
        parts = [scores[..., chunk] for chunk in _chunks(scores.shape[-1], tile)]
        peaks = np.stack([_peak(part) for part in parts])
        sums = np.stack([np.exp(part - peak).sum(-1, keepdims=True) for part, peak in zip(parts, peaks, strict=True)])
        factors = np.broadcast_to(merge(peaks + np.log(sums), peaks, factor), sums.shape)
        each = zip(parts, peaks, sums, factors, strict=True)
        return np.concatenate([_safe(np.exp(part - peak) / total) * share for part, peak, total, share in each], -1)

    return softmax


def _unrescaled(tile: int) -> Callable[..., Array]:
    def softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Any:
        running, shares = np.full((*scores.shape[:-1], 1), -np.inf), []
        for chunk in _chunks(scores.shape[-1], tile):
            running = np.maximum(running, scores[..., chunk].max(-1, keepdims=True))
            shares.append(np.exp(scores[..., chunk] - np.where(np.isfinite(running), running, 0.0)))
        joined = np.concatenate(shares, -1)
        return _safe(joined / joined.sum(-1, keepdims=True))

    return softmax


def _sink_on_scores(_: Problem) -> dict[str, Any]:
    return {"softmax": lambda step, scores, sinks, **options: step(scores + sinks[:, None, None], **options)}


def _sink_in_scores(_: Problem) -> dict[str, Any]:
    return {"softmax": lambda step, s, sinks, **options: step(np.logaddexp(s, sinks[:, None, None]), **options)}


def _raw_sink(_: Problem) -> dict[str, Any]:
    def softmax(_: Any, scores: Array, sinks: Array, **__: Any) -> Any:
        shares = np.exp(scores - _peak(scores))
        return shares / (shares.sum(-1, keepdims=True) + sinks[:, None, None])

    return {"softmax": softmax}
