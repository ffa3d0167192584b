"""Right implementations that look wrong, or that compute the same otherwise: none of them may be called faulty.

Those of PyTorch, JAX, and whole layers stand in files of their own.
"""

import math
from typing import Any

import numpy as np

from attnspec import Heads, Policy, Rotation

from . import negatives_jax, negatives_layers, negatives_torch
from .entry import Entry

LOWEST = float(np.finfo(np.float32).min)


def masked_after_softmax(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Weights of all keys, what is masked away, and the rows brought back to a sum of one.

    The shift is by the largest score that is kept, and none is above it: or else kept weights could all vanish beside a
    dropped one, which is the weakness of this form.
    """
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    peak = (scores if keep is None else np.where(keep, scores, -np.inf)).max(-1, keepdims=True)
    weights = np.exp(np.minimum(scores - peak, 0.0))
    weights /= weights.sum(-1, keepdims=True)
    if keep is not None:
        weights = weights * keep
        weights /= weights.sum(-1, keepdims=True)
    return weights @ values


def interleaved(queries: Any, keys: Any, values: Any, *, positions: Any = None) -> Any:
    """Rotate adjacent channels as complex numbers."""

    def turned(x: Any) -> Any:
        places = np.arange(x.shape[2]) if positions is None else positions[:, None, :]
        angles = np.multiply.outer(places, 10_000.0 ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1]))
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)

    return attend(turned(queries), turned(keys), values)


def halves_by_permutation(queries: Any, keys: Any, values: Any) -> Any:
    """Rotate halves: bring the two channels of each pair side by side, rotate these, and leave them where they are."""

    def side_by_side(x: Any) -> Any:
        width = x.shape[-1]
        return x[..., np.arange(width).reshape(2, width // 2).T.ravel()]

    return interleaved(side_by_side(queries), side_by_side(keys), values)


def shifted_positions(queries: Any, keys: Any, values: Any) -> Any:
    """Count positions from 7: a rotation sees differences alone."""
    places = np.tile(np.arange(7, 7 + max(queries.shape[2], keys.shape[2])), (len(queries), 1))
    turned = [_halves(x, places[:, : x.shape[2]]) for x in (queries, keys)]
    return attend(*turned, values)


def _halves(x: Any, places: Any) -> Any:
    half = x.shape[-1] // 2
    angles = places[:, None, :, None] * 10_000.0 ** (-np.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return np.concatenate([left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)], axis=-1)


def columns_alone(queries: Any, keys: Any, values: Any, *, slopes: Any = None) -> Any:
    """ALiBi by the place of the key alone: under causality that is the distance, but for a number for each row."""
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    if slopes is not None:
        scores = scores + slopes[:, None, None] * np.arange(keys.shape[2])
    scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    return _softmax(scores) @ values


def smoothed_keys(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Take the mean of all keys from each: all scores of a row fall by the same."""
    return attend(queries, keys - keys.mean(2, keepdims=True), values, keep=keep)


def permuted_channels(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Queries and keys with their channels the other way round."""
    return attend(queries[..., ::-1], keys[..., ::-1], values, keep=keep)


def split_scale(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Scale queries and keys by the fourth root each, as ONNX does."""
    root = queries.shape[-1] ** -0.25
    scores = (queries * root) @ (keys * root).mT
    return _softmax(scores if keep is None else np.where(keep, scores, -np.inf)) @ values


def unshifted(queries: Any, keys: Any, values: Any) -> Any:
    """Exponentials of the scores as they are, in float64, which holds them up to scores of 700."""
    weights = np.exp((queries @ keys.mT / math.sqrt(queries.shape[-1])).astype(np.float64))
    return (weights / weights.sum(-1, keepdims=True)).astype(values.dtype) @ values


def division_last(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Divide what was blended, not the weights."""
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    scores = scores if keep is None else np.where(keep, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights @ values) / weights.sum(-1, keepdims=True)


def online(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Blocks of three keys, one after the other, with a running maximum."""
    scale = 1 / math.sqrt(queries.shape[-1])
    peak = np.full((*queries.shape[:3], 1), -np.inf)
    total, found = np.zeros_like(peak), np.zeros((*queries.shape[:3], values.shape[-1]))
    for start in range(0, keys.shape[2], 3):
        block = slice(start, start + 3)
        scores = scale * queries @ keys[:, :, block].mT
        scores = scores if keep is None else np.where(keep[..., block], scores, -np.inf)
        new = np.maximum(peak, scores.max(-1, keepdims=True))
        safe = np.where(np.isfinite(new), new, 0.0)
        weights, faded = np.exp(scores - safe), np.exp(peak - safe)
        total = total * faded + weights.sum(-1, keepdims=True)
        found = found * faded + weights @ values[:, :, block]
        peak = new
    return found / np.where(total > 0, total, 1.0)


def duplicated(queries: Any, keys: Any, values: Any) -> Any:
    """Every key and value twice: each takes half of its share."""
    return attend(queries, np.repeat(keys, 2, axis=2), np.repeat(values, 2, axis=2))


def reversed_keys(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Keys, values and mask the other way round: a blend knows no order."""
    return attend(queries, keys[:, :, ::-1], values[:, :, ::-1], keep=None if keep is None else keep[..., ::-1])


def lowest_fill(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """The lowest number of float32 in place of dropped scores: right where a row keeps a key."""
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    return _softmax(scores if keep is None else np.where(keep, scores, LOWEST)) @ values


def head_by_head(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """One head of one sample after the other."""
    batch, h, seq_q, _ = queries.shape
    found = np.empty((batch, h, seq_q, values.shape[-1]), queries.dtype)
    kept = np.ones((batch, h, seq_q, keys.shape[2]), bool) if keep is None else np.broadcast_to(keep, (batch, h, seq_q, keys.shape[2]))
    for b in range(batch):
        for i in range(h):
            found[b, i] = attend(queries[b, i], keys[b, i], values[b, i], keep=kept[b, i])
    return found


def sequential_single(queries: Any, keys: Any, values: Any) -> Any:
    """Sums in float32, one term after the other."""
    q, k, v = (x.astype(np.float32) for x in (queries, keys, values))
    scores = np.zeros((*q.shape[:3], k.shape[2]), np.float32)
    for channel in range(q.shape[-1]):
        scores += q[..., channel, None] * k[:, :, None, :, channel]
    weights = _softmax(scores / np.float32(math.sqrt(q.shape[-1])))
    found = np.zeros((*q.shape[:3], v.shape[-1]), np.float32)
    for key in range(k.shape[2]):
        found += weights[..., key, None] * v[:, :, None, key]
    return found


def single_inside(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """The softmax in float32, whatever the input is, and the result as wide as the input."""
    scores = (queries @ keys.mT / math.sqrt(queries.shape[-1])).astype(np.float32)
    weights = _softmax(scores if keep is None else np.where(keep, scores, np.float32(-np.inf)))
    return weights.astype(values.dtype) @ values


def sink_in_the_sum(queries: Any, keys: Any, values: Any, *, sinks: Any = None) -> Any:
    """A sink that is a term of the denominator, and no column."""
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    return weights @ values / (total if sinks is None else total + np.exp(sinks[:, None, None] - peak))


def scaled_values(queries: Any, keys: Any, values: Any, *, dropout: Any = 0.0, survivors: Any = None) -> Any:
    """Dropout whose factor stands at the values."""
    weights = _softmax(queries @ keys.mT / math.sqrt(queries.shape[-1]))
    return weights @ values if survivors is None else (weights * survivors) @ (values / (1 - dropout))


def cap_by_exponentials(queries: Any, keys: Any, values: Any, *, keep: Any = None, softcap: Any = None) -> Any:
    """The hyperbolic tangent by exponentials less one."""
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    if softcap is not None:
        less = np.expm1(-2 * np.abs(scores) / softcap)
        scores = -softcap * np.sign(scores) * less / (2 + less)
    return _softmax(scores if keep is None else np.where(keep, scores, -np.inf)) @ values


def attend(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Attention as the formula has it; NaN where a query keeps no key."""
    scores = queries @ keys.swapaxes(-1, -2) / math.sqrt(queries.shape[-1])
    return _softmax(scores if keep is None else np.where(keep, scores, -np.inf)) @ values


def _softmax(scores: Any) -> Any:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


_NAN, _ANY, _TURNED = Policy(empty_row="nan"), Policy(empty_row="any"), Heads(d_model=24, h=3, d_k=8)
_HALF, _ADJACENT = Policy(rotation=Rotation(pairing="half")), Policy(rotation=Rotation(pairing="interleaved"))


def _of(function: Any, policy: Policy | None = None, **more: Any) -> Entry:
    settings = {"library": "numpy", **({} if policy is None else {"policy": policy}), **more}
    return Entry(f"numpy {function.__name__}", lambda: function, "check_attention", settings)


ENTRIES = [
    *(
        _of(function, _NAN)
        for function in (
            masked_after_softmax, smoothed_keys, permuted_channels, split_scale, division_last, reversed_keys, head_by_head,
            single_inside, cap_by_exponentials,
        )
    ),
    *(_of(function) for function in (unshifted, online, duplicated, sequential_single, sink_in_the_sum, scaled_values)),
    _of(lowest_fill, _ANY),
    _of(interleaved, _ADJACENT, heads=_TURNED),
    _of(halves_by_permutation, _HALF, heads=_TURNED),
    _of(shifted_positions, _HALF, heads=_TURNED),
    _of(columns_alone, causal=True),
    *negatives_torch.ENTRIES,
    *negatives_jax.ENTRIES,
    *negatives_layers.ENTRIES,
]  # fmt: skip
