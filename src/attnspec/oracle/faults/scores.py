"""Faults of scale, cap, bias, softmax and dropout."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..problem import Answer, Array, Problem
from .fault import Fault, asks

FACTORS: Mapping[str, tuple[str, Callable[[Mapping[str, int]], float]]] = {
    "1/sqrt(d_model)": ("scale_wrong_dim", lambda s: s.get("d_model", math.nan) ** -0.5),
    "1/sqrt(h * d_k)": ("scale_wrong_dim", lambda s: (s["h"] * s["d_k"]) ** -0.5),
    "1/sqrt(h)": ("scale_wrong_dim", lambda s: s["h"] ** -0.5),
    "1/sqrt(h_kv)": ("scale_wrong_dim", lambda s: s["h_kv"] ** -0.5),
    "1/sqrt(d_v)": ("scale_wrong_dim", lambda s: s["d_v"] ** -0.5),
    "1/sqrt(h * d_v)": ("scale_wrong_dim", lambda s: (s["h"] * s["d_v"]) ** -0.5),
    "1/sqrt(d_model / h)": ("scale_wrong_dim", lambda s: (s.get("d_model", math.nan) / s["h"]) ** -0.5),
    "1/sqrt(d_model // h)": ("scale_wrong_dim", lambda s: max(1, s.get("d_model", 0) // s["h"]) ** -0.5),
    "1/sqrt(seq_k)": ("scale_wrong_dim", lambda s: s["seq_k"] ** -0.5),
    "1/sqrt(seq_q)": ("scale_wrong_dim", lambda s: s["seq_q"] ** -0.5),
    "1/sqrt(batch)": ("scale_wrong_dim", lambda s: s["batch"] ** -0.5),
    "1/sqrt(d_k / 2)": ("scale_wrong_dim", lambda s: (s["d_k"] / 2) ** -0.5),
    "1/sqrt(2 * d_k)": ("scale_wrong_dim", lambda s: (s["d_k"] * 2) ** -0.5),
    "1/sqrt of d_k padded to a power of two": ("scale_wrong_dim", lambda s: 2.0 ** (-math.ceil(math.log2(s["d_k"])) / 2)),
    **{
        f"1/sqrt of d_k padded to a multiple of {n}": ("scale_wrong_dim", lambda s, n=n: (-(-s["d_k"] // n) * n) ** -0.5)
        for n in (4, 8, 16, 32, 64, 128)
    },
    "1: there is no scale": ("scale_missing_or_double", lambda _: 1.0),
    "1/d_k: it is applied twice, or its root is missing": ("scale_missing_or_double", lambda s: 1 / s["d_k"]),
    "sqrt(d_k): it multiplies where it should divide": ("scale_missing_or_double", lambda s: math.sqrt(s["d_k"])),
    "d_k": ("scale_missing_or_double", lambda s: float(s["d_k"])),
    "d_k ** -0.25": ("scale_missing_or_double", lambda s: s["d_k"] ** -0.25),
    "d_k ** -1.5": ("scale_missing_or_double", lambda s: s["d_k"] ** -1.5),
    "1/d_model": ("scale_wrong_dim", lambda s: 1 / s.get("d_model", math.nan)),
    "1/sqrt(d_k - 1)": ("scale_wrong_dim", lambda s: (s["d_k"] - 1) ** -0.5 if s["d_k"] > 1 else math.nan),
    "1/sqrt(d_k + 1)": ("scale_wrong_dim", lambda s: (s["d_k"] + 1) ** -0.5),
    "ln 2 / sqrt(d_k): powers of 2 stand where powers of e should": ("softmax_denominator", lambda s: math.log(2) * s["d_k"] ** -0.5),
    "log2(e) / sqrt(d_k)": ("softmax_denominator", lambda s: math.log2(math.e) * s["d_k"] ** -0.5),
}
"""Factors of the scores that are seen in place of 1/sqrt(d_k), in the sizes of a problem."""


def rescaled(problem: Problem, factor: float) -> Problem | None:
    """Solve the problem with another factor for the scores."""
    return problem.change(scale=float(factor)) if math.isfinite(factor) else None


def _has_default_scale(problem: Problem) -> bool:
    return "scale" not in problem.options and problem.policy.scale is None


def scale_faults() -> Iterator[Fault]:
    """Faults of the factor of the scores."""
    for name, (kind, factor) in FACTORS.items():
        yield Fault(
            kind, f"the scores are scaled by {name} instead of 1/sqrt(d_k)", change=lambda p, f=factor: rescaled(p, f(p.sizes)),
            applies=_has_default_scale, declare="policy=Policy(scale=...)", rank=_rank(name),
        )  # fmt: skip
    given = {"applies": asks("scale")}
    for text, change in (
        ("the scale that is given is ignored, 1/sqrt(d_k) is used", lambda p: p.change(scale=None)),
        ("the scale that is given is ignored, the scores are not scaled", lambda p: p.change(scale=1.0)),
        ("the scale that is given is applied on top of 1/sqrt(d_k)", lambda p: rescaled(p, p.options["scale"] * p.sizes["d_k"] ** -0.5)),
        ("the scores are divided by the scale that is given", lambda p: rescaled(p, 1 / p.options["scale"])),
        ("the scale that is given is applied twice", lambda p: rescaled(p, p.options["scale"] ** 2)),
        ("the square root of the scale that is given is applied", lambda p: rescaled(p, math.sqrt(abs(p.options["scale"])))),
    ):
        yield Fault("scale_option_ignored", text, change=change, **given)
    said = {"applies": lambda p: "scale" not in p.options and p.policy.scale is not None}
    ignored = "the declared factor of the scores is ignored"
    yield Fault("scale_option_ignored", f"{ignored}, 1/sqrt(d_k) is used", change=lambda p: rescaled(p, p.sizes["d_k"] ** -0.5), **said)
    yield Fault("scale_option_ignored", f"{ignored}, the scores are not scaled", change=lambda p: rescaled(p, 1.0), **said)
    place = "scale_wrong_place"
    yield Fault(place, "the weights are scaled, behind the softmax, and not the scores", steps=lambda p: _scale_behind(p, "softmax"))
    yield Fault(place, "what the heads found is scaled, and not the scores", steps=lambda p: _scale_behind(p, "blend"))
    yield Fault(place, "the weights are scaled too, behind the softmax", steps=lambda p: {"softmax": _times(_factor(p))})
    biased = {"applies": asks("bias", "slopes")}
    yield Fault(place, "the bias is scaled together with the scores", steps=lambda p: {"bias": _scaled_bias(_factor(p))}, **biased)
    yield Fault(place, "the cap is applied before the scale", steps=_cap_before_scale, applies=_has_cap)


def _rank(name: str) -> int:
    """Names that stand for the more usual mistake come first where two are the same number."""
    usual = ("1/sqrt(d_model)", "1/sqrt(h * d_k)", "1/sqrt(d_v)", "1: there is no scale")
    return 1 if name in usual else 2 + ("padded" in name)


def _factor(problem: Problem) -> float:
    given = problem.options.get("scale", problem.policy.scale)
    return float(problem.sizes["d_k"] ** -0.5 if given is None else given)


def _times(factor: float) -> Callable[..., Array]:
    return lambda step, *arrays, **options: step(*arrays, **options) * factor


def _scale_behind(problem: Problem, name: str) -> dict[str, Any]:
    return {"scale": lambda _, scores, **__: scores, name: _times(_factor(problem))}


def _scaled_bias(factor: float) -> Callable[..., Array]:
    return lambda step, scores, addend: step(scores, addend * factor)


def _has_cap(problem: Problem) -> bool:
    return problem.effective_policy.cap is not None


def _cap_before_scale(problem: Problem) -> dict[str, Any]:
    factor = _factor(problem)
    return {
        "scale": lambda _, scores, **__: scores,
        "cap": lambda step, scores, **options: step(scores, **options) * factor,
    }


def cap_faults() -> Iterator[Fault]:
    """Faults of the cap of the scores."""
    kind, capped = "softcap_order_or_missing", {"applies": _has_cap}
    after = {"change": lambda p: replace(p, policy=replace(p.policy, cap_order="after"))}
    yield Fault(kind, "the scores are not capped", steps=lambda _: {"cap": lambda _, scores, **__: scores}, **capped)
    yield Fault(kind, "the cap comes behind bias and mask, where it revives dropped keys", **after, **capped, declare='Policy(cap_order="after")')
    yield Fault(kind, "the cap comes behind the bias, but before the mask", steps=lambda _: {"cap": _unchanged, "bias": _cap_bias(_)}, **capped)
    for text, bend in (
        ("tanh(score / cap) is not multiplied by the cap", lambda s, c: np.tanh(s / c)),
        ("the scores are not divided by the cap before tanh", lambda s, c: c * np.tanh(s)),
        ("the scores are cut off at the cap, not bent", lambda s, c: np.clip(s, -c, c)),
        ("the scores are multiplied by the cap before tanh", lambda s, c: np.tanh(s * c) / c),
        ("the cap is used as 1/cap", lambda s, c: np.tanh(s * c) / c),
    ):
        yield Fault(kind, text, steps=lambda _, f=bend: {"cap": lambda _, scores, *, limit: f(scores, limit)}, **capped)


def _unchanged(_: Any, scores: Array, **__: Any) -> Array:
    return scores


def _cap_bias(problem: Problem) -> Callable[..., Array]:
    limit = problem.effective_policy.cap
    return lambda step, scores, addend: limit * np.tanh(step(scores, addend) / limit)


def position_bias_faults() -> Iterator[Fault]:
    """Faults of what is added to the scores."""
    kind, given = "additive_position_bias", {"applies": asks("bias")}
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
        yield Fault(name, text, steps=lambda _, f=change: {"bias": _other_bias(f)}, **given)
    square = {"applies": lambda p: "bias" in p.options and p.sizes["seq_q"] == p.sizes["seq_k"]}
    yield Fault(kind, "the bias has queries and keys exchanged", steps=lambda _: {"bias": _other_bias(lambda b: b.swapaxes(2, 3))}, **square)
    yield Fault(kind, "the bias is added to the weights, behind the softmax", steps=_bias_behind, **given)
    for text, slopes in _SLOPES:
        yield Fault(kind, text, change=lambda p, f=slopes: p.change(slopes=f(p.options["slopes"])), applies=asks("slopes"))
    for text, distance in _DISTANCES:
        yield Fault(kind, text, steps=lambda _, f=distance: {"linear_bias": _other_distance(f)}, applies=asks("slopes"))


_SLOPES: tuple[tuple[str, Callable[[Array], Array]], ...] = (
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
_DISTANCES: tuple[tuple[str, Callable[[Array, Array], Array]], ...] = (
    ("the bias falls with the position of the key, not with its distance", lambda q, k: k + 0 * q),
    ("the bias grows with the position of the key", lambda q, k: -k + 0 * q),
    ("the distance has a sign: keys behind the query are raised", lambda q, k: q - k),
    ("the distance has a sign: keys before the query are raised", lambda q, k: k - q),
    ("the distance counts from the first query, whatever its position", lambda q, k: np.abs(q - q[:, :1] - k)),
    ("the distance counts from the last query at the last key", lambda q, k: np.abs(q - k + k[..., -1:] - q[:, -1:])),
    ("the distance is off by one", lambda q, k: np.abs(q - k - 1)),
    ("the distance is off by one, the other way", lambda q, k: np.abs(q - k + 1)),
)


def _other_bias(change: Callable[[Array], Any]) -> Callable[..., Array]:
    return lambda _, scores, addend: scores + change(addend)


def _bias_behind(problem: Problem) -> dict[str, Any]:
    addend = problem.options["bias"]
    return {"bias": lambda _, scores, __: scores, "softmax": lambda step, *arrays, **options: step(*arrays, **options) + addend}


def _other_distance(distance: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    return lambda _, slopes, q, k: slopes[:, None, None] * -distance(q[:, None, :, None], k[:, None, None, :]).astype(float)


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
        once = {"applies": lambda p: p.history is None}
        text = f"the keys are padded to a multiple of {tile}, and the padding counts with a score of 0"
        yield Fault(kind, text, steps=lambda p, t=tile: _denominator(lambda _: float(-p.sizes["seq_k"] % t))(p), rank=2, **once)
        shifted = f"the keys are padded to a multiple of {tile}, and the padding counts with the largest score"
        yield Fault(kind, shifted, steps=lambda p, t=tile: _denominator(lambda m: -p.sizes["seq_k"] % t * np.exp(m))(p), rank=3, **once)
        yield from _chunk_faults(tile)
    yield Fault(kind, "the softmax is not normalised", steps=lambda _: {"softmax": lambda _, s, *__, **___: np.exp(_finite(s))})
    shift = {"softmax": lambda _, s, *__, **___: _safe(np.exp(s - _peak(s)))}
    yield Fault(kind, "the softmax is not normalised, but shifted by the largest score", steps=lambda _: shift)
    yield Fault(kind, "the weights of the softmax are squared", steps=lambda _: {"softmax": lambda step, *a, **o: step(*a, **o) ** 2})
    sink = {"applies": asks("sinks")}
    for text, change in (
        ("the sink is left out", lambda s: np.full_like(s, -np.inf)),
        ("the sink counts twice", lambda s: s + math.log(2)),
        ("the sinks are off by one head", lambda s: np.roll(s, 1)),
        ("the sinks are off by one head, the other way", lambda s: np.roll(s, -1)),
        ("the sink of the first head is used for all", lambda s: 0 * s + s[0]),
        ("the sink is subtracted", lambda s: -s),
    ):
        yield Fault(kind, text, change=lambda p, f=change: p.change(sinks=f(p.options["sinks"])), **sink)
    yield Fault(kind, "the sink is added to every score", steps=_sink_on_scores, **sink)
    yield Fault(kind, "the sink is merged into every score, by log(exp(score) + exp(sink))", steps=_sink_in_scores, **sink)
    yield Fault(kind, "the sink is added to the sum without its exponential", steps=_raw_sink, **sink)
    yield Fault(kind, "the sink is scaled as the scores are", change=lambda p: p.change(sinks=p.options["sinks"] * _factor(p)), **sink)


def _finite(scores: Array) -> Array:
    return np.minimum(scores, 700.0)


def _peak(scores: Array) -> Array:
    peak = scores.max(-1, keepdims=True)
    return np.where(np.isfinite(peak), peak, 0.0)


def _safe(x: Array) -> Array:
    return np.nan_to_num(x, nan=0.0)


def _along(axis: tuple[int, ...], empty: float) -> Callable[..., Array]:
    def softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Array:
        peak = scores.max(axis=axis, keepdims=True)
        shares = np.exp(scores - np.where(np.isfinite(peak), peak, 0.0))
        total = shares.sum(axis=axis, keepdims=True)
        return shares / np.where(total == 0, math.nan if math.isnan(empty) else 1.0, total)

    return softmax


def _denominator(more: Callable[[Array], Any]) -> Callable[[Problem], dict[str, Any]]:
    """Add something to the sum of the exponentials, given the largest score."""

    def softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Array:
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
    for text, merge in (
        ("their results are averaged", lambda lse, m, f: 1.0 / lse.shape[0]),
        ("their results are added up", lambda lse, m, f: 1.0),
        ("log-sum-exps are merged with the largest score scaled twice", lambda lse, m, f: _shares(m * f + (lse - m))),
        ("log-sum-exps are merged in another base", lambda lse, m, f: _shares(lse * math.log2(math.e))),
        ("log-sum-exps are merged without the largest score", lambda lse, m, f: _shares(lse - m)),
        ("the last one alone counts", lambda lse, m, f: (np.arange(len(lse)) == len(lse) - 1).reshape(-1, 1, 1, 1, 1)),
        ("the first one alone counts", lambda lse, m, f: (np.arange(len(lse)) == 0).reshape(-1, 1, 1, 1, 1)),
    ):
        yield Fault(
            kind, f"the keys are taken in chunks of {tile}, and {text}",
            steps=lambda p, t=tile, f=merge: {"softmax": _in_chunks(t, f, _factor(p))}, applies=lambda p, t=tile: p.sizes["seq_k"] > t, rank=3,
        )  # fmt: skip
    text = f"the keys are taken in chunks of {tile}, and what came before is not rescaled when the largest score grows"
    yield Fault(kind, text, steps=lambda _, t=tile: {"softmax": _unrescaled(t)}, applies=lambda p, t=tile: p.sizes["seq_k"] > t, rank=3)


def _shares(lse: Array) -> Array:
    shares = np.exp(lse - np.max(lse, axis=0, keepdims=True))
    return shares / shares.sum(0, keepdims=True)


def _in_chunks(tile: int, merge: Callable[[Array, Array, float], Any], factor: float) -> Callable[..., Array]:
    def softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Array:
        parts = [scores[..., chunk] for chunk in _chunks(scores.shape[-1], tile)]
        peaks = np.stack([_peak(part) for part in parts])
        sums = np.stack([np.exp(part - peak).sum(-1, keepdims=True) for part, peak in zip(parts, peaks, strict=True)])
        factors = np.broadcast_to(merge(peaks + np.log(sums), peaks, factor), sums.shape)
        each = zip(parts, peaks, sums, factors, strict=True)
        return np.concatenate([_safe(np.exp(part - peak) / total) * share for part, peak, total, share in each], -1)

    return softmax


def _unrescaled(tile: int) -> Callable[..., Array]:
    def softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Array:
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
    def softmax(_: Any, scores: Array, sinks: Array, **__: Any) -> Array:
        shares = np.exp(scores - _peak(scores))
        return shares / (shares.sum(-1, keepdims=True) + sinks[:, None, None])

    return {"softmax": softmax}


def dropout_faults() -> Iterator[Fault]:
    """Faults of dropout with given survivors."""
    kind, given = "dropout_arithmetic", {"applies": asks("survivors")}
    for text, drop in (
        ("the surviving weights are not raised by 1/(1 - p)", lambda w, s, p: w * s),
        ("the surviving weights are divided by p, not by 1 - p", lambda w, s, p: w * s / p),
        ("the surviving weights are multiplied by 1 - p", lambda w, s, p: w * s * (1 - p)),
        ("the surviving weights are multiplied by p", lambda w, s, p: w * s * p),
        ("the survivors are dropped, and the others stay", lambda w, s, p: w * ~s / (1 - p)),
        ("all weights are raised by 1/(1 - p), and none is dropped", lambda w, s, p: w / (1 - p)),
        ("the surviving weights are normalised again", lambda w, s, p: w * s / np.maximum((w * s).sum(-1, keepdims=True), 1e-300)),
    ):
        yield Fault(kind, text, steps=lambda _, f=drop: {"drop": lambda _, w, s, *, rate: f(w, s, rate)}, **given)
    never = {"drop": lambda _, weights, *__, **___: weights}
    yield Fault("dropout_mode", "nothing is dropped", steps=lambda _: never, **given)


def weights_faults() -> Iterator[Fault]:
    """Faults of the weights that are returned, where the output is right."""
    for text, other in _RETURNED:
        yield Fault(
            "returned_weights", text, after=lambda a, p, f=other: Answer(a.y, f(a.weights, p)), applies=asks("return_weights"),
        )  # fmt: skip


def _dropped(weights: Array, problem: Problem) -> Array:
    survivors = problem.options.get("survivors")
    return weights if survivors is None else weights * survivors / (1 - problem.options["dropout"])


_RETURNED: tuple[tuple[str, Callable[[Array, Problem], Array]], ...] = (
    ("the weights that are returned are those behind dropout", _dropped),
    ("the weights that are returned are the mean of the heads", lambda w, _: w.mean(1)),
    ("the weights that are returned are the mean of the heads", lambda w, _: np.broadcast_to(w.mean(1, keepdims=True), w.shape)),
    ("the weights that are returned are the sum of the heads", lambda w, _: w.sum(1)),
    ("the weights that are returned are those of the first head", lambda w, _: w[:, 0]),
    ("the weights that are returned have queries and keys exchanged", lambda w, _: w.swapaxes(2, 3)),
    ("the weights that are returned have the heads before the samples", lambda w, _: w.swapaxes(0, 1)),
    ("the logarithms of the weights are returned", lambda w, _: np.log(w)),
)


def score_faults() -> list[Fault]:
    """All of these."""
    makers = (scale_faults, cap_faults, position_bias_faults, softmax_faults, dropout_faults, weights_faults)
    return [fault for maker in makers for fault in maker()]
