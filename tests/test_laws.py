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
from reference import UNIT, Bounded, exact, gamma, product, reference, rounding, rounding_of_attend, softmax

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


# --- what an option asks for


@law(d_k=several)
def test_normalised_vectors_all_have_one_length(problem: Problem) -> None:
    """1 for `l2`, the root of the width for `rms` and `layer`; the square of it takes 6 roundings besides the width of its sum."""
    width = problem.queries.shape[3]
    for kind, wanted in (("rms", width), ("layer", width), ("l2", 1)):
        vectors = attnspec.normalise(problem.queries, kind=kind, epsilon=0.0).reshape(-1, width)
        squares = np.array([math.fsum(vector * vector) for vector in vectors])
        assert_same(squares, np.full(len(vectors), float(wanted)), within=gamma(width + 6, EPS) * wanted, what=f"the squares for {kind}")


@law()
def test_the_length_of_a_vector_has_no_influence_once_it_is_normalised(problem: Problem) -> None:
    """Each by a power of two of its own, which takes no rounding."""
    longer = problem.queries * 2.0 ** problem.rng.integers(-9, 10, size=(*problem.queries.shape[:3], 1))
    for kind in ("rms", "layer", "l2"):
        normal = attnspec.normalise(problem.queries, kind=kind, epsilon=0.0)
        assert_same(attnspec.normalise(longer, kind=kind, epsilon=0.0), normal, what=kind)


