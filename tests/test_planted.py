"""Planted faults: a wrong transposition in any step is caught, and every law catches something.

The faults keep the shapes legal wherever that is possible, since a fault that changes a shape is caught by the check of
that shape; this is why it is tried at two sizes. Where all sizes are different primes, a fault that exchanges axes is a
`ShapeError`; where all sizes are equal, every shape stays legal and only the numbers can tell.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import test_laws
import torch
from arrays import EQUAL, PRIMES, Problem, assert_same, draw
from reference import reference

import attnspec
from attnspec import AttnspecError, DtypeError, ShapeError, substitute
from attnspec.arrays import backend_of
from attnspec_docs.laws import laws_of, slug_of

Array = np.ndarray


@dataclass(frozen=True)
class Fault:
    """A wrong version of a step.

    Attributes:
        step: which step it stands in for.
        name: what is wrong.
        function: the wrong version.
        changes_shape: whether the shape of the result is wrong, at sizes that differ.
    """

    step: str
    name: str
    function: Callable[..., Array]
    changes_shape: bool = False

    def __str__(self) -> str:
        return f"{self.step}: {self.name}"


def step_named(name: str) -> Callable[..., Array]:
    """Get the right version of a step."""
    return getattr(attnspec, name)


def swapped(array: Array, i: int, j: int) -> Array:
    """Exchange two axes."""
    return np.ascontiguousarray(array.swapaxes(i, j))


def misread(array: Array, i: int, j: int) -> Array:
    """Exchange two axes in memory but not in the shape: a reshape where a transposition was meant, or the reverse."""
    return swapped(array, i, j).reshape(array.shape)


def first(step: str, change: Callable[[Array], Array]) -> Callable[..., Array]:
    """Run a step on a changed first argument."""
    return lambda array, *rest, **options: step_named(step)(change(array), *rest, **options)


def second(step: str, change: Callable[[Array], Array]) -> Callable[..., Array]:
    """Run a step on a changed second argument."""
    return lambda array, other, *rest, **options: step_named(step)(array, change(other), *rest, **options)


def then(step: str, change: Callable[[Array], Array]) -> Callable[..., Array]:
    """Change the result of a step."""
    return lambda *arrays, **options: change(step_named(step)(*arrays, **options))


# --- wrong projections: the heads are split off in the wrong way


def fused(x: Array, w: Array, b: Array | None) -> Array:
    """Project for all heads at once: batch, seq, h*width, head after head."""
    flat = x @ w.transpose(1, 0, 2).reshape(w.shape[1], -1)
    return flat if b is None else flat + b.ravel()


def split_without_permute(x: Array, w: Array, b: Array | None = None, /) -> Array:
    """Read the fused projection as batch, h, seq, width."""
    return fused(x, w, b).reshape(x.shape[0], w.shape[0], x.shape[1], w.shape[2])


def split_width_before_heads(x: Array, w: Array, b: Array | None = None, /) -> Array:
    """Read the fused projection as batch, seq, width, h."""
    return fused(x, w, b).reshape(*x.shape[:2], w.shape[2], w.shape[0]).transpose(0, 3, 1, 2)


def split_batch_into_heads(x: Array, w: Array, b: Array | None = None, /) -> Array:
    """Permute as if the sequence came first in the fused projection."""
    heads = fused(x, w, b).reshape(x.shape[1], x.shape[0], w.shape[0], w.shape[2])
    return heads.transpose(1, 2, 0, 3)


def biases_reversed(x: Array, w: Array, b: Array | None = None, /) -> Array:
    """Add the bias of one head to another."""
    return x[:, None] @ w + (0 if b is None else b[::-1, None])


def wrong_projections(step: str) -> list[Fault]:
    """List what can go wrong in each of the three projections; a wrong bias of the keys cannot be seen from outside."""
    biases = [Fault(step, "the biases of the heads in reverse order", biases_reversed)] if step != "project_keys" else []
    return [
        *biases,
        Fault(step, "the split into heads without the permutation", split_without_permute),
        Fault(step, "the width split off before the heads", split_width_before_heads),
        Fault(step, "the projection read as sequence-first", split_batch_into_heads),
        Fault(step, "the weight stored transposed", second(step, lambda w: misread(w, 1, 2))),
        Fault(step, "the weight stored with the heads last", second(step, lambda w: misread(misread(w, 0, 1), 1, 2))),
        Fault(step, "the heads of the weight in reverse order", second(step, lambda w: w[::-1])),
        Fault(step, "the input read as sequence-first", first(step, lambda x: misread(x, 0, 1))),
        Fault(step, "the input read as channels-first", first(step, lambda x: misread(x, 1, 2))),
        Fault(step, "the heads after the sequence", then(step, lambda heads: swapped(heads, 1, 2)), changes_shape=True),
        Fault(step, "the sequence after the width", then(step, lambda heads: swapped(heads, 2, 3)), changes_shape=True),
        Fault(step, "the heads before the batch", then(step, lambda heads: swapped(heads, 0, 1)), changes_shape=True),
    ]


def wrong_sharing(step: str) -> list[Fault]:
    """List what can go wrong where the heads of a group share keys or values."""
    return [
        Fault(step, "tiled instead of repeated", lambda heads, /, *, h: np.tile(heads, (1, h // heads.shape[1], 1, 1))),
        Fault(step, "only the first head shared", lambda heads, /, *, h: np.repeat(heads[:, :1], h, axis=1)),
        Fault(step, "the groups in reverse order", then(step, lambda heads: heads[:, ::-1])),
        Fault(step, "repeated along the batch", lambda heads, /, *, h: misread(step_named(step)(heads, h=h), 0, 1)),
        Fault(step, "repeated along the sequence", lambda heads, /, *, h: np.repeat(heads, h // heads.shape[1], axis=2).reshape(
            heads.shape[0], h, *heads.shape[2:])),
            Fault(step, "the heads after the sequence", then(step, lambda heads: swapped(heads, 1, 2)), changes_shape=True),
    ]  # fmt: skip


# --- wrong attention


def shares(scores: Array, axis: int | tuple[int, ...]) -> Array:
    """Compute a softmax along any axes."""
    peak = scores.max(axis=axis, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(peak), peak, 0))
    total = powers.sum(axis=axis, keepdims=True)
    return powers / np.where(total == 0, 1, total)


def softmax_along(axis: int | tuple[int, ...]) -> Callable[..., Array]:
    """Compute a softmax along the wrong axis."""
    return lambda scores, /, *_, **__: shares(scores, axis)


def softmax_without_guard(scores: Array, /, *_: Any, precision: str | None = None) -> Array:
    """Forget that a query may have no key."""
    del precision
    with np.errstate(all="ignore"):
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True)


def softmax_without_shift(scores: Array, /, *_: Any, precision: str | None = None) -> Array:
    """Let large scores overflow."""
    del precision
    with np.errstate(all="ignore"):
        powers = np.exp(scores)
        total = powers.sum(axis=-1, keepdims=True)
        return powers / np.where(total == 0, 1, total)


def softmax_of_the_input(scores: Array, /, *_: Any, precision: str | None = None) -> Array:
    """Use the memory of the scores for the weights."""
    scores[...] = attnspec.softmax(scores, precision=precision)
    return scores


def softmax_in_float64(scores: Any, /, *_: Any, precision: str | None = None) -> Any:
    """Forget to go back to the dtype of the input."""
    return attnspec.softmax(backend_of(scores).astype(scores, "float64"), precision=precision)


def softmax_in_the_dtype_of_the_scores(scores: Array, /, *_: Any, precision: str | None = None) -> Array:
    """Forget the precision asked for."""
    del precision
    return attnspec.softmax(scores)


def scale_by(change: Callable[[int, tuple[int, ...]], float]) -> Callable[..., Array]:
    """Choose another factor from d_k and the shape of the scores; a factor that is given is left alone."""

    def scale(scores: Array, /, *, d_k: int, factor: float | None = None) -> Array:
        return scores * (change(d_k, scores.shape) if factor is None else factor)

    return scale


def causal_by(see: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """Choose another rule for which key a query sees, from the positions of both."""
    return lambda positions_q, positions_k, /: see(positions_q[:, None, :, None], positions_k[:, None, None, :])


def causal_transposed(positions_q: Array, positions_k: Array, /) -> Array:
    """Exchange queries and keys."""
    return swapped(attnspec.keep_causal(positions_k, positions_q), 2, 3)


def counted(count: Callable[[int, int], Array]) -> Callable[..., Array]:
    """Number the tokens in another way, from how many there are and the offset."""
    return lambda tokens, offset=0, /: count(tokens.shape[2], offset)[None, :]


def changed_mask(change: Callable[[Array], Array]) -> Callable[..., Array]:
    """Mask with a mask of which all axes are written out and then changed."""

    def mask(scores: Array, keep: Array, /) -> Array:
        return np.where(change(np.broadcast_to(keep, scores.shape)), scores, -math.inf)

    return mask


def turned_askew(tokens: Array, positions: Array, /, **_: Any) -> Array:
    """Add what must be subtracted, so that pairs of channels do not keep their length."""
    half = tokens.shape[3] // 2
    angle = positions[:, None, :, None] * 10_000.0 ** (-np.arange(half) / half)
    first, second = tokens[..., :half], tokens[..., half:]
    return np.concatenate((first * np.cos(angle) + second * np.sin(angle), first * np.sin(angle) + second * np.cos(angle)), axis=3)


def in_front(heads: Array, extra: Array, /) -> Array:
    """Put extra keys or values before those of the context."""
    return np.concatenate((np.broadcast_to(extra, (len(heads), *extra.shape)), heads), axis=2)


def without_root(tokens: Array, gain: Array | None = None, /, **_: Any) -> Array:
    """Divide by the square of the length."""
    del gain
    return tokens / np.square(tokens).sum(axis=3, keepdims=True)


FAULTS = [
    *wrong_projections("project_queries"),
    *wrong_projections("project_keys"),
    *wrong_projections("project_values"),
    *wrong_sharing("share_keys"),
    *wrong_sharing("share_values"),
    Fault("score", "the keys not transposed but reshaped", lambda q, k, /: q @ k.reshape(*k.shape[:2], k.shape[3], k.shape[2])),
    Fault("score", "keys against queries, read as queries against keys", then("score", lambda s: misread(s, 2, 3))),
    Fault("score", "keys against queries", lambda q, k, /: k @ q.mT, changes_shape=True),
    Fault("score", "the heads after the queries", then("score", lambda s: swapped(s, 1, 2)), changes_shape=True),
    Fault("score", "the heads before the batch", then("score", lambda s: swapped(s, 0, 1)), changes_shape=True),
    Fault("score", "the keys of another head", second("score", lambda k: np.roll(k, 1, axis=1))),
    Fault("score", "the keys of another sequence", second("score", lambda k: np.roll(k, 1, axis=0))),
    Fault("score", "the keys with heads and sequence misread", second("score", lambda k: misread(k, 1, 2))),
    Fault("score", "the queries with heads and sequence misread", first("score", lambda q: misread(q, 1, 2))),
    Fault("score", "every head with every head", lambda q, k, /: np.einsum("bhid,bgjd->bhij", q, k)),
    Fault("scale", "by the square root of h * d_k", scale_by(lambda d_k, shape: (d_k * shape[1]) ** -0.5)),
    Fault("scale", "by the square root of seq_k + 1", scale_by(lambda _, shape: (shape[3] + 1) ** -0.5)),
    Fault("scale", "by d_k", scale_by(lambda d_k, _: 1 / d_k)),
    Fault("scale", "times the square root of d_k", scale_by(lambda d_k, _: d_k**0.5)),
    Fault("scale", "by nothing", scale_by(lambda *_: 1.0)),
    Fault("scale", "the factor left out", lambda scores, /, **_: scores),
    Fault("scale", "queries and keys misread", then("scale", lambda s: misread(s, 2, 3))),
    Fault("scale", "queries and keys exchanged", then("scale", lambda s: swapped(s, 2, 3)), changes_shape=True),
    Fault("mask", "queries and keys of the mask misread", changed_mask(lambda keep: misread(keep, 2, 3))),
    Fault("mask", "heads and queries of the mask misread", changed_mask(lambda keep: misread(keep, 1, 2))),
    Fault("mask", "batch and heads of the mask misread", changed_mask(lambda keep: misread(keep, 0, 1))),
    Fault("mask", "the mask of the first sequence for all", changed_mask(lambda keep: keep[:1])),
    Fault("mask", "the mask of the first head for all", changed_mask(lambda keep: keep[:, :1])),
    Fault("mask", "the mask of the first query for all", changed_mask(lambda keep: keep[:, :, :1])),
    Fault("mask", "True drops", changed_mask(np.logical_not)),
    Fault("mask", "a large number for infinity", lambda scores, keep, /: np.where(keep, scores, -1e9)),
    Fault("mask", "the mask added", lambda scores, keep, /: scores + keep),
    Fault("mask", "zeros instead of minus infinity", lambda scores, keep, /: scores * keep),
    Fault("mask", "the scores with queries and keys exchanged", then("mask", lambda s: swapped(s, 2, 3)), changes_shape=True),
    Fault("softmax", "along the queries", softmax_along(2)),
    Fault("softmax", "along the heads", softmax_along(1)),
    Fault("softmax", "along the batch", softmax_along(0)),
    Fault("softmax", "along queries and keys together", softmax_along((2, 3))),
    Fault("softmax", "along heads and keys together", softmax_along((1, 3))),
    Fault("softmax", "the weights with queries and keys misread", then("softmax", lambda w: misread(w, 2, 3))),
    Fault("softmax", "the weights with queries and keys exchanged", then("softmax", lambda w: swapped(w, 2, 3)), changes_shape=True),
    Fault("softmax", "without a guard for queries that keep no key", softmax_without_guard),
    Fault("softmax", "equal weights for all", first("softmax", lambda scores: np.where(scores > -math.inf, 0.0, scores))),
    Fault("blend", "the weights with queries and keys misread", first("blend", lambda w: misread(w, 2, 3))),
    Fault("blend", "the values with sequence and width misread", second("blend", lambda v: misread(v, 2, 3))),
    Fault("blend", "the values with heads and sequence misread", second("blend", lambda v: misread(v, 1, 2))),
    Fault("blend", "the values of another head", second("blend", lambda v: np.roll(v, 1, axis=1))),
    Fault("blend", "the values of another sequence", second("blend", lambda v: np.roll(v, 1, axis=0))),
    Fault("blend", "the values in reverse order", second("blend", lambda v: v[:, :, ::-1])),
    Fault("blend", "every head with every head", lambda w, v, /: np.einsum("bhij,bgjd->bhid", w, v)),
    Fault("blend", "the result with queries and width misread", then("blend", lambda z: misread(z, 2, 3))),
    Fault("blend", "the result with heads and queries exchanged", then("blend", lambda z: swapped(z, 1, 2)), changes_shape=True),
    Fault("concatenate", "without the permutation", lambda z, /: z.reshape(z.shape[0], z.shape[2], -1)),
    Fault("concatenate", "the width before the heads", lambda z, /: z.transpose(0, 2, 3, 1).reshape(z.shape[0], z.shape[2], -1)),
    Fault("concatenate", "the queries after the width", lambda z, /: z.transpose(0, 1, 3, 2).reshape(z.shape[0], z.shape[2], -1)),
    Fault("concatenate", "the batch after the queries", lambda z, /: z.transpose(2, 0, 1, 3).reshape(z.shape[0], z.shape[2], -1)),
    Fault("concatenate", "the heads in reverse order", first("concatenate", lambda z: z[:, ::-1])),
    Fault("concatenate", "the heads added up", lambda z, /: np.tile(z.sum(axis=1), z.shape[1])),
    Fault("concatenate", "queries and slots exchanged", then("concatenate", lambda z: swapped(z, 1, 2)), changes_shape=True),
    Fault("mix", "w_o stored transposed", second("mix", lambda w: misread(w, 0, 1))),
    Fault("mix", "the rows of w_o in reverse order", second("mix", lambda w: w[::-1])),
    Fault("mix", "queries and slots misread", first("mix", lambda z: misread(z, 1, 2))),
    Fault("mix", "batch and queries misread", first("mix", lambda z: misread(z, 0, 1))),
    Fault("mix", "the output with queries and width misread", then("mix", lambda y: misread(y, 1, 2))),
    Fault("mix", "the output with queries and width exchanged", then("mix", lambda y: swapped(y, 1, 2)), changes_shape=True),
    Fault("mix", "without the bias", lambda z, w, *_: z @ w),
    Fault("keep_causal", "queries and keys exchanged", causal_transposed),
    Fault("keep_causal", "the result with queries and keys exchanged", then("keep_causal", lambda m: swapped(m, 2, 3)), changes_shape=True),
    Fault("keep_causal", "one key too few", causal_by(lambda q, k: k < q)),
    Fault("keep_causal", "the future instead of the past", causal_by(lambda q, k: k >= q)),
    Fault("count_positions", "the offset subtracted", counted(lambda n, o: np.arange(n) - o)),
    Fault("count_positions", "the offset ignored", counted(lambda n, _: np.arange(n))),
    Fault("count_positions", "from the last token on", counted(lambda n, o: o + np.arange(n)[::-1])),
    Fault("keep_both", "either", lambda keep, other, /: keep | other),
    Fault("keep_both", "the first only", lambda keep, other, /: keep & (other | True)),
    Fault("keep_both", "the second only", lambda keep, other, /: other & (keep | True)),
    Fault("keep_both", "the second with queries and keys misread", lambda keep, other, /: keep & misread(other, 2, 3)),
    Fault("keep_both", "the first with heads and queries misread", lambda keep, other, /: misread(keep, 1, 2) & other),
]  # fmt: skip

BESIDES = [
    Fault("keep_causal", "anchored at the last query and key", causal_by(lambda q, k: k - k.max() <= q - q.max())),
    Fault("blend", "broken values left out", lambda w, v, /: w @ np.where(np.isfinite(v), v, 0)),
    Fault("blend", "without a guard for values that nobody sees", lambda w, v, /: w @ v),
    Fault("softmax", "without the shift by the largest", softmax_without_shift),
    Fault("softmax", "in the memory of its argument", softmax_of_the_input),
    Fault("softmax", "the sink left out", lambda scores, sinks=None, /, **options: attnspec.softmax(scores, **options)),
    Fault("softmax", "the precision ignored", softmax_in_the_dtype_of_the_scores),
    Fault("project_keys", "a bias of its own", then("project_keys", lambda k: k + np.arange(k.shape[2])[:, None])),
    Fault("score", "the square of the distance", lambda q, k, /: -np.square(q[:, :, :, None] - k[:, :, None]).sum(axis=4)),
    Fault("scale", "the scores squared", then("scale", lambda s: s * np.abs(s))),
    Fault("blend", "the values squared", second("blend", np.square)),
    Fault("blend", "the size of the values forgotten", then("blend", lambda z: z / (1 + np.square(z).sum(axis=3, keepdims=True)))),
    Fault("mix", "a linear map in float32", then("mix", lambda y: y.astype(np.float32).astype(y.dtype))),
    Fault("normalise", "by the square of the length", without_root),
    Fault("rotate", "the sine added", turned_askew),
    Fault("rotate", "from position 1 on", second("rotate", lambda at: at + 1)),
    Fault("cap", "left out", lambda scores, /, *, limit: scores + 0 * limit),
    Fault("bias", "subtracted", second("bias", np.negative)),
    Fault("extend_bias", "the extra keys in front", then("extend_bias", lambda b: b[..., ::-1])),
    Fault("extend_keys", "the extra keys in front", in_front),
    Fault("extend_values", "the extra values in front", in_front),
    Fault(
        "keep_extra", "the extra keys dropped", lambda keep, /, *, extra: np.concatenate((keep, keep[..., :1].repeat(extra, 3) & False), 3)
    ),
    Fault(
        "keep_window",
        "left and right exchanged",
        lambda q, k, /, *, left=None, right=None: attnspec.keep_window(q, k, left=right, right=left),
    ),
    Fault("keep_lengths", "one key too many", second("keep_lengths", lambda n: n + 1)),
    Fault("keep_documents", "those before, too", lambda q, k, /: q[:, None, :, None] >= k[:, None, None, :]),
    Fault("number_documents", "one token too early", first("number_documents", lambda cumulative: cumulative - 1)),
    Fault("count_in_documents", "from the last token on", then("count_in_documents", lambda at: at[:, ::-1])),
    Fault("append_to_cache", "what was before forgotten", first("append_to_cache", lambda cached: 0 * cached)),
    Fault("append_to_cache", "the new tokens in front", lambda cached, new, /: np.concatenate((new, cached), axis=2)),
    Fault(
        "draw_survivors",
        "at the rate of those that survive",
        lambda weights, /, *, rate, generator: attnspec.draw_survivors(weights, rate=1 - rate, generator=generator),
    ),
    Fault("drop", "divided by the rate", lambda weights, survivors, /, *, rate: np.where(survivors, weights / rate, 0)),
    Fault("drop", "multiplied by the survivors", lambda weights, survivors, /, *, rate: weights * survivors / (1 - rate)),
    Fault("gate", "added", lambda blended, gates, /: blended + gates[:, None, None]),
    Fault("linear_bias", "along one direction", lambda slopes, q, k, /: slopes[:, None, None] * (k[:, None, None] - q[:, None, :, None])),
    Fault("linear_bias", "from the position of the key", second("linear_bias", lambda q: q * 0)),
    Fault("relative_bias", "from the position of the key", second("relative_bias", lambda q: q * 0)),
    Fault("relative_bias", "the buckets in another order", first("relative_bias", lambda table: np.roll(table, 1, axis=0))),
]
"""Faults that are no transpositions, so that every law has something to catch."""

every_fault = pytest.mark.parametrize("fault", [*FAULTS, *BESIDES], ids=str)
every_transposition = pytest.mark.parametrize("fault", FAULTS, ids=str)

MASKS = {"masked": True, "causal": True, "offset": 2}
DIFFERENT = draw(**PRIMES | MASKS | {"group": 2})
SAME = draw(**EQUAL | MASKS)

STEPS = list(DIFFERENT.steps())
"""The steps that every layer has; transpositions in those that an option asks for are planted in test_planted_options.py."""


def check(problem: Problem) -> None:
    """Compare the output, and nothing that is closer to the fault, with the einsum reference."""
    value, error = reference(problem)["mix"]
    assert_same(problem.run(), value, within=2 * error)


def laws() -> dict[str, Callable[[], None]]:
    """Collect the laws, each on one problem with sizes that differ."""
    found = {}
    for name, test in vars(test_laws).items():
        if name.startswith("test_") and hasattr(test, "fixed") and not hasattr(test, "pytestmark"):
            problem = draw(**PRIMES | MASKS | {"group": 2} | test.fixed)
            found[name] = functools.partial(test.hypothesis.inner_test, problem)
    return found


LAWS = laws()
WITH_TORCH = {name: LAWS.pop(name) for name in list(LAWS) if name.endswith("gradients")}  # the faults above are written in NumPy


def broken_by(fault: Fault, law: str) -> bool:
    """Tell whether a law does not hold under a fault; a warning is an error here."""
    try:
        with substitute(**{fault.step: fault.function}):
            LAWS[law]()
    except (AssertionError, AttnspecError, RuntimeWarning, ValueError):
        return True
    return False


@every_transposition
def test_a_wrong_transposition_is_caught_where_sizes_differ(fault: Fault) -> None:
    """By the check of shapes, if it changes a shape, and else by the numbers."""
    with substitute(**{fault.step: fault.function}):
        if fault.changes_shape:
            with pytest.raises(ShapeError, match=f"^{fault.step}: its result"):
                DIFFERENT.run()
        else:
            DIFFERENT.run()
            with pytest.raises(AssertionError, match="elements are wrong"):
                check(DIFFERENT)


@every_transposition
def test_a_wrong_transposition_is_caught_where_sizes_are_equal(fault: Fault) -> None:
    """By the numbers, unless the exchanged axes are the few that differ even here."""
    with substitute(**{fault.step: fault.function}), pytest.raises((AssertionError, ShapeError), match=r"elements are wrong|its result"):
        check(SAME)


@pytest.mark.parametrize("problem", [DIFFERENT, SAME], ids=["sizes differ", "sizes are equal"])
def test_nothing_is_caught_where_nothing_is_planted(problem: Problem) -> None:
    """Nor where a step is replaced by itself."""
    check(problem)
    with substitute(**{name: step_named(name) for name in STEPS}):
        check(problem)


@every_fault
def test_some_law_catches_the_fault(fault: Fault) -> None:
    """Without the reference."""
    assert any(broken_by(fault, law) for law in LAWS)


@pytest.mark.parametrize("law", LAWS)
def test_every_law_catches_some_fault(law: str) -> None:
    """And holds where none is planted: a law that cannot be broken says nothing."""
    LAWS[law]()
    assert any(broken_by(fault, law) for fault in [*BESIDES, *FAULTS])


FAULTS_IN_TORCH: dict[str, dict[str, Callable[..., Any]]] = {
    "test_a_query_without_a_key_has_zero_gradients": {  # a guard that comes too late: the output is right, but NaN has gone through
        "mask": lambda scores, keep, /: scores + torch.zeros_like(scores).masked_fill(~keep, -math.inf),
        "softmax": lambda scores, /, **_: torch.nan_to_num(torch.softmax(scores, -1)),
    },
    "test_a_dropped_key_that_is_broken_has_exactly_no_influence_on_gradients": {  # clean forward, but 0 * NaN backward
        "score": lambda queries, keys, /: queries @ keys.mT,
    },
    "test_a_dropped_key_has_exactly_no_influence_on_gradients": {  # not enough against 1e30
        "mask": lambda scores, keep, /: scores - 1e9 * ~keep,
    },
}


@pytest.mark.parametrize("law", WITH_TORCH)
def test_every_law_of_gradients_catches_a_fault(law: str) -> None:
    """And holds where none is planted."""
    WITH_TORCH[law]()
    with substitute(**FAULTS_IN_TORCH[law]), pytest.raises(AssertionError, match="the gradient for"):
        WITH_TORCH[law]()


CLAIMS = [(step, law) for step in attnspec.step._steps for law in map(slug_of, laws_of(step_named(step)))]


@pytest.mark.parametrize(("step", "law"), CLAIMS)
def test_a_law_that_a_step_claims_is_broken_by_a_fault_of_that_step(step: str, law: str) -> None:
    """So no docstring claims a law that has nothing to do with its step."""
    if (name := f"test_{law}") in WITH_TORCH:
        assert step in FAULTS_IN_TORCH[name]
    else:
        assert any(broken_by(fault, name) for fault in [*BESIDES, *FAULTS] if fault.step == step)


@pytest.mark.parametrize(
    ("library", "dtype"),
    [("numpy", "float16"), ("numpy", "float32"), ("torch", "float16"), ("torch", "bfloat16"), ("torch", "float32")],
)  # NumPy's bfloat16 is left by every product, so there the steps are brought back
def test_a_step_that_leaves_the_dtype_is_caught(library: str, dtype: str) -> None:
    """By the check of the step itself, or by the law."""
    law = functools.partial(test_laws.test_every_step_keeps_the_dtype_of_the_input.hypothesis.inner_test, library, dtype)
    law(DIFFERENT)
    with substitute(softmax=softmax_in_float64), pytest.raises((AssertionError, DtypeError)):
        law(DIFFERENT)


def test_every_step_has_a_planted_transposition() -> None:
    """So no step is added without one."""
    assert {fault.step for fault in FAULTS} == set(STEPS)
