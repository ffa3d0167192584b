"""A diagnosis: which faults, put into the specification, answer as the implementation does."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np

from .faults.catalogue import CATALOGUE
from .faults.fault import Fault, run
from .faults.fits import fits
from .options import OPTIONS
from .problem import Answer, Crash, Problem
from .rounding import ROUNDINGS
from .verdict import Verdict, ask, judge, reproduces

LAST = 5
"""Faults of this rank and above are tried when nothing else explains what was seen."""


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What explains some of the wrong answers.

    Attributes:
        faults: the faults, all at once.
        condition: when they show, in words; empty for always.
        explained: how many of the wrong answers they reproduce.
        of: how many wrong answers there are.
    """

    faults: tuple[Fault, ...]
    condition: str
    explained: int
    of: int

    @property
    def sentence(self) -> str:
        """What is wrong, so that it fits behind "but"."""
        return "; and ".join(fault.says for fault in self.faults) + (f", {self.condition}" if self.condition else "")


def diagnose(verdicts: Sequence[Verdict], /, *, seconds: float = 8.0) -> tuple[list[Diagnosis], list[Verdict]]:
    """Find the faults that reproduce the wrong answers, and spare the right ones.

    Args:
        verdicts: all verdicts on one implementation, in float64.
        seconds: how long to look for pairs of faults.

    Returns:
        What was found, and the wrong answers that nothing explains.
    """
    left = sorted((verdict for verdict in verdicts if verdict.status != "right"), key=_plainness)
    right = [verdict for verdict in verdicts if verdict.status == "right"]
    found: list[Diagnosis] = []
    unexplained: list[Verdict] = []
    count, end, last = len(left), time.monotonic() + seconds, time.monotonic() + 2 * seconds
    while left and time.monotonic() < last:
        best = _best(left, right, [diagnosis.faults for diagnosis in found], end)
        if best is None:  # no more pairs, and no other answer to the like, but single faults may explain the rest
            end, alike = 0.0, _likeness(left[0])
            unexplained += [verdict for verdict in left if _likeness(verdict) == alike]
            left = [verdict for verdict in left if _likeness(verdict) != alike]
            continue
        faults, explained = best
        condition = _condition(explained, [verdict for verdict in right if _alters(faults, verdict)])
        found.append(Diagnosis(faults, condition, len(explained), count))
        left = [verdict for verdict in left if verdict not in explained]
    return _merged(found), [*unexplained, *left]


def _likeness(verdict: Verdict) -> tuple[frozenset[str], int, int]:
    """Problems that are alike: those that ask for the same, of as many tokens."""
    problem = verdict.question.problem
    return frozenset(problem.options), problem.sizes["seq_q"], problem.sizes["seq_k"]


def _plainness(verdict: Verdict) -> tuple[int, bool, float, int]:
    """How plain a problem is; one query alone comes late, since much cannot be seen in it."""
    problem = verdict.question.problem
    return len(problem.options), problem.sizes["seq_q"] == 1, problem.spread, problem.keys.size


def _merged(found: list[Diagnosis]) -> list[Diagnosis]:
    """Put the same faults under several conditions together, those that explain most first."""
    kept: dict[tuple[str, ...], Diagnosis] = {}
    for diagnosis in found:
        key = tuple(fault.says for fault in diagnosis.faults)
        if key in kept:
            first = kept[key]
            condition = " and ".join(dict.fromkeys(filter(None, (first.condition, diagnosis.condition))))
            kept[key] = Diagnosis(first.faults, condition, first.explained + diagnosis.explained, first.of)
        else:
            kept[key] = diagnosis
    return list(kept.values())


def _best(
    left: list[Verdict], right: list[Verdict], known: list[tuple[Fault, ...]], end: float
) -> tuple[tuple[Fault, ...], list[Verdict]] | None:
    """Find the faults that explain the plainest wrong answer, and as many others as possible."""
    first = left[0]
    if isinstance(first.answer, Crash):
        return None
    for candidates in _candidates(first, known, end):
        if candidates is None and rough_precision(left) is not None:
            return None  # no formula is wrong, numbers are rounded
        fitting = [faults for faults in candidates or () if _explains(faults, first)]
        if fitting:
            scored = [(faults, [verdict for verdict in left if _explains(faults, verdict)]) for faults in fitting[:40]]
            scored = sorted(scored, key=lambda item: (-len(item[1]), len(item[0]), sum(f.rank for f in item[0])))[:8]
            return min(scored, key=lambda item: (_spoilt(item[0], right) - len(item[1]), len(item[0]), _claimed(*item)))
    return None


def _claimed(faults: tuple[Fault, ...], explained: list[Verdict]) -> tuple[int, bool]:
    """How much faults claim; beside others, a fill of dropped keys says more than queries without keys can show."""
    fills = any(fault.kind == "mask_finite_fill" for fault in faults[1:]) and all(v.question.problem.empty_rows.any() for v in explained)
    return sum(fault.rank for fault in faults), fills


