"""How each step of attention carries errors on; see `errors_fan`."""

from typing import Any

import numpy as np

from ..step import Call
from .errors import Array, Errors, Known, Moved, Rule, Shares, product
from .rounding import Rounding, growth, scatter


def _score(r: Rounding, call: Call, known: Known) -> Errors:
    queries, keys = call.arguments["queries"], call.arguments["keys"]
    p = product(r, (queries, known(queries)), (keys.mT, known(keys).map(lambda e: e.mT)), call.result, more=3)  # what scales them
    worst = p.worst + r.scores * (p.magnitudes + p.worst)  # queries that are scaled before are stored once more
    variance = p.rest + (2 * r.unit**2 + r.scores**2) / 3 * p.squares
    worst, variance = r.store(worst, variance, call.result, r.scores)
    return Errors(worst, variance, p.first)


def _scale(r: Rounding, call: Call, known: Known) -> Errors:
    given, factor = known(call.arguments["scores"]), call.arguments.get("factor")
    factor = call.arguments["d_k"] ** -0.5 if factor is None else abs(factor)
    variance = factor**2 * given.variance + r.unit**2 * call.result**2
    worst, variance = r.store(factor * given.worst, variance, call.result, r.scores)
    return Errors(worst, variance, factor**2 * given.common)


def _cap(r: Rounding, call: Call, known: Known) -> Errors:
    scores, limit = call.arguments["scores"], call.arguments["limit"]
    given, finite = known(scores), np.isfinite(scores)
    scores, bent = np.where(finite, scores, 0.0), np.abs(call.result)
    inside = given.worst + growth(2, r.unit) * (np.abs(scores) + given.worst)
    slope = 1 - np.tanh(np.maximum(np.abs(scores) - inside, 0) / limit) ** 2
    worst = slope * inside + r.exponential * r.unit * limit + growth(1, r.unit) * bent
    steep = np.where(finite, 1 - np.tanh(scores / limit) ** 2, 0.0) ** 2
    third = r.unit**2 / 3
    variance = steep * (given.variance + 2 * third * scores**2) + third * ((r.exponential**2 + 1) * bent**2 + 4 * limit**2)
    worst, variance = r.store(worst, variance, call.result, r.scores)
    return Errors(worst, variance, steep * given.common)


def _bias(r: Rounding, call: Call, known: Known) -> Errors:
    given, of_addend = known(call.arguments["scores"]), known(call.arguments["addend"])
    worst = given.worst + of_addend.worst
    worst = worst + r.unit * (np.abs(call.result) + worst)
    variance = given.variance + of_addend.variance + r.unit**2 / 3 * call.result**2
    worst, variance = r.store(worst, variance, call.result, r.scores)
    return Errors(worst, variance, given.common)


def _linear_bias(r: Rounding, call: Call, _: Known) -> Errors:
    size = np.abs(call.result)
    return Errors(*r.store(r.unit * size, r.unit**2 / 3 * np.stack((size, size)) ** 2, size, r.scores))


def _relative_bias(_: Rounding, call: Call, known: Known) -> Errors:
    del call, known  # what is looked up is as it was
    return Errors()


def _extend_bias(_: Rounding, call: Call, known: Known) -> Errors:
    given, count = known(call.arguments["addend"]), call.result.shape[3]
    if isinstance(given.worst, float):
        return given
    extra = call.arguments["extra"]

    def widened(e: Array) -> Array:
        spread = np.broadcast_to(e, (*e.shape[:-1], count - extra))
        return np.concatenate((spread, np.zeros((*e.shape[:-1], extra))), axis=-1)

    return Errors(widened(given.worst), widened(given.variance))


def _mask(_: Rounding, call: Call, known: Known) -> Errors:
    given, live = known(call.arguments["scores"]), call.arguments["keep"]
    if call.arguments.get("empty_row") == "unmasked":
        live = live | ~live.any(axis=-1, keepdims=True)
    return given.map(lambda e: np.where(live, e, 0.0))


