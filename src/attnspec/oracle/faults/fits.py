"""Faults with a number in them that has to be found: a factor, a fill, something in the sum of the softmax."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import Answer, Array, Crash, Problem
from ..verdict import Question
from .fault import Fault, run
from .rules import RULES
from .scales import FACTORS, rescaled


@dataclass(frozen=True, eq=False)
class _Fit:
    """A family of faults, one for each number.

    Attributes:
        make: makes the fault of a number.
        grid: numbers to begin with.
        applies: whether the family can show in a problem.
    """

    make: Callable[[float, Problem], Fault]
    grid: Array
    applies: Callable[[Problem], bool]


def _default(problem: Problem) -> float:
    return float(problem.sizes["d_k"] ** -0.5)


def _scaled(factor: float, problem: Problem) -> Fault:
    default = _default(problem)
    if abs(factor / default - 1) < 0.01:  # a slip of rounding, not of formula
        text = f"the scores are scaled by a factor that is {factor / default - 1:+.1e} of itself off"
        return Fault("precision_range", text, change=lambda p: rescaled(p, factor / default * _default(p)))
    names = (name for name, (_, rule) in FACTORS.items() if math.isclose(rule(problem.sizes), factor, rel_tol=1e-6))
    text = f"the scores are scaled by {factor:.6g}{''.join(f' = {name}' for name in list(names)[:1])}, not by 1/sqrt(d_k) = {default:.6g}"
    return Fault("scale_wrong_dim", text, change=lambda p: rescaled(p, factor))


def _filled(fill: float, _: Problem) -> Fault:
    steps: Callable[[Problem], dict[str, Any]] = lambda _: {"mask": lambda _, s, keep, **__: np.where(keep, s, fill)}  # noqa: E731
    text = f"dropped keys get a score of {fill:.6g}, not minus infinity, and true scores can be lower"
    return Fault("mask_finite_fill", text, steps=steps)


def _added(fill: float, _: Problem) -> Fault:
    steps: Callable[[Problem], dict[str, Any]] = lambda _: {"mask": lambda _, s, keep, **__: s + fill * ~keep}  # noqa: E731
    return Fault("mask_finite_fill", f"{fill:.6g} is added to the scores of dropped keys, and true scores can differ by more", steps=steps)


def _summed(more: float, shifted: bool) -> Fault:  # noqa: FBT001  # a family of its own each
    def softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Any:
        peak = np.where(np.isfinite(peak := scores.max(-1, keepdims=True)), peak, 0.0)
        shares = np.exp(scores - peak)
        total = shares.sum(-1, keepdims=True) + more * (1.0 if shifted else np.exp(-peak))
        return shares / np.where(total == 0, 1.0, total)

    behind = " after the shift by the largest score" if shifted else ""
    return Fault("softmax_denominator", f"{more:.3g} is added to the sum of the softmax{behind}", steps=lambda _: {"softmax": softmax})


_MASKED: Callable[[Problem], bool] = lambda p: p.is_causal or any(rule in p.options for rule in RULES)  # noqa: E731
_FITS = (
    _Fit(_scaled, np.geomspace(1e-3, 1e2, 60), lambda p: "scale" not in p.options and p.policy.scale is None),
    _Fit(_filled, -np.geomspace(1e-2, 1e6, 60), _MASKED),
    _Fit(_added, -np.geomspace(1e-2, 1e6, 60), _MASKED),
    _Fit(lambda more, _: _summed(more, shifted=True), np.geomspace(1e-12, 1e2, 60), lambda _: True),
    _Fit(lambda more, _: _summed(more, shifted=False), np.geomspace(1e-12, 1e2, 60), lambda _: True),
)


def fits(question: Question, answer: Answer | Crash, /) -> Iterator[Fault]:
    """Find the fault of each family that comes nearest to an answer.

    Args:
        question: the question.
        answer: what was answered.

    Yields:
        Faults, which need not explain it.
    """
    if isinstance(answer, Crash) or answer.y.shape != question.expected.y.shape or not np.isfinite(answer.y[question.promised]).all():
        return
    problem = question.problem
    for family in _FITS:
        if family.applies(problem):
            yield family.make(_nearest(lambda x, f=family: _gap(question, answer, f.make(x, problem)), family.grid), problem)
    yield from _linear(question, answer)


def _gap(question: Question, answer: Answer, fault: Fault) -> float:
    mine = run(question.problem, fault)
    if mine is None or mine.y.shape != answer.y.shape:
        return math.inf
    gap = np.linalg.norm((mine.y - answer.y)[question.promised])
    return math.inf if np.isnan(gap) else float(gap)


def _nearest(gap: Callable[..., float], grid: Array) -> float:
    """Minimise over the logarithm of the size: the best of a grid, then golden sections."""
    best = int(np.argmin([gap(float(x)) for x in grid]))
    sign = math.copysign(1.0, grid[0])
    low, high = (math.log(abs(grid[min(max(index, 0), len(grid) - 1)])) for index in (best - 1, best + 1))
    ratio = (math.sqrt(5) - 1) / 2
    inner = [high - ratio * (high - low), low + ratio * (high - low)]
    values = [gap(sign * math.exp(x)) for x in inner]
    for _ in range(70):
        if values[0] < values[1]:
            high, inner[1], values[1] = inner[1], inner[0], values[0]
            inner[0] = high - ratio * (high - low)
            values[0] = gap(sign * math.exp(inner[0]))
        else:
            low, inner[0], values[0] = inner[0], inner[1], values[1]
            inner[1] = low + ratio * (high - low)
            values[1] = gap(sign * math.exp(inner[1]))
    return sign * math.exp((low + high) / 2)


def _linear(question: Question, answer: Answer) -> Iterator[Fault]:
    """Find a vector that was added to every row, or a factor of the whole output."""
    residual = (answer.y - question.expected.y)[question.promised.all(-1)]
    if len(residual) > 1 and np.ptp(residual, axis=0).max() < 1e-9 * (1 + np.abs(answer.y).max()):
        vector = residual.mean(0)
        yield Fault(
            "projection_bias", "the same vector is added to every row of the output: a bias that is not declared, or one too few",
            after=lambda a, _: Answer(a.y + vector, a.weights) if a.y.shape[-1] == len(vector) else a,
        )  # fmt: skip
    b_o = question.problem.parameters.b_o if question.problem.parameters is not None else None
    bias = 0.0 if b_o is None else b_o
    mine, theirs = question.expected.y - bias, answer.y - bias
    factor = float(np.vdot(mine[question.promised], theirs[question.promised])) / max(float(np.vdot(mine, mine)), 1e-300)
    kind, text = "scale_wrong_place", f"what the heads found is multiplied by {factor:.6g}"
    yield Fault(kind, text, after=lambda a, _: Answer(bias + factor * (a.y - bias), a.weights))
