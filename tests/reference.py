"""Multi-head attention once more, written with einsum, with a bound on the rounding error of each element.

The bound is the worst case of Higham, "Accuracy and Stability of Numerical Algorithms" (2002), chapter 3: a sum of n
products, in any order, is off by at most gamma(n) times the sum of the absolute products, gamma(n) = n u / (1 - n u). It
is carried from step to step with the sizes and the numbers at hand, so nothing in it is chosen but the accuracy of exp.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from arrays import Problem

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The unit roundoff of each dtype."""

_TINY = {UNIT["float64"]: 2.0**-1022, UNIT["float32"]: 2.0**-126, UNIT["float16"]: 2.0**-24, UNIT["bfloat16"]: 2.0**-126}
"""What a dtype may round to zero: its smallest normal number; of float16, which nobody flushes, its smallest at all."""

_EXP = 8
"""The accuracy of exp, in units of roundoff: 4 ulp, the loosest that the libraries promise."""


class Bounded(NamedTuple):
    """Numbers, and how far off each may be."""

    value: np.ndarray
    error: np.ndarray


def exact(array: Any) -> Bounded:
    """Take numbers as they are."""
    value = np.asarray(array, np.float64)
    return Bounded(value, np.zeros_like(value))


def gamma(n: int, unit: float) -> float:
    """Bound the relative error of n roundings."""
    return n * unit / (1 - n * unit)


def product(subscripts: str, a: Bounded, b: Bounded, *, n: int, unit: float) -> Bounded:
    """Multiply and add up, n products for each result."""
    larger = np.abs(a.value) + a.error, np.abs(b.value) + b.error
    carried = np.einsum(subscripts, a.error, larger[1]) + np.einsum(subscripts, np.abs(a.value), b.error)
    return Bounded(np.einsum(subscripts, a.value, b.value), carried + gamma(n, unit) * np.einsum(subscripts, *larger))


def plus(a: Bounded, b: np.ndarray | None, unit: float) -> Bounded:
    """Add a bias, if there is one."""
    if b is None:
        return a
    value = a.value + b
    return Bounded(value, a.error + unit * (np.abs(value) + a.error))


def softmax(scores: Bounded, unit: float) -> Bounded:
    """Share out; a row of minus infinities gives zeros.

    An error e of a score is a factor exp(e) of its share; the total has such a factor too, and the subtraction of the
    peak adds one rounding of the difference.
    """
    kept = scores.value > -math.inf
    peak = np.max(np.where(kept, scores.value, -1e300), axis=-1, keepdims=True)
    below = np.where(kept, scores.value - peak, 0.0)
    shares = np.exp(below) * kept
    value = shares / np.maximum(shares.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    worst = np.max(scores.error, axis=-1, keepdims=True)
    exponent = np.where(kept, scores.error + unit * (np.abs(below) + 2 * worst), 0.0)
    factor = np.expm1(exponent + exponent.max(axis=-1, keepdims=True))
    rounding = gamma(kept.shape[-1] + 2 * _EXP + 3, unit)
    tiny = next(_TINY[known] for known in sorted(_TINY, reverse=True) if known <= unit)
    return Bounded(value, value * (factor + rounding * (1 + factor)) + tiny * kept)


def attended(
    queries: Bounded, keys: Bounded, values: Bounded, seen: np.ndarray, *, scale: float | None, unit: float = UNIT["float64"]
) -> dict[str, Bounded]:
    """Attend: every step by its name."""
    d_k, seq_k = queries.value.shape[-1], keys.value.shape[-2]
    score = product("bhid,bhjd->bhij", queries, keys, n=d_k, unit=unit)
    factor = d_k**-0.5 if scale is None else scale
    scaled = Bounded(score.value * factor, abs(factor) * (score.error + 2 * unit * (np.abs(score.value) + score.error)))
    masked = Bounded(np.where(seen, scaled.value, -math.inf), np.where(seen, scaled.error, 0.0))
    weights = softmax(masked, unit)
    blended = product("bhij,bhjd->bhid", weights, values, n=seq_k, unit=unit)
    return {"score": score, "scale": scaled, "mask": masked, "softmax": weights, "blend": blended}


def reference(problem: Problem, unit: float = UNIT["float64"]) -> dict[str, Bounded]:
    """Compute every step, and bound the error of one computation with this unit roundoff.

    Args:
        problem: NumPy arrays of any floating-point dtype.
        unit: the unit roundoff of the computation that is bounded; the sum of two, to bound their distance.

    Returns:
        The result of each step, whether the problem needs it or not, with an error for each element.
    """
    parameters = problem.parameters
    context = problem.x if problem.context is None else problem.context
    sources = problem.x, context, context if problem.context_v is None else problem.context_v
    projected = [
        plus(product("bsd,hde->bhse", exact(x), exact(w), n=w.shape[1], unit=unit), None if b is None else np.float64(b)[:, None], unit)
        for x, w, b in zip(
            sources,
            (parameters.w_q, parameters.w_k, parameters.w_v),
            (parameters.b_q, parameters.b_k, parameters.b_v),
            strict=True,
        )
    ]
    h, h_kv = parameters.w_q.shape[0], parameters.w_k.shape[0]
    owner = [i // (h // h_kv) for i in range(h)]
    shared = [Bounded(x.value[:, owner], x.error[:, owner]) for x in projected[1:]]
    steps = dict(zip(("project_queries", "project_keys", "project_values"), projected, strict=True))
    steps |= dict(zip(("share_keys", "share_values"), shared, strict=True))
    steps |= attended(projected[0], *shared, problem.seen, scale=problem.options["scale"], unit=unit)
    found = steps["blend"]
    steps["concatenate"] = Bounded(*(np.concatenate([array[:, i] for i in range(h)], axis=-1) for array in found))
    mixed = product("bsc,cd->bsd", steps["concatenate"], exact(parameters.w_o), n=parameters.w_o.shape[0], unit=unit)
    steps["mix"] = plus(mixed, None if parameters.b_o is None else np.float64(parameters.b_o), unit)
    return steps


def rounding(*problems: Problem) -> np.ndarray:
    """Add up how far the results of several float64 computations may be off, at worst."""
    return sum(reference(problem)["mix"].error for problem in problems)


def rounding_of_attend(problem: Problem, **inexact: Bounded) -> np.ndarray:
    """Bound the error of attention alone in float64, some of whose arguments may be off before it starts."""
    queries, keys, values = (inexact.get(name, exact(getattr(problem, name))) for name in ("queries", "keys", "values"))
    return attended(queries, keys, values, problem.seen, scale=problem.options["scale"])["blend"].error
