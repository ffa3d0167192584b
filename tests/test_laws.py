"""The laws of multi-head attention, each as a property of random problems.

"The same" means bit for bit, unless a law changes the order of a sum or the shape of a matrix product. Then the two
sides may differ by the worst-case rounding errors of both, which `reference.py` bounds for each element.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
from arrays import POISONS, Library, Problem, assert_same, problems, unwrap
from hypothesis import given
from reference import UNIT, Bounded, exact, gamma, reference, rounding, rounding_of_attend, softmax

import attnspec
from attnspec import Parameters

EPS = UNIT["float64"]
several = st.integers(2, 4)


def law(**settings: Any) -> Callable[[Callable[[Problem], None]], Callable[[], None]]:
    """Make a statement about a problem a test on random problems; some settings may be fixed."""

    def decorate(statement: Callable[[Problem], None]) -> Callable[[], None]:
        test = given(problem=problems(**settings))(statement)
        test.fixed = {name: value for name, value in settings.items() if not isinstance(value, st.SearchStrategy)}
        return test

    return decorate


def poisoned(array: np.ndarray, place: Any, poison: float) -> np.ndarray:
    """Put a number where nobody should look."""
    copy = array.copy()
    copy[place] = poison
    return copy


def picked(parameters: Parameters, heads: Any, groups: Any) -> dict[str, Any]:
    """Pick query heads with their blocks of w_o, and key/value heads."""
    p = parameters
    blocks = p.w_o.reshape(p.w_q.shape[0], -1, p.w_o.shape[1])[heads]
    chosen = {"w_q": p.w_q[heads], "w_k": p.w_k[groups], "w_v": p.w_v[groups], "w_o": blocks.reshape(-1, p.w_o.shape[1])}
    biases = {} if p.b_q is None else {"b_q": p.b_q[heads], "b_k": p.b_k[groups], "b_v": p.b_v[groups]}
    return chosen | biases


def gradients(problem: Problem, function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Differentiate the sum of a function of the output by all arguments that go through the heads, which are all but `b_o`."""
    tensors = problem.map(Library.TORCH.wrap)
    names = ("x", "context", "context_v", "w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v")
    leaves = {name: array.requires_grad_() for name, array in tensors.arrays().items() if name in names}
    return dict(zip(leaves, torch.autograd.grad(function(tensors.run()).sum(), list(leaves.values())), strict=True))


# --- what may be reordered


