"""A verdict on one answer: within what rounding explains, beyond it, or in between."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from .problem import Answer, Array, Crash, Problem, rounded
from .subject import Subject
from .tolerance import ROUNDINGS, Rounding, Tolerance, tolerance

Status = Literal["right", "suspect", "wrong"]

DIFFUSE = 1.3
"""Above this root mean square of the errors, in standard deviations, an answer is suspect; right ones reach 1.0."""


@dataclass(frozen=True, eq=False)
class Question:
    """A problem in a precision, with the specification's answer and how far another may be off.

    Attributes:
        problem: the problem, in numbers that the precision holds.
        precision: the dtype in which it is put.
        expected: the specification's answer.
        tolerance: how far an answer may be off.
        roundings: what the tolerance was derived from.
        weights_limit: how far weights may be off; None where they are not asked for.
    """

    problem: Problem
    precision: str
    expected: Answer
    tolerance: Tolerance
    roundings: tuple[Rounding, ...]
    weights_limit: Array | None = None

    @cached_property
    def promised(self) -> Array:
        """For which elements of the output something is promised."""
        shape = self.expected.y.shape
        if self.problem.policy.empty_row != "any":
            return np.ones(shape, bool)
        empty = np.any(~np.any(self.problem.visible, axis=-1), axis=1)  # batch and query
        return np.broadcast_to(~(empty[:, :, None] if self.problem.is_layer else empty[:, None, :, None]), shape)

    @cached_property
    def limit(self) -> Array:
        """How far each element may be off: six standard deviations, or what is possible at all if that is less."""
        return self.tolerance.drawn


def ask(problem: Problem, /, *, precision: str = "float64", roundings: tuple[Rounding, ...] | None = None) -> Question:
    """Put a problem in a precision, and let the specification answer it."""
    problem = rounded(problem, precision)
    roundings = ROUNDINGS[precision] if roundings is None else roundings
    expected, steps = problem.traced()
    weights = _positive(tolerance(steps, roundings, of="softmax").worst) if "return_weights" in problem.options else None
    return Question(problem, precision, expected, tolerance(steps, roundings), roundings, weights)


@dataclass(frozen=True, eq=False)
class Verdict:
    """What is to be thought of one answer.

    Attributes:
        question: what was asked.
        answer: what came.
        status: `right` within the tolerance, `wrong` beyond what any evaluation could give, else `suspect`.
        reason: what is wrong where it is no matter of numbers.
        ratio: the largest error, in units of its tolerance.
    """

    question: Question
    answer: Answer | Crash
    status: Status
    reason: str = ""
    ratio: float = 0.0

    @property
    def error(self) -> Array | None:
        """By how much each element is off, in units of its tolerance; None where there are no numbers."""
        if isinstance(self.answer, Crash) or self.answer.y.shape != self.question.expected.y.shape:
            return None
        with np.errstate(over="ignore"):
            return np.where(self.question.promised, _off(self.answer.y, self.question) / _positive(self.question.limit), 0.0)


def judge(question: Question, answer: Answer | Crash, /) -> Verdict:
    """Judge an answer."""
    expected = question.expected
    if isinstance(answer, Crash):
        return Verdict(question, answer, "wrong", f"it raised {answer.error}", np.inf)
    if answer.y.shape != expected.y.shape:
        return Verdict(question, answer, "wrong", f"its output has the shape {answer.y.shape}, not {expected.y.shape}", np.inf)
    if reason := _weights_wrong(question, answer):
        return Verdict(question, answer, "wrong", reason, np.inf)
    off, promised, limit = _off(answer.y, question), question.promised, _positive(question.limit)
    if not promised.any():
        return Verdict(question, answer, "right")
    with np.errstate(over="ignore"):
        ratio = float(np.max(off[promised] / limit[promised]))
    if not np.isfinite(ratio) or np.any(off[promised] > _positive(question.tolerance.worst)[promised]):
        return Verdict(question, answer, "wrong", "", ratio)
    sigma = _positive(question.tolerance.sigma)[promised]
    diffuse = promised.sum() >= 30 and np.sqrt(np.mean(np.square(off[promised] / sigma))) > DIFFUSE
    return Verdict(question, answer, "suspect" if ratio > 1 or diffuse else "right", "", ratio)


def settled(verdicts: list[Verdict], /) -> list[Verdict]:
    """Make up the mind about suspect answers: right code gives few of them, and each was asked with numbers of its own."""
    suspect = sum(verdict.status == "suspect" for verdict in verdicts)
    status: Status = "wrong" if suspect > len(verdicts) / 2 else "right"
    return [replace(verdict, status=status) if verdict.status == "suspect" else verdict for verdict in verdicts]


def reproduces(question: Question, theirs: Answer | Crash, mine: Answer, /) -> bool:
    """Tell whether an answer is what a hypothesis says, to within the tolerance of the question."""
    if isinstance(theirs, Crash) or theirs.y.shape != mine.y.shape:
        return False
    if mine.y.shape != question.expected.y.shape:
        return bool(np.allclose(theirs.y, mine.y, rtol=0, atol=np.max(question.tolerance.worst), equal_nan=True))
    if not _same_weights(question, theirs, mine):
        return False
    promised = question.promised
    if not promised.any():
        return True
    deviation = _distance(theirs.y, question.expected.y)[promised]
    largest = np.max(deviation[np.isfinite(deviation)], initial=0.0)
    size = np.max(np.abs(mine.y[promised & np.isfinite(mine.y)]), initial=1.0)
    slack = min(1e-8 * size, 1e-3 * largest) if largest > 0 else 0.0
    return bool(np.all(_distance(theirs.y, mine.y)[promised] <= np.maximum(10 * _positive(question.limit)[promised], slack)))


def _same_weights(question: Question, theirs: Answer, mine: Answer) -> bool:
    """Tell whether the weights too are what a hypothesis says, where they were asked for."""
    if "return_weights" not in question.problem.options:
        return True
    if theirs.weights is None or mine.weights is None or theirs.weights.shape != mine.weights.shape:
        return theirs.weights is mine.weights
    return bool(np.all(_distance(theirs.weights, mine.weights) <= 1e-6))


def answered(subject: Subject, question: Question, /) -> Verdict:
    """Put a question to an implementation and judge what it answers."""
    return judge(question, subject.answer(question.problem, precision=question.precision))


def _weights_wrong(question: Question, answer: Answer) -> str:
    if "return_weights" not in question.problem.options:
        return ""
    wanted = question.expected.weights
    if answer.weights is None:
        return "it was asked for the weights and returned none"
    if wanted is None or answer.weights.shape != wanted.shape:
        return f"its weights have the shape {answer.weights.shape}, not {wanted.shape if wanted is not None else None}"
    free = question.problem.policy.empty_row == "any"
    rows = ~np.any(question.problem.visible, axis=-1) if free else np.zeros(wanted.shape[:-1], bool)
    off = np.where(rows[..., None], 0.0, _distance(answer.weights, wanted))
    limit = np.inf if question.weights_limit is None else question.weights_limit
    return "its weights are not those of the output" if np.any(off > limit) else ""


def _off(y: Array, question: Question) -> Array:
    return _distance(y, question.expected.y)


def _distance(theirs: Array, mine: Array) -> Array:
    """The distance of two numbers: none where both are NaN or the same infinity, infinite where only one is finite."""
    with np.errstate(invalid="ignore"):
        off = np.abs(theirs - mine)
    same = (np.isnan(theirs) & np.isnan(mine)) | (theirs == mine)
    distance: Array = np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))
    return distance


def _positive(limit: Array) -> Array:
    positive: Array = np.maximum(np.nan_to_num(limit, nan=np.inf, posinf=np.inf), np.finfo(float).tiny)
    return positive