def _softmax(r: Rounding, call: Call, known: Known) -> Errors:
    scores, sinks, given = call.arguments["scores"], call.arguments.get("sinks"), known(call.arguments["scores"])
    kept = np.isfinite(scores)
    worst, variance, common = (np.where(kept, e, 0.0) for e in (given.worst, given.variance, given.common))
    weights, scores = call.result, np.where(kept, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores, kept = np.concatenate((scores, column), axis=-1), np.concatenate((kept, np.isfinite(column)), axis=-1)
        worst, variance, common = (np.concatenate((e, 0 * e[..., :1]), axis=-1) if e.ndim else e for e in (worst, variance, common))
        peak = scores.max(axis=-1, keepdims=True)
        shares = np.exp(scores - peak)
        weights = shares / shares.sum(axis=-1, keepdims=True)
    peak = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    below = np.where(kept, peak - scores, 0.0)
    highest = np.maximum((scores + worst).max(axis=-1, keepdims=True, initial=-np.inf) - peak, 0.0)  # how far off the peak is
    far = below + worst + highest
    worst = worst + r.argument * r.unit * far - np.log1p(-r.exponential * r.unit) + r.peak * r.unit * (np.abs(peak) + highest)
    third = r.unit**2 / 3
    variance = variance + third * (r.argument * below**2 + r.exponential**2 + (r.peak * peak) ** 2)
    if r.scores:  # differences and exponentials are kept narrow too
        worst = worst + r.scores * far - np.log1p(-r.weights)
        variance = variance + (r.scores * below) ** 2 / 3 + r.weights**2 / 3
    worst, variance = np.where(kept, worst, 0.0), np.where(kept, variance, 0.0)
    return Errors(shares=Shares(np.where(np.isfinite(weights), weights, 0.0), kept, worst, variance, common))


def _drop(_: Rounding, call: Call, known: Known) -> Errors:
    shares, raised = known(call.arguments["weights"]).shares, call.arguments["survivors"] / (1 - call.arguments["rate"])
    if shares is None:
        return Errors()
    if shares.weights.shape != raised.shape:
        raised = np.concatenate((raised, 0 * raised[..., :1]), axis=-1)
    return Errors(shares=Shares(shares.weights, shares.kept, shares.worst, shares.variance, shares.common, raised))


def _blend(r: Rounding, call: Call, known: Known) -> Errors:
    values, found, shares = call.arguments["values"], np.nan_to_num(call.result), known(call.arguments["weights"]).shares
    given = known(values)
    off, scattered, values = given.worst + np.zeros(values.shape), given.variance + np.zeros((2, *values.shape)), _finite(values)
    if shares is None:
        weights = _finite(call.arguments["weights"])
        shares = Shares(weights, weights != 0, np.zeros(weights.shape), np.zeros((2, *weights.shape)), 0.0)
    if shares.weights.shape[3] > values.shape[2]:  # the sink has a value of zeros
        off, scattered, values = (np.concatenate((e, 0 * e[..., :1, :]), axis=-2) for e in (off, scattered, values))
    size, a = np.abs(values), shares.weights
    eps = np.minimum(shares.worst, 300.0)  # beyond this, the largest distance bounds it anyway
    least = (a * np.exp(-eps)).sum(axis=-1, keepdims=True)
    least = np.where(least > 0, least, 1.0)
    moved, most = a * np.expm1(eps) / least, np.minimum(a * np.exp(eps) / least, 1.0)
    deviation, own = shares.scattered()
    part, scatters = shares.apart(values, found, np.stack((moved, *(a * deviation)), axis=-1), np.moveaxis(a**2 * own, 0, -1))
    if shares.raised is not None:
        a, most = a * shares.raised, most * shares.raised
    worst = part + _rest_of_blend(r, np.abs(found) + part, most, size, off)
    variance = np.moveaxis(scatters, -1, 0) + a**2 @ scattered + _scatter_of_blend(r, shares, a, values, found)
    worst, variance = r.store(worst, variance, found, r.blended)
    return Errors(worst, variance, moved=Moved(part, moved, values, found, shares))


def _rest_of_blend(r: Rounding, found: Array, most: Array, size: Array, off: Array) -> Any:
    """What values that are off, the sum that divides, the product and kept weights add to the worst case."""
    count, passed = most.shape[3], most @ off
    sum_off = (1 + growth(count, r.unit)) * (1 + (r.weights if r.scores else 0)) - 1
    relative = (1 + sum_off) * ((1 + growth(count + 4, r.unit)) * (1 + r.weights) * (1 + r.operands) ** 2 - 1)
    lost = 2 * r.underflow * (size + off).sum(axis=-2, keepdims=True)
    return passed + sum_off * (found + passed) + relative * (most @ (size + off)) + lost


def _scatter_of_blend(r: Rounding, shares: Shares, a: Array, values: Array, found: Array) -> Any:
    third, squares = r.unit**2 / 3, a**2 @ values**2
    whole = (shares.weights**2).sum(axis=-1, keepdims=True)
    sum_off = scatter(r.unit, a.shape[3], whole, np.ones_like(whole), np.ones_like(whole))
    narrow = r.weights**2 / 3 if r.scores else 0.0
    lost = r.underflow**2 / 3 * (values**2).sum(axis=-2, keepdims=True)
    factors = (r.weights**2 + 2 * r.operands**2) / 3 * squares
    return scatter(r.unit, a.shape[3], squares, found, a @ np.abs(values)) + found**2 * (sum_off + 2 * third + narrow) + factors + lost


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def of_weights(r: Rounding, shares: Shares, weights: Array) -> Errors:
    """Bound the errors of the weights themselves: each is largest where the others' scores err the other way."""
    a, eps = shares.weights, np.minimum(shares.worst, 300.0)
    low, high, third = a * np.exp(-eps), a * np.exp(eps), r.unit**2 / 3
    least, most = (e.sum(axis=-1, keepdims=True) for e in (low, high))
    worst = np.maximum(high / (high + least - low) - a, a - low / (low + most - high))
    deviation, own = shares.scattered()
    deviation, own = a * deviation, a**2 * own
    sums = np.sum(own, axis=-1, keepdims=True)
    variance = (deviation + a * deviation.sum(axis=-1, keepdims=True)) ** 2 + own + a**2 * sums
    variance = variance + a**2 * third * (a.shape[-1] + 2) + a**2 * r.weights**2 / 3 * (1 + (r.scores > 0))
    if shares.raised is not None:
        worst, variance, a = worst * shares.raised, variance * shares.raised**2, a * shares.raised
    stored = 2 if r.scores else 1  # the exponentials, too, where they are kept
    relative = (1 + growth(shares.weights.shape[-1] + 3, r.unit)) * (1 + r.weights) ** stored - 1
    worst, variance = worst + relative * (a + worst) + (1 + relative) * stored * r.underflow, variance + stored * r.underflow**2 / 3
    seq_k = weights.shape[-1]
    return Errors(np.where(shares.kept, worst, 0.0)[..., :seq_k], np.where(shares.kept, variance, 0.0)[..., :seq_k])


ATTEND: dict[str, Rule] = {
    "score": _score,
    "scale": _scale,
    "cap": _cap,
    "linear_bias": _linear_bias,
    "relative_bias": _relative_bias,
    "extend_bias": _extend_bias,
    "bias": _bias,
    "mask": _mask,
    "softmax": _softmax,
    "drop": _drop,
    "blend": _blend,
}
"""The rules of attention, by the name of the step; masks and lots have no errors."""