@law(h_kv=several)
def test_permuting_the_heads_and_their_blocks_of_w_o_together_changes_nothing(problem: Problem) -> None:
    """Heads have no order of their own; those of a group stay together."""
    h, h_kv = problem.queries.shape[1], problem.parameters.w_k.shape[0]
    groups = problem.rng.permutation(h_kv)
    heads = (groups[:, None] * (h // h_kv) + problem.rng.permutation(h // h_kv)).ravel()
    other = problem.but(**picked(problem.parameters, heads, groups))
    if problem.keep is not None:
        other = other.but(keep=problem.keep[:, heads])
    assert_same(other.run(), problem.run(), within=rounding(problem, other))


@law(seq_k=several)
def test_the_order_of_the_keys_is_irrelevant(problem: Problem) -> None:
    """Keys, values and the mask may be permuted together."""
    problem = problem.unrolled()
    order = problem.rng.permutation(problem.keys.shape[2])
    other = problem.but(context=problem.context[:, order], context_v=problem.context_v[:, order], keep=problem.keep[..., order])
    assert_same(other.run(), problem.run(), within=rounding(problem, other))


@law(seq_q=several)
def test_permuting_the_queries_permutes_the_output(problem: Problem) -> None:
    """Each position asks for itself."""
    problem = problem.unrolled()
    order = problem.rng.permutation(problem.x.shape[1])
    other = problem.but(x=problem.x[:, order], keep=problem.keep[:, :, order])
    assert_same(other.run(), problem.run()[:, order], within=rounding(problem)[:, order] + rounding(other))


# --- what has no influence


@law(batch=several)
def test_other_sequences_of_the_batch_have_exactly_no_influence(problem: Problem) -> None:
    """Nothing that stands in one sequence gets into another."""
    wanted = problem.run()[0]
    rest = slice(1, None)
    for poison in POISONS:
        sources = {name: poisoned(getattr(problem, name), rest, poison) for name in ("x", "context", "context_v")}
        with np.errstate(invalid="ignore"):
            got = problem.but(**sources).run()
        assert_same(got[0], wanted, what=f"the first sequence beside {poison}")


@law()
def test_a_batch_is_computed_sequence_by_sequence(problem: Problem) -> None:
    """One call for all sequences is as good as one call for each."""
    whole = problem.run()
    for index in range(len(whole)):
        one = problem.but(**{name: array[[index]] for name, array in vars(problem).items() if hasattr(array, "shape")})
        assert_same(one.run()[0], whole[index], within=2 * rounding(one)[0], what=f"sequence {index}")


@law(h_kv=several)
def test_changing_the_parameters_of_one_head_changes_only_its_slot(problem: Problem) -> None:
    """Heads meet in `mix` and nowhere else."""
    p, before = problem.parameters, problem.steps()["concatenate"]
    h, h_kv, d_v = p.w_q.shape[0], p.w_k.shape[0], p.w_v.shape[2]
    head, group = problem.rng.integers(h), problem.rng.integers(h_kv)
    for name in ("w_q", "b_q", "w_k", "b_k", "w_v", "b_v"):
        if (array := getattr(p, name)) is None:
            continue
        index, heads = (head, [head]) if name.endswith("q") else (group, [i for i in range(h) if i * h_kv // h == group])
        after = problem.but(**{name: poisoned(array, index, np.nan)}).steps()["concatenate"]
        slots = np.isin(np.arange(h * d_v) // d_v, heads)
        assert_same(after[..., ~slots], before[..., ~slots], what=f"the slots of the other heads, {name} being NaN for {heads}")
        blind = ~problem.seen[:, heads].any(axis=-1)
        touched = np.isnan(after[..., slots]).reshape(*after.shape[:2], len(heads), d_v).transpose(0, 2, 1, 3)
        assert (touched.all(axis=-1) | blind).all(), f"{name} of {heads} does not reach its slot"


@law(masked=True)
def test_a_dropped_key_has_exactly_no_influence(problem: Problem) -> None:
    """Whatever stands in a position that every query drops."""
    problem = problem.unrolled()
    place = (slice(None), problem.rng.integers(problem.keys.shape[2]))
    problem = problem.but(keep=poisoned(problem.keep, (..., place[1]), poison=False))
    wanted = problem.run()
    for poison in POISONS:
        with np.errstate(all="ignore"):
            other = problem.but(context=poisoned(problem.context, place, poison), context_v=poisoned(problem.context_v, place, poison))
            assert_same(other.run(), wanted, what=f"the output beside {poison}")


@law(masked=True)
def test_a_key_has_exactly_no_influence_on_the_queries_that_drop_it(problem: Problem) -> None:
    """Even if other queries keep it."""
    problem = problem.unrolled()
    place = (slice(None), slice(None), problem.rng.integers(problem.keys.shape[2]))
    dropping = ~problem.keep[..., place[2]]
    wanted = problem.attend()[dropping]
    for poison in POISONS:
        with np.errstate(all="ignore"):
            other = problem.but(keys=poisoned(problem.keys, place, poison), values=poisoned(problem.values, place, poison))
            assert_same(other.attend()[dropping], wanted, what=f"what the queries found that drop {poison}")


@law(masked=True)
def test_a_query_that_sees_a_broken_value_gets_nan_and_no_other(problem: Problem) -> None:
    """NaN and infinity spread to those that look at them, to the whole of what they find."""
    problem = problem.unrolled()
    place = problem.rng.integers(problem.keys.shape[2])
    for poison in (np.nan, np.inf, -np.inf):
        found = problem.but(values=poisoned(problem.values, (slice(None), slice(None), place, 0), poison)).attend()
        wanted = np.broadcast_to(problem.keep[..., place, None], found.shape)
        assert_same(np.isnan(found), wanted, what=f"where {poison} makes NaN")


@law()
def test_b_k_has_no_influence(problem: Problem) -> None:
    """It adds the same to all scores of a query."""
    other = problem.but(b_k=problem.rng.normal(size=problem.parameters.w_k.shape[::2]))
    assert_same(other.run(), problem.run(), within=rounding(problem, other))


# --- masks


@law(self_attention=True, causal=True, offset=0, seq_q=several)
def test_what_comes_later_has_exactly_no_influence_on_a_causal_prefix(problem: Problem) -> None:
    """The first n outputs stay as they are when the rest of the input changes."""
    n = problem.rng.integers(1, problem.x.shape[1])
    wanted = problem.run()[:, :n]
    for poison in POISONS:
        with np.errstate(all="ignore"):
            got = problem.but(x=poisoned(problem.x, (slice(None), slice(n, None)), poison)).run()
        assert_same(got[:, :n], wanted, what=f"the first {n} outputs before {poison}")


@law(self_attention=True, causal=True, offset=0, seq_q=several)
def test_a_causal_prefix_can_be_computed_alone(problem: Problem) -> None:
    """The first n outputs are the output of the first n inputs."""
    n = problem.rng.integers(1, problem.x.shape[1])
    keep = None if problem.keep is None else problem.keep[:, :, :n, :n]
    prefix = problem.but(x=problem.x[:, :n], queries=problem.queries[:, :, :n], keys=problem.keys[:, :, :n], keep=keep)
    assert_same(prefix.run(), problem.run()[:, :n], within=2 * rounding(prefix))


@law(causal=True, offset=st.integers(-2, 4), seq_q=several)
def test_leaving_out_the_first_n_queries_shifts_the_offset_by_n(problem: Problem) -> None:
    """So decoding with a cache of length n is causal with `offset=n`."""
    n = problem.rng.integers(1, problem.x.shape[1])
    keep = None if problem.keep is None else problem.keep[:, :, n:]
    shifted = int(problem.options["offset"] + n)
    rest = problem.but(x=problem.x[:, n:], queries=problem.queries[:, :, n:], keep=keep, offset=shifted)
    assert_same(rest.run(), problem.run()[:, n:], within=2 * rounding(rest))


@law(causal=True)
def test_query_i_sees_key_j_if_j_is_at_most_i_plus_offset(problem: Problem) -> None:
    """Element by element, and without an offset it is 0."""
    offset = problem.options["offset"] or 0
    got = attnspec.keep_causal(attnspec.count_positions(problem.queries, offset), attnspec.count_positions(problem.keys))
    seq_q, seq_k = problem.queries.shape[2], problem.keys.shape[2]
    assert_same(got, np.array([[[[j <= i + offset for j in range(seq_k)] for i in range(seq_q)]]]))


@law(causal=True)
def test_causality_is_a_mask(problem: Problem) -> None:
    """It can be written into `keep`."""
    assert_same(problem.run(), problem.unrolled().run())


@law(masked=True)
def test_keep_both_is_the_intersection(problem: Problem) -> None:
    """A key stays if both masks keep it."""
    other = problem.rng.random(problem.keep.shape) < 1 / 2
    wanted = np.array([a and b for a, b in zip(problem.keep.flat, other.flat, strict=True)]).reshape(problem.keep.shape)
    assert_same(attnspec.keep_both(problem.keep, other), wanted)


@law(masked=True)
def test_masking_twice_is_masking_with_both(problem: Problem) -> None:
    """Masks intersect, in any order."""
    scores, other = problem.queries @ problem.keys.mT, problem.rng.random(problem.keep.shape[2:])[None, None] < 1 / 2
    both = attnspec.mask(scores, attnspec.keep_both(problem.keep, other))
    assert_same(attnspec.mask(attnspec.mask(scores, problem.keep), other), both)
    assert_same(attnspec.mask(attnspec.mask(scores, other), problem.keep), both)


@law(masked=False)
def test_keeping_all_keys_is_no_mask(problem: Problem) -> None:
    """`keep=None` is a mask that is True everywhere."""
    assert_same(problem.run(), problem.but(keep=np.ones_like(problem.seen)).run())


@law(masked=True)
def test_an_axis_of_size_1_in_the_mask_stands_for_all(problem: Problem) -> None:
    """For the batch, the heads and the queries, together and alone."""
    for axes in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
        small = problem.keep.all(axis=axes, keepdims=True)
        large = np.broadcast_to(small, problem.keep.shape).copy()
        assert_same(problem.but(keep=small).run(), problem.but(keep=large).run(), what=f"the output for a mask of shape {small.shape}")


@law(seq_k=0)
def test_without_any_position_to_look_at_the_output_is_exactly_b_o(problem: Problem) -> None:
    """No query has a key then."""
    got, b_o = problem.run(), problem.parameters.b_o
    assert_same(got, np.zeros_like(got) if b_o is None else np.broadcast_to(b_o, got.shape))


@law(masked=True)
def test_a_query_without_a_key_gives_exactly_b_o(problem: Problem) -> None:
    """Where nothing is found in any head, nothing but the bias is left."""
    place = (0, slice(None), problem.rng.integers(problem.x.shape[1]))
    got = problem.but(keep=poisoned(problem.keep, place, poison=False)).run()[0, place[2]]
    b_o = problem.parameters.b_o
    assert_same(got, np.zeros_like(got) if b_o is None else b_o)


@law(masked=True)
def test_a_query_without_a_key_has_zero_gradients(problem: Problem) -> None:
    """Not NaN; only `b_o` moves its output."""
    query = problem.rng.integers(problem.x.shape[1])
    blind = problem.but(keep=poisoned(problem.keep, (0, slice(None), query), poison=False))
    for name, gradient in gradients(blind, lambda y: y[0, query]).items():
        assert_same(gradient, torch.zeros_like(gradient), what=f"the gradient for {name} of a query without a key")
    for name, gradient in gradients(blind, torch.square).items():
        assert torch.isfinite(gradient).all(), f"the gradient for {name} is {gradient}"


def assert_no_influence_on_gradients(problem: Problem, poisons: Iterable[float]) -> None:
    __tracebackhide__ = True
    problem = problem.unrolled()
    place = (slice(None), problem.rng.integers(problem.keys.shape[2]))
    problem = problem.but(keep=poisoned(problem.keep, (..., place[1]), poison=False))
    wanted = gradients(problem, torch.square)
    for poison in poisons:
        other = problem.but(context=poisoned(problem.context, place, poison), context_v=poisoned(problem.context_v, place, poison))
        for name, gradient in gradients(other, torch.square).items():
            assert_same(gradient, wanted[name], what=f"the gradient for {name} is moved by {poison}")


@law(masked=True)
def test_a_dropped_key_has_exactly_no_influence_on_gradients(problem: Problem) -> None:
    """However large it is."""
    assert_no_influence_on_gradients(problem, [1e30, -1e30])


@law(masked=True)
def test_a_dropped_key_that_is_broken_has_exactly_no_influence_on_gradients(problem: Problem) -> None:
    """Inside attention; before it, the gradient of a projection is a product with its broken input."""
    problem = problem.unrolled()
    key = problem.rng.integers(problem.keys.shape[2])
    problem = problem.but(keep=poisoned(problem.keep, (..., key), poison=False))

    def gradients_with(poison: float) -> tuple[torch.Tensor, ...]:
        place = (slice(None), slice(None), key)
        arrays = (problem.queries, poisoned(problem.keys, place, poison), poisoned(problem.values, place, poison))
        tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
        y = attnspec.attend(*tensors, keep=torch.tensor(problem.keep), scale=problem.options["scale"])
        return torch.autograd.grad(y.square().sum(), tensors)

    for poison in (np.nan, np.inf, -np.inf):
        for name, gradient, wanted in zip(("queries", "keys", "values"), gradients_with(poison), gradients_with(0.0), strict=True):
            assert_same(gradient, wanted, what=f"the gradient for {name} is moved by {poison}")


@law(masked=True)
def test_a_query_with_one_key_gets_exactly_its_value(problem: Problem) -> None:
    """Its whole budget goes there, whatever the score."""
    batch, h, seq_q, seq_k = problem.keep.shape
    chosen = problem.rng.integers(seq_k, size=(batch, h, seq_q, 1))
    alone = problem.but(keep=np.arange(seq_k) == chosen, causal=False, offset=None)
    assert_same(alone.attend(), np.take_along_axis(problem.values, chosen, axis=2))


# --- softmax


@law(masked=True)
def test_the_weights_of_a_query_sum_to_1_or_without_a_key_to_0(problem: Problem) -> None:
    """None is negative, and dropped keys get exactly 0.

    The total of n shares is off by gamma(n - 1), each quotient by one rounding more; the sum here is exact.
    """
    weights, seen = problem.steps()["softmax"], problem.seen
    for row, keep in zip(weights.reshape(-1, weights.shape[-1]), seen.reshape(-1, weights.shape[-1]), strict=True):
        assert abs(math.fsum(row) - keep.any()) <= gamma(len(row), EPS), f"{row} sums to {math.fsum(row)}"
        assert (row >= 0).all(), f"{row} has a negative weight"
        assert (row[~keep] == 0).all(), f"{row} has a weight where the key is dropped"


@law()
def test_adding_a_constant_to_all_scores_of_a_query_changes_nothing(problem: Problem) -> None:
    """Only differences of scores count; the sum itself is rounded once."""
    scores = np.where(problem.seen, problem.queries @ problem.keys.mT, -np.inf)
    moved = scores + problem.rng.normal(0, 10, scores.shape[:3])[..., None]
    inexact = Bounded(moved, EPS * np.abs(np.where(problem.seen, moved, 0.0)))
    within = softmax(exact(scores), EPS).error + softmax(inexact, EPS).error
    assert_same(attnspec.softmax(moved), attnspec.softmax(scores), within=within)


@law(seq_k=several)
def test_a_larger_score_gets_a_larger_weight(problem: Problem) -> None:
    """And an equal one an equal weight; scores here are multiples of 1/8, so that rounding cannot hide an order."""
    scores = np.round(8 * problem.queries @ problem.keys.mT) / 8
    weights = attnspec.softmax(scores)
    order = np.sign(scores[..., :, None] - scores[..., None, :])
    assert_same(np.sign(weights[..., :, None] - weights[..., None, :]), order)


@law()
def test_huge_scores_do_not_overflow(problem: Problem) -> None:
    """Up to 1e300 the largest takes all; a warning would be an error here."""
    scores = 1e300 * (problem.queries @ problem.keys.mT)
    assert_same(attnspec.softmax(scores), (scores == scores.max(axis=-1, keepdims=True)).astype(float))


@law()
def test_float64_precision_gives_the_float64_weights_rounded_once(problem: Problem) -> None:
    """So on float32 scores no float32 softmax comes nearer, for any element."""
    scores = (3 * problem.rng.normal(size=(2, 3, 8, 16))).astype(np.float32)
    precise = attnspec.softmax(scores.astype(np.float64))
    wide, narrow = attnspec.softmax(scores, precision="float64"), attnspec.softmax(scores)
    assert_same(wide, precise.astype(np.float32))
    assert (np.abs(wide - precise) <= np.abs(narrow - precise)).all()


@law(seq_k=several)
def test_the_precision_asked_for_reaches_the_softmax(problem: Problem) -> None:
    """Through the whole chain and through attention alone."""
    narrow = problem.map(lambda array: array if array.dtype == bool else array.astype(np.float32)).but(
        policy=attnspec.Policy(softmax_precision="float64")
    )
    for run in (narrow.run, narrow.attend):
        with attnspec.trace() as calls:
            run()
        scores = calls["softmax"].arguments["scores"]
        assert_same(calls["softmax"].result, attnspec.softmax(scores.astype(np.float64)).astype(np.float32))


# --- formulas that must agree


@law(group=1, h_kv=1)
def test_one_head_of_full_width_is_plain_attention(problem: Problem) -> None:
    """Without heads there is nothing left but the formula of Vaswani et al. (2017), equation 1."""
    p = problem.parameters
    zero = np.zeros(1)
    b_q, b_k, b_v, b_o = ((b[0] if b.ndim == 2 else b) if b is not None else zero for b in (p.b_q, p.b_k, p.b_v, p.b_o))
    q, k, v = problem.x @ p.w_q[0] + b_q, problem.context @ p.w_k[0] + b_k, problem.context_v @ p.w_v[0] + b_v
    factor = 1 / np.sqrt(p.w_q.shape[2]) if problem.options["scale"] is None else problem.options["scale"]
    shares = np.exp(q @ k.transpose(0, 2, 1) * factor) * problem.seen[:, 0]
    total = shares.sum(axis=2, keepdims=True)
    plain = shares / np.where(total == 0, 1, total) @ v @ p.w_o + b_o
    assert_same(problem.run(), plain, within=2 * rounding(problem))


@law()
def test_mixing_the_heads_is_adding_what_each_makes_of_its_block_of_w_o(problem: Problem) -> None:
    """Concatenating and mixing is a sum over heads, to which `b_o` is added once; that sum is rounded h times."""
    p = problem.parameters
    h, h_kv = p.w_q.shape[0], p.w_k.shape[0]
    parts, within = [], rounding(problem)
    for i in range(h):
        keep = None if problem.keep is None else problem.keep[:, [i]]
        alone = problem.but(**picked(p, [i], [i * h_kv // h]), b_o=None, keep=keep, queries=problem.queries[:, [i]])
        parts.append(alone.run())
        within = within + rounding(alone)
    parts.append(np.zeros_like(parts[0]) if p.b_o is None else np.broadcast_to(p.b_o, parts[0].shape))
    assert_same(problem.run(), sum(parts), within=within + gamma(h + 1, EPS) * sum(map(np.abs, parts)))


@law(group=several)
def test_grouped_heads_are_heads_with_repeated_parameters(problem: Problem) -> None:
    """Query head i reads key/value head `i // group`."""
    p = problem.parameters
    group = p.w_q.shape[0] // p.w_k.shape[0]
    owner = [i // group for i in range(p.w_q.shape[0])]
    names = ("w_k", "w_v", "b_k", "b_v")
    repeated = problem.but(**{name: array[owner] for name in names if (array := getattr(p, name)) is not None})
    assert_same(problem.run(), repeated.run(), within=rounding(problem, repeated))


@law(h_kv=several, group=several)
def test_sharing_gives_query_head_i_the_keys_and_values_of_its_group(problem: Problem) -> None:
    """Copies, so bit for bit."""
    h_kv, h = problem.parameters.w_k.shape[0], problem.queries.shape[1]
    owner = [i // (h // h_kv) for i in range(h)]
    keys, values = problem.keys[:, :h_kv], problem.values[:, :h_kv]
    assert_same(attnspec.share_keys(keys, h=h), keys[:, owner])
    assert_same(attnspec.share_values(values, h=h), values[:, owner])


@law(self_attention=True)
def test_self_attention_is_attention_with_itself_as_context(problem: Problem) -> None:
    """`context=None` is `context=x`."""
    assert_same(problem.run(), problem.but(context=problem.x).run())


@law(self_attention=True)
def test_values_come_from_the_context_unless_they_have_one_of_their_own(problem: Problem) -> None:
    """`context_v=None` is `context_v=context`."""
    problem = problem.but(context=problem.rng.normal(size=problem.x.shape))
    assert_same(problem.run(), problem.but(context_v=problem.context).run())


@law(scale=None)
def test_the_scale_is_1_over_the_square_root_of_d_k(problem: Problem) -> None:
    """Unless another is given."""
    d_k = problem.queries.shape[3]
    scores = problem.queries @ problem.keys.mT
    assert_same(attnspec.scale(scores, d_k=d_k), scores * (1 / math.sqrt(d_k)))
    assert_same(problem.run(), problem.but(scale=1 / math.sqrt(d_k)).run())


@law()
def test_scaling_the_queries_is_scaling_the_scores(problem: Problem) -> None:
    """So a temperature may stand in either place; the scaled queries are rounded once."""
    factor = problem.rng.normal()
    larger = problem.but(queries=factor * problem.queries)
    other = problem.but(scale=factor * (problem.options["scale"] or problem.queries.shape[3] ** -0.5))
    inexact = Bounded(larger.queries, EPS * np.abs(larger.queries))
    within = rounding_of_attend(larger, queries=inexact) + rounding_of_attend(other)
    assert_same(larger.attend(), other.attend(), within=within)


@law()
def test_attention_is_linear_in_the_values(problem: Problem) -> None:
    """A combination of values gives the combination of what was found; either combination takes two roundings a term."""
    others = problem.rng.normal(size=problem.values.shape)
    a, b = problem.rng.normal(size=2)
    other, combined = problem.but(values=others), problem.but(values=a * problem.values + b * others)
    inexact = Bounded(combined.values, gamma(2, EPS) * (np.abs(a * problem.values) + np.abs(b * others)))
    found = a * problem.attend(), b * other.attend()
    within = abs(a) * rounding_of_attend(problem) + abs(b) * rounding_of_attend(other)
    within = within + rounding_of_attend(combined, values=inexact) + gamma(2, EPS) * (np.abs(found[0]) + np.abs(found[1]))
    assert_same(combined.attend(), found[0] + found[1], within=within)


@law()
def test_duplicating_every_key_and_value_changes_nothing(problem: Problem) -> None:
    """Each then gets half the weight."""
    problem = problem.unrolled()
    twice = {name: np.concatenate([getattr(problem, name)] * 2, axis=1) for name in ("context", "context_v")}
    other = problem.but(**twice, keep=np.concatenate([problem.keep] * 2, axis=3), keys=np.concatenate([problem.keys] * 2, axis=2))
    assert_same(other.run(), problem.run(), within=rounding(problem, other))


@law(masked=False, causal=False)
def test_queries_of_zeros_find_the_mean_of_the_values(problem: Problem) -> None:
    """No preference, equal shares."""
    indifferent = problem.but(queries=np.zeros_like(problem.queries))
    mean = np.broadcast_to(problem.values.mean(axis=2, keepdims=True), (*problem.queries.shape[:3], problem.values.shape[3]))
    assert_same(indifferent.attend(), mean.copy(), within=2 * rounding_of_attend(indifferent))


@law()
def test_what_a_query_finds_lies_between_the_values_that_it_keeps(problem: Problem) -> None:
    """A blend is an average, up to rounding."""
    found, seen = problem.attend(), problem.seen[..., None]
    error = rounding_of_attend(problem)
    values = problem.values[:, :, None]
    lowest, highest = np.where(seen, values, np.inf).min(axis=3), np.where(seen, values, -np.inf).max(axis=3)
    blind = ~problem.seen.any(axis=3, keepdims=True)
    assert (blind | ((lowest - error <= found) & (found <= highest + error))).all()


# --- dtypes and ownership


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@given(problem=problems())
def test_every_step_keeps_the_dtype_of_the_input(library: str, dtype: str, problem: Problem) -> None:
    """The result too, and it is as near to the exact one as that dtype allows."""
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    rounded = problem.map(lambda array: array if array.dtype == bool else array.astype(numpy_dtype))
    narrow = rounded
    if library == "torch":
        narrow = problem.map(lambda array: torch.tensor(array) if array.dtype == bool else torch.tensor(array).to(getattr(torch, dtype)))
    steps = narrow.steps()
    for name, result in steps.items():
        if name == "count_positions":
            continue
        kind = (torch.bool if library == "torch" else bool) if name.startswith("keep") else narrow.x.dtype
        assert result.dtype == kind, f"{name} returns {result.dtype}, but should return {kind}"
    y = steps["mix"].to(torch.float64) if library == "torch" else steps["mix"].astype(np.float64)
    wanted = reference(rounded, UNIT[dtype])["mix"]
    assert_same(unwrap(y), wanted.value, within=wanted.error)


@law()
def test_arguments_are_never_modified(problem: Problem) -> None:
    """Neither by the whole chain nor by attention alone."""
    before = {name: array.copy() for name, array in problem.arrays().items()}
    problem.run()
    problem.attend()
    for name, array in problem.arrays().items():
        assert_same(array, before[name], what=name)