def turned(tokens: np.ndarray, positions: np.ndarray) -> Bounded:
    """Rotate, and bound the error beside a rotation by the same rates, none of which is above 1.

    An angle is rounded once, cos and sin are off by 4 ulp, a product and a sum follow; one more is for what is squared.
    """
    size = np.abs(tokens) + np.abs(np.roll(tokens, tokens.shape[3] // 2, axis=3))
    return Bounded(attnspec.rotate(tokens, positions), EPS * (np.abs(positions)[:, None, :, None] + 8 + 3) * size)


@law(d_k=6)
def test_turning_keeps_the_length_of_every_pair_of_channels(problem: Problem) -> None:
    """So no vector grows with its position."""
    positions = problem.rng.integers(0, 100, size=(1, problem.queries.shape[2]))
    after = turned(problem.queries, positions)

    def lengths(tokens: np.ndarray) -> np.ndarray:
        return np.square(tokens[..., :3]) + np.square(tokens[..., 3:])

    carried = after.error * (2 * np.abs(after.value) + after.error)
    within = carried[..., :3] + carried[..., 3:] + gamma(2, EPS) * (lengths(after.value) + lengths(problem.queries))
    assert_same(lengths(after.value), lengths(problem.queries), within=within)


@law(d_k=6)
def test_the_scores_of_turned_vectors_depend_on_the_difference_of_positions_alone(problem: Problem) -> None:
    """Moving all of them changes nothing."""
    seq_q, seq_k = problem.queries.shape[2], problem.keys.shape[2]
    found, within = [], 0.0
    for start in (0, problem.rng.integers(1, 100)):
        queries, keys = turned(problem.queries, start + np.arange(seq_q)[None]), turned(problem.keys, start + np.arange(seq_k)[None])
        found.append(attnspec.score(queries.value, keys.value))
        within = within + product("bhid,bhjd->bhij", queries, keys, n=6, unit=EPS).error
    assert_same(found[0], found[1], within=within)


@law(d_k=6)
def test_the_two_pairings_are_one_rotation_under_a_permutation_of_the_channels(problem: Problem) -> None:
    """`half` pairs the neighbours of `interleaved` once they stand half a vector apart."""
    positions = problem.rng.integers(0, 100, size=(1, problem.queries.shape[2]))
    order = [0, 2, 4, 1, 3, 5]
    apart = attnspec.rotate(problem.queries[..., order], positions, pairing="half")
    assert_same(attnspec.rotate(problem.queries, positions, pairing="interleaved")[..., order], apart)


@law(d_k=6)
def test_at_position_0_nothing_turns(problem: Problem) -> None:
    """The cosine is exactly 1 there, the sine exactly 0."""
    for pairing in ("half", "interleaved"):
        positions = np.zeros((1, problem.queries.shape[2]), int)
        assert_same(attnspec.rotate(problem.queries, positions, pairing=pairing), problem.queries)


@law()
def test_a_window_keeps_exactly_the_keys_from_i_minus_left_to_i_plus_right(problem: Problem) -> None:
    """Element by element; without a bound it goes on to the end."""
    i, j = attnspec.count_positions(problem.queries), attnspec.count_positions(problem.keys)
    for left, right in [(None, None), (0, None), (None, 1), *problem.rng.integers(0, 4, size=(4, 2)).tolist()]:
        kept = [[(left is None or y >= x - left) and (right is None or y <= x + right) for y in j[0]] for x in i[0]]
        assert_same(attnspec.keep_window(i, j, left=left, right=right), np.array([[kept]]), what=f"the window {left}, {right}")


@law(causal=True)
def test_a_window_without_a_bound_to_the_left_and_with_none_to_the_right_is_causality(problem: Problem) -> None:
    """The right bound of 0 leaves a query its own position."""
    i, j = attnspec.count_positions(problem.queries, problem.options["offset"] or 0), attnspec.count_positions(problem.keys)
    assert_same(attnspec.keep_window(i, j, left=None, right=0), attnspec.keep_causal(i, j))


@law(masked=False, causal=False)
def test_what_lies_beyond_the_length_of_a_sequence_has_exactly_no_influence(problem: Problem) -> None:
    """And what lies within it has some."""
    batch, _, seq_k, _ = problem.keys.shape
    lengths = problem.rng.integers(0, seq_k + 1, size=batch)
    padded = problem.but(keep=attnspec.Mask.lengths(lengths))
    wanted = padded.run()
    for poison in POISONS:
        beyond = {name: poisoned(getattr(padded, name), np.arange(seq_k) >= lengths[:, None], poison) for name in ("context", "context_v")}
        with np.errstate(all="ignore"):
            assert_same(padded.but(**beyond).run(), wanted, what=f"the output beside {poison}")
    last = np.arange(seq_k) == lengths[:, None] - 1
    broken = np.isnan(padded.but(context_v=poisoned(problem.context_v, last, np.nan)).run()).all(axis=(1, 2))
    assert_same(broken, lengths > 0, what="whether the last key within is seen")


@law()
def test_a_query_sees_the_keys_of_its_own_document_and_no_others(problem: Problem) -> None:
    """Element by element."""
    queries, keys = (problem.rng.integers(0, 3, size=(array.shape[0], array.shape[2])) for array in (problem.queries, problem.keys))
    wanted = np.array([[[[one == other for other in theirs] for one in ours]] for ours, theirs in zip(queries, keys, strict=True)])
    assert_same(attnspec.keep_documents(queries, keys), wanted)


@law()
def test_every_document_of_a_packed_sequence_has_its_number_and_counts_its_tokens_from_0_on(problem: Problem) -> None:
    """Even if some documents are empty, and for the tokens behind the last boundary, which are one more."""
    lengths = problem.rng.integers(0, 4, size=5)
    cumulative = np.cumsum([0, *lengths[:-1]])
    documents = attnspec.number_documents(cumulative, seq=int(lengths.sum()))
    assert_same(documents, np.repeat(np.arange(5), lengths)[None])
    positions = attnspec.count_in_documents(cumulative, documents)
    assert_same(positions, np.concatenate([np.arange(length) for length in lengths])[None])


@law(self_attention=True, masked=False, offset=None)
def test_packed_sequences_give_what_each_gives_alone(problem: Problem) -> None:
    """No document looks into another, and each starts at position 0."""
    lengths = problem.rng.integers(0, problem.x.shape[1] + 1, size=len(problem.x))
    cumulative = np.cumsum([0, *lengths])
    packed = np.concatenate([sequence[:length] for sequence, length in zip(problem.x, lengths, strict=True)])[None]
    keep, positions = attnspec.packed(cumulative, seq_q=packed.shape[1])
    got = attnspec.multi_head_attention(packed, problem.parameters, keep=keep, positions=positions, **problem.options)
    for index in np.flatnonzero(lengths):
        here = {name: getattr(problem, name)[[index], :, : lengths[index]] for name in ("queries", "keys", "values")}
        alone = problem.but(x=problem.x[[index], : lengths[index]], **here)
        part = got[:, cumulative[index] : cumulative[index + 1]]
        assert_same(part, alone.run(), within=2 * rounding(alone), what=f"document {index}")


@law(self_attention=True, causal=True, offset=None, masked=False)
def test_one_call_of_n_tokens_gives_what_n_calls_of_one_give(problem: Problem) -> None:
    """Or what two calls give, of as many tokens as you like: the positions go on."""
    seq = problem.x.shape[1]
    for cut in (range(1, seq), problem.rng.integers(0, seq, size=1)):
        cache, found = None, []
        for tokens in np.split(problem.x, cut, axis=1):
            y, cache = attnspec.decode(tokens, problem.parameters, cache, scale=problem.options["scale"])
            found.append(y)
        assert_same(np.concatenate(found, axis=1), problem.run(), within=2 * rounding(problem), what=f"the output cut at {list(cut)}")


@law()
def test_the_parts_of_a_sequence_one_behind_the_other_are_the_sequence(problem: Problem) -> None:
    """Wherever it was cut, and whichever two parts meet first."""
    cut = sorted(problem.rng.integers(0, problem.keys.shape[2] + 1, size=2).tolist())
    first, second, third = np.split(problem.keys, cut, axis=2)
    assert_same(attnspec.append_to_cache(attnspec.append_to_cache(first, second), third), problem.keys)
    assert_same(attnspec.append_to_cache(first, attnspec.append_to_cache(second, third)), problem.keys)


def with_extra(problem: Problem, extra_k: np.ndarray, extra_v: np.ndarray) -> tuple[np.ndarray, Problem]:
    """Compute attention with extra keys, and pose the problem that has them in its context, where every query keeps them."""
    steps = problem.but(extra_k=extra_k, extra_v=extra_v).steps()
    batch, h = steps["project_queries"].shape[:2]
    longer = {}
    for name, found, extra in (("keys", steps["project_keys"], extra_k), ("values", steps["project_values"], extra_v)):
        whole = np.concatenate((found, np.broadcast_to(extra, (batch, *extra.shape))), axis=2)
        longer[name] = np.repeat(whole, h // whole.shape[1], axis=1)
    keep = np.concatenate((problem.seen, np.ones((*problem.seen.shape[:3], extra_k.shape[1]), bool)), axis=3)
    return steps["blend"], problem.but(queries=steps["project_queries"], keep=keep, causal=False, offset=None, **longer)


@law()
def test_extra_keys_are_keys_that_every_sequence_has_and_every_query_keeps(problem: Problem) -> None:
    """They stand behind those of the context, whatever is masked there."""
    p = problem.parameters
    extra_k, extra_v = (problem.rng.normal(size=(w.shape[0], 2, w.shape[2])) for w in (p.w_k, p.w_v))
    found, longer = with_extra(problem, extra_k, extra_v)
    assert_same(found, longer.attend(), within=2 * rounding_of_attend(longer))


@law()
def test_an_extra_key_and_value_of_zeros_are_a_sink_of_score_0(problem: Problem) -> None:
    """Both take a share and give nothing."""
    p = problem.parameters
    found, longer = with_extra(problem, np.zeros((p.w_k.shape[0], 1, p.w_k.shape[2])), np.zeros((p.w_v.shape[0], 1, p.w_v.shape[2])))
    drained = problem.but(sinks=np.zeros(p.w_q.shape[0])).steps()["blend"]
    assert_same(found, drained, within=2 * rounding_of_attend(longer))


@law()
def test_extra_keys_have_no_bias_and_those_of_the_context_keep_theirs(problem: Problem) -> None:
    """Also where the bias has one number for all keys."""
    scores = problem.queries @ problem.keys.mT
    for addend in (scores, scores[:, :, :, :1], scores[:1, :, :1]):
        longer = attnspec.extend_bias(addend, problem.keys, extra=2)
        shape = (*addend.shape[:3], scores.shape[3])
        assert_same(longer, np.concatenate((np.broadcast_to(addend, shape), np.zeros((*shape[:3], 2))), axis=3))


@law(masked=True)
def test_every_query_keeps_the_extra_keys_and_of_the_others_what_it_kept(problem: Problem) -> None:
    """Even a query that kept none."""
    longer = attnspec.keep_extra(problem.keep, extra=2)
    assert_same(longer, np.concatenate((problem.keep, np.ones((*problem.keep.shape[:3], 2), bool)), axis=3))


@law()
def test_a_sink_takes_the_share_of_one_more_key_and_gives_nothing(problem: Problem) -> None:
    """So it is a column of scores whose weights are left out."""
    scores = np.where(problem.seen, problem.queries @ problem.keys.mT, -np.inf)
    sinks = problem.rng.normal(0, 3, size=scores.shape[1])
    wider = np.concatenate((scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))), axis=3)
    within = 2 * softmax(exact(wider), EPS).error[..., :-1]
    assert_same(attnspec.softmax(scores, sinks), np.ascontiguousarray(attnspec.softmax(wider)[..., :-1]), within=within)


@law(seq_k=several)
def test_a_cap_keeps_the_order_of_the_scores_and_none_exceeds_it(problem: Problem) -> None:
    """Scores here are multiples of 1/8 of at most 2 caps, so that rounding cannot hide an order."""
    limit = problem.rng.uniform(3, 30)
    scores = np.clip(np.round(8 * problem.queries @ problem.keys.mT) / 8, -2 * limit, 2 * limit)
    capped = attnspec.cap(scores, limit=limit)
    assert_same(np.sign(capped[..., :, None] - capped[..., None, :]), np.sign(scores[..., :, None] - scores[..., None, :]))
    huge = attnspec.cap(1e300 * scores, limit=limit)
    assert (np.abs(huge) <= limit).all(), f"{huge} exceeds {limit}"


@law(masked=True)
def test_a_bias_of_minus_infinity_drops_the_key(problem: Problem) -> None:
    """So an additive mask is a bias."""
    bias = np.where(problem.keep, 0.0, -np.inf)
    found = attnspec.attend(problem.queries, problem.keys, problem.values, bias=bias, **problem.options)
    assert_same(found, problem.attend())


@law(masked=False)
def test_an_axis_of_size_1_in_the_bias_stands_for_all(problem: Problem) -> None:
    """For the batch, the heads, the queries and the keys, together and alone."""
    scores = problem.queries @ problem.keys.mT
    other = problem.rng.normal(size=scores.shape)
    for axes in ((0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)):
        small = other.mean(axis=axes, keepdims=True)
        assert_same(attnspec.bias(scores, small), scores + small, what=f"the scores for a bias of shape {small.shape}")


@law()
def test_over_evenly_spread_chances_dropout_keeps_the_mean_of_the_weights(problem: Problem) -> None:
    """One division and 4 additions are rounded; the rates are multiples of 1/4, so that what survives is counted exactly."""
    weights = problem.steps()["softmax"]
    for rate in (0.0, 0.25, 0.5, 0.75):
        total = np.zeros_like(weights)
        for chance in (1 / 8, 3 / 8, 5 / 8, 7 / 8):
            survivors = attnspec.draw_survivors(weights, rate=rate, generator=lambda shape, chance=chance: np.full(shape, chance))
            total = total + attnspec.drop(weights, survivors, rate=rate)
        assert_same(total / 4, weights, within=gamma(5, EPS) * weights, what=f"the mean at rate {rate}")


@law()
def test_a_weight_that_dropout_drops_is_exactly_0(problem: Problem) -> None:
    """Whatever it was; the others stay what they are, divided by the share that survives."""
    weights = problem.steps()["softmax"]
    survivors = problem.rng.random(weights.shape) < 1 / 2
    for poison in POISONS:
        dropped = attnspec.drop(poisoned(weights, ~survivors, poison), survivors, rate=0.25)
        assert_same(dropped, np.where(survivors, weights / 0.75, 0.0), what=f"the weights where {poison} is dropped")


@law()
def test_dropout_of_rate_0_changes_nothing(problem: Problem) -> None:
    """Not even where chance gives exactly 0."""
    still = attnspec.Dropout(0.0, np.zeros)
    found = attnspec.attend(problem.queries, problem.keys, problem.values, keep=problem.keep, dropout=still, **problem.options)
    assert_same(found, problem.attend())


@law(h_kv=several)
def test_a_gate_is_a_factor_of_the_block_of_w_o_of_its_head(problem: Problem) -> None:
    """Powers of two here, so that neither side is rounded."""
    h, w_o = problem.parameters.w_q.shape[0], problem.parameters.w_o
    gates = problem.rng.choice([0.0, 1.0, 2.0, -0.5], size=h)
    scaled = problem.but(w_o=(w_o.reshape(h, -1, w_o.shape[1]) * gates[:, None, None]).reshape(w_o.shape))
    assert_same(problem.but(gates=gates).run(), scaled.run())


@law(h_kv=several, group=1)
def test_a_head_with_a_gate_of_0_can_be_taken_away(problem: Problem) -> None:
    """With its keys, its values and its block of `w_o`."""
    h = problem.parameters.w_q.shape[0]
    head = int(problem.rng.integers(h))
    rest = np.arange(h) != head
    keep = None if problem.keep is None else problem.keep[:, rest]
    pruned = problem.but(parameters=problem.parameters.prune({head}), queries=problem.queries[:, rest], keep=keep)
    assert_same(problem.but(gates=rest.astype(float)).run(), pruned.run(), within=rounding(problem) + rounding(pruned))


@law()
def test_a_linear_bias_is_minus_the_slope_times_the_distance(problem: Problem) -> None:
    """Element by element, in both directions."""
    slopes = problem.rng.random(problem.queries.shape[1])
    queries, keys = (problem.rng.integers(-9, 9, size=(array.shape[0], array.shape[2])) for array in (problem.queries, problem.keys))
    wanted = [[[[-slope * abs(i - j) for j in there] for i in here] for slope in slopes] for here, there in zip(queries, keys, strict=True)]
    assert_same(attnspec.linear_bias(slopes, queries, keys), np.array(wanted))


@law()
def test_a_bias_of_positions_depends_on_their_difference_alone(problem: Problem) -> None:
    """Moving all of them changes nothing."""
    h, far = problem.queries.shape[1], int(problem.rng.integers(1, 1000))
    queries, keys = (problem.rng.integers(-9, 9, size=(array.shape[0], array.shape[2])) for array in (problem.queries, problem.keys))
    slopes, table = problem.rng.random(h), problem.rng.normal(size=(8, h))
    assert_same(attnspec.linear_bias(slopes, queries + far, keys + far), attnspec.linear_bias(slopes, queries, keys))
    here, there = (attnspec.relative_bias(table, queries + add, keys + add, max_distance=5) for add in (0, far))
    assert_same(there, here)


@law()
def test_near_keys_have_a_bucket_of_their_own_and_far_ones_share_the_last(problem: Problem) -> None:
    """In each direction; between the two a bucket never falls with the distance."""
    buckets = int(problem.rng.integers(2, 20))
    near = buckets // 2
    largest = near + int(problem.rng.integers(1, 40))
    distance = np.arange(2 * largest)

    def bucket(ahead: np.ndarray, table: np.ndarray, *, bidirectional: bool) -> np.ndarray:
        here = np.zeros((1, 1), int)
        found = attnspec.relative_bias(table[:, None], here, ahead[None], max_distance=largest, bidirectional=bidirectional)
        return found[0, 0, 0]

    behind = bucket(-distance, np.arange(2.0 * buckets), bidirectional=True)
    ahead = bucket(distance[1:], np.arange(2.0 * buckets) - buckets, bidirectional=True)
    alone = bucket(-distance, np.arange(1.0 * buckets), bidirectional=False)
    for found in (behind, np.concatenate(([0.0], ahead)), alone):
        assert_same(found[:near], distance[:near].astype(float))
        assert (np.diff(found) >= 0).all(), f"{found} falls"
        assert (found[largest:] == buckets - 1).all(), f"{found} does not end in {buckets - 1}"
    assert_same(
        bucket(distance, np.arange(1.0 * buckets), bidirectional=False), np.zeros(len(distance)), what="the bucket of what is ahead"
    )


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
