"""What a fault is: another way to compute attention, as substitutes of steps and changes of the problem."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ...errors import AttnspecError
from ...step import function_of, substitute
from ..problem import Answer, Problem

Around = Callable[..., Any]
"""A function around a step: takes the step, then the step's own arguments."""


def _always(_: Problem) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Fault:
    """One way in which an implementation can differ from the specification.

    Attributes:
        kind: which kind of fault it is.
        says: what is done, so that it fits behind "Your attention is multi-head attention, but".
        steps: functions around steps, made for a problem.
        change: the problem that is solved instead; None where that cannot be.
        answer: what comes out, where neither steps nor a change say it.
        after: what is done to the answer.
        applies: whether the fault can show in a problem.
        declare: how to declare it where it is meant so.
        rank: the lower, the sooner it is believed among those that explain the same.
    """

    kind: str
    says: str
    steps: Callable[..., Mapping[str, Around]] | None = None
    change: Callable[..., Problem | None] | None = None
    answer: Callable[..., Answer | None] | None = None
    after: Callable[..., Answer] | None = None
    applies: Callable[..., bool] = field(default=_always)
    declare: str = ""
    rank: int = 1


def run(problem: Problem, *faults: Fault) -> Answer | None:
    """Answer a problem as an implementation with these faults would; None where they do not apply."""
    try:
        with np.errstate(all="ignore"):
            return _answer(problem, faults)
    except (AttnspecError, ValueError, IndexError, KeyError, TypeError, AttributeError):  # faults that exclude each other
        return None


def _answer(problem: Problem, faults: tuple[Fault, ...]) -> Answer | None:
    changed: Problem | None = problem
    for fault in faults:
        if changed is None or not fault.applies(problem):
            return None
        changed = changed if fault.change is None else fault.change(changed)
    if changed is None:
        return None
    whole = next((fault.answer for fault in faults if fault.answer is not None), None)
    with substitute(**_substitutes(changed, faults)):
        found = changed.run() if whole is None else whole(changed)
    for fault in faults:
        found = fault.after(found, problem) if found is not None and fault.after is not None else found
    return found


def _substitutes(problem: Problem, faults: tuple[Fault, ...]) -> dict[str, Any]:
    """Put the functions of several faults around each other."""
    found: dict[str, Any] = {}
    for fault in faults:
        for name, around in (fault.steps(problem) if fault.steps is not None else {}).items():
            found[name] = partial(around, found.get(name) or function_of(name, "oracle").__wrapped__)  # type: ignore[attr-defined]
    return found


def asks(*names: str) -> Callable[[Problem], bool]:
    """Tell whether a problem asks for one of these options."""
    return lambda problem: any(name in problem.options or (name == "causal" and problem.is_causal) for name in names)
