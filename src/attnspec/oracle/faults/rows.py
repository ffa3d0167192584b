"""Faults in what a query gets that may attend to no key."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..problem import Answer, Array, Problem
from .fault import Fault


def row_faults() -> Iterator[Fault]:
    """What a query without keys gets."""
    texts = {
        "nan": "a query that may attend to no key gets NaN",
        "uniform": "a query that may attend to no key gets the mean of all values",
        "unmasked": "a query that may attend to no key attends to all of them, as if there were no mask",
        "zero": "a query that may attend to no key gets zeros",
    }
    for row, text in texts.items():
        yield Fault(
            "fully_masked_row", text, change=lambda p, r=row: replace(p, policy=replace(p.policy, empty_row=r)), applies=_has_empty_row,
            declare=f'policy=Policy(empty_row="{row}"), or "any"',
        )  # fmt: skip
    text = "a query that may attend to no key makes the whole output NaN"
    yield Fault("fully_masked_row", text, after=_all_nan, applies=_has_empty_row, rank=2)
    text = "a query that may attend to no key gets zeros behind the output projection, without its bias"
    yield Fault("fully_masked_row", text, after=_zero_rows, applies=_has_empty_row, rank=2)


def _has_empty_row(problem: Problem) -> bool:
    return not bool(problem.visible.any(-1).all())


def _rows(problem: Problem) -> Array:
    return problem.empty_rows[:, :, None] if problem.is_layer else problem.empty_rows[:, None, :, None]


def _zero_rows(answer: Answer, problem: Problem) -> Answer:
    return Answer(np.where(_rows(problem), 0.0, answer.y), answer.weights)


def _all_nan(answer: Answer, _: Problem) -> Answer:
    return Answer(np.full_like(answer.y, np.nan), answer.weights)