def _candidates(first: Verdict, known: list[tuple[Fault, ...]], end: float) -> Iterator[Iterable[tuple[Fault, ...]] | None]:
    """What may explain a wrong answer, the likeliest first; None where it is time to think of rounding instead."""
    usual = sorted((fault for fault in CATALOGUE if fault.rank < LAST), key=lambda fault: fault.rank)
    yield ((fault,) for fault in usual)
    yield (tuple(dict.fromkeys((*base, fault))) for base in known for fault in usual if fault not in base)
    yield ((fault,) for fault in fits(first.question, first.answer))
    yield None
    yield _until(end, combinations([fault for fault in usual if fault.rank <= 2 and _shows(fault, first)], 2))
    yield ((fault,) for fault in CATALOGUE if fault.rank >= LAST)
    yield _until(end, ((*base, *pair) for base in known for pair in combinations([f for f in usual if f.rank <= 1], 2)))


_ROUGHER = {
    "single precision": ROUNDINGS["float64_float32_inside"],
    "operands with the 11 bits of float16 or TF32": ROUNDINGS["tf32"],
    "operands with the 8 bits of bfloat16": ROUNDINGS["float32_bfloat16_inside"],
    "float16 inside": ROUNDINGS["float16"],
    "bfloat16 inside": ROUNDINGS["bfloat16"],
}


def rough_precision(verdicts: Sequence[Verdict], /) -> str | None:
    """Name the first precision below that of the arrays which explains all wrong answers; None where none does."""
    if any(isinstance(verdict.answer, Crash) or not verdict.ratio < np.inf for verdict in verdicts):
        return None
    for name, roundings in _ROUGHER.items():
        if all(judge(ask(v.question.problem, roundings=roundings), v.answer).status != "wrong" for v in verdicts[:12]):
            return name
    return None


def _until(end: float, pairs: Iterable[tuple[Fault, ...]]) -> Iterator[tuple[Fault, ...]]:
    for pair in pairs:
        if time.monotonic() > end:
            return
        yield pair


def _shows(fault: Fault, verdict: Verdict) -> bool:
    """Tell whether a fault by itself would change the answer, but not its shape."""
    mine = run(verdict.question.problem, fault)
    return (
        mine is not None and mine.y.shape == verdict.question.expected.y.shape and not reproduces(verdict.question, mine, _right(verdict))
    )


def _right(verdict: Verdict) -> Answer:
    return verdict.question.expected


def _explains(faults: tuple[Fault, ...], verdict: Verdict) -> bool:
    if isinstance(verdict.answer, Crash):
        return False
    mine = run(verdict.question.problem, *faults)
    return mine is not None and reproduces(verdict.question, verdict.answer, mine)


def _alters(faults: tuple[Fault, ...], verdict: Verdict) -> bool:
    """Tell whether faults would show in a problem."""
    mine = run(verdict.question.problem, *faults)
    return mine is not None and not reproduces(verdict.question, mine, _right(verdict))


def _spoilt(faults: tuple[Fault, ...], right: list[Verdict]) -> int:
    """Count the right answers that the faults would spoil."""
    return sum(_alters(faults, verdict) for verdict in right)


_PLACES: dict[str, Callable[[Problem], bool]] = {
    "where a cache holds tokens": lambda p: bool(p.past),
    "where there are as many queries as keys": lambda p: p.sizes["seq_q"] == p.sizes["seq_k"],
    "where there are fewer queries than keys": lambda p: p.sizes["seq_q"] < p.sizes["seq_k"],
    "where there are more queries than keys": lambda p: p.sizes["seq_q"] > p.sizes["seq_k"],
    "where the numbers of queries and keys differ": lambda p: p.sizes["seq_q"] != p.sizes["seq_k"],
    "where there is more than one query": lambda p: p.sizes["seq_q"] > 1,
    "where there is one query": lambda p: p.sizes["seq_q"] == 1,
    "where queries, keys and values are the same": lambda p: p.keys is p.queries,
    "where a query may attend to no key": lambda p: not p.visible.any(-1).all(),
}


def _condition(explained: list[Verdict], spared: list[Verdict]) -> str:
    """Say what tells the problems in which faults show from those in which they would, but do not."""
    if not spared:
        return ""
    given = {f"where {name} is given": partial(_asks, (name,)) for name in OPTIONS}
    absent = {f"where no {name} is given": partial(_spares, name) for name in OPTIONS}
    both = {f"where {a} and {b} are given": partial(_asks, (a, b)) for a, b in combinations(OPTIONS, 2)}
    for text, test in (given | absent | _PLACES | both).items():
        if all(test(v.question.problem) for v in explained) and not any(test(v.question.problem) for v in spared):
            return text
    return "in some of the problems where it could show"


def _asks(names: tuple[str, ...], problem: Problem) -> bool:
    return all(name in problem.options for name in names)


def _spares(name: str, problem: Problem) -> bool:
    return name not in problem.options
