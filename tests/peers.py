"""What the comparisons with other projects share: the problem to solve, and when two answers are equal."""

from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

import attnspec
from attnspec import Policy
from attnspec.spec.policy import EmptyRow

# Both sides work in float64. An output is a sum of some 60 products (d_model, d_k, seq_k and h * d_v of them in a row) of
# numbers up to about 4, each rounded by 1.1e-16: at worst 60 * 4 * 1.1e-16 = 2.6e-14, and in fact far less.
DOUBLE = 2e-14

# Both take the softmax in float32, which is declared: they round the scores alike, but each weight is off by some 4 roundings
# of 6e-8 of its size, in e^x, the sum and the quotient, and the output by as much of numbers up to 4: 1e-6.
SOFTMAX = 1e-6

# The peer takes more than the softmax in float32: products, a norm or the angles of a rotation. Scores up to about 10 are off by
# 6e-8 of their size, and so are the weights, one rounding after the other, and an output of weights times numbers up to 4.
SINGLE = 3e-6

# Two conventions that differ at all give outputs that differ, at the worst element, by about their own size, which is 1.
WRONG = 0.1


@dataclass(frozen=True)
class Problem:
    """One call of multi-head attention, as NumPy arrays."""

    x: np.ndarray
    context: np.ndarray
    context_v: np.ndarray
    parameters: attnspec.Parameters
    keep: np.ndarray


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def draw_keep(*shape, seed=0):
    """Draw a mask that leaves each query at least one key."""
    rng = np.random.default_rng([seed, *shape])
    keep = rng.random(shape) < 0.6
    np.put_along_axis(keep, rng.integers(shape[-1], size=(*shape[:-1], 1)), values=True, axis=-1)
    return keep


def draw_problem(heads, *, batch=2, seq_q=5, seq_k=7, bias=True, seed=0):
    """Draw a problem whose scores spread by some units: where all weights are nearly equal, little shows."""
    parameters = attnspec.Parameters.random(heads, seed=seed, bias=bias)
    return Problem(
        x=draw(batch, seq_q, heads.d_model, seed=seed),
        context=draw(batch, seq_k, heads.d_key_in, seed=seed + 1),
        context_v=draw(batch, seq_k, heads.d_value_in, seed=seed + 2),
        parameters=replace(parameters, w_q=parameters.w_q * 2.0),
        keep=draw_keep(batch, heads.h, seq_q, seq_k, seed=seed + 3),
    )


def gap(mine, theirs, /):
    """The largest difference of two results; infinite where only one of them is NaN."""
    mine, theirs = numpy_of(mine), numpy_of(theirs)
    assert mine.shape == theirs.shape, f"{mine.shape} is not {theirs.shape}"
    assert mine.dtype.name == theirs.dtype.name in {"float32", "float64"}, f"{mine.dtype} is not {theirs.dtype}"
    if not np.array_equal(np.isnan(mine), np.isnan(theirs)):
        return np.inf
    return float(np.max(np.abs(np.nan_to_num(mine) - np.nan_to_num(theirs))))


def numpy_of(array: Any, /):
    return np.asarray(array.detach().numpy() if hasattr(array, "detach") else array)


def assert_equal(mine, theirs, /, *, within):
    __tracebackhide__ = True
    found = gap(mine, theirs)
    assert found <= within, f"they differ by {found:.1e}, more than {within:.0e}"


def assert_differs(mine, theirs, /):
    """Hold a wrong convention to being seen: the test that the right one is equal could fail."""
    __tracebackhide__ = True
    found = gap(mine, theirs)
    assert found > WRONG, f"they differ by {found:.1e} only"


def assert_empty_row(expected, theirs, /, compute, *, within, policy=Policy()):  # noqa: B008  # it is frozen
    """Hold the peer to one convention for queries without a key: that is equal, and no other."""
    __tracebackhide__ = True
    gaps = {
        row: gap(compute(replace(policy, empty_row=row)), theirs) for row in get_args(EmptyRow) if row != "any"
    }  # which promises nothing
    assert {row for row, found in gaps.items() if found <= within} == {expected}, f"{expected} should be equal: {gaps}"
    assert all(found > WRONG for row, found in gaps.items() if row != expected), f"only {expected} should be equal: {gaps}"
