"""The float64 specification is exact to the last digit: held to an evaluator that shares no code with it, in ball arithmetic.

`condition` defines what agreement means; `benchmarks/exactness.py` measures more of it.
"""

import functools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import options
import pytest
import torch
from condition import UNIT, compare, condition_of
from enclosure import Enclosure, enclose
from flint import arb, ctx
from hypothesis import given, settings
from hypothesis import strategies as st
from options import NEUTRAL, PAIRWISE, VALUES, Drawn
from small_defects import DEFECTS, EQUIVALENTS
from variations import fit, sharpen, spread

import attnspec
from attnspec import Mask, Positions

TOLERANCE = 4 * UNIT  # 4.4e-16 of the condition: the worst of thousands of problems was 1.4 units, the promise is 1e-13
LARGEST = {"batch": 2, "seq_q": 5, "seq_k": 6, "d_model": 6, "d_key_in": 6, "d_value_in": 6, "d_k": 6, "d_v": 4}
SHARPNESS = (1.0, 8.0)


def enclosure_of(drawn: Drawn) -> Enclosure:
    enclosure = enclose(drawn.x, drawn.parameters, drawn.options)
    assert enclosure.radius < 1e-80
    return enclosure


def assert_exact(drawn: Drawn) -> None:
    agreement = compare(enclosure_of(drawn), drawn.run())
    assert agreement.nan_agrees
    assert agreement.within(TOLERANCE), f"off by {agreement.share / UNIT:.3g} units of its condition"


@functools.cache
def pairwise(index: int, sharpness: float) -> tuple[Drawn, Enclosure]:
    drawn = sharpen(options.draw(PAIRWISE[index], seed=index), sharpness)
    return drawn, enclosure_of(drawn)


@pytest.mark.parametrize("library", [np.asarray, torch.asarray], ids=["numpy", "torch"])
@pytest.mark.parametrize("sharpness", SHARPNESS)
@pytest.mark.parametrize("index", range(len(PAIRWISE)))
def test_every_pair_of_options_is_exact(index, sharpness, library):
    drawn, enclosure = pairwise(index, sharpness)
    agreement = compare(enclosure, drawn.convert(library).run())
    assert agreement.within(TOLERANCE), f"off by {agreement.share / UNIT:.3g} units of its condition"


@settings(max_examples=300, deadline=None)
@given(
    choice=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in VALUES.items()}),
    sizes=st.fixed_dictionaries({name: st.integers(1, largest) for name, largest in LARGEST.items()}),
    seed=st.integers(0, 2**32 - 1),
    sharpness=st.sampled_from(SHARPNESS),
    distance=st.sampled_from((1, 9973)),
)
def test_every_choice_of_options_and_sizes_is_exact(choice, sizes, seed, sharpness, distance):
    assert_exact(spread(sharpen(options.draw(choice, seed, fit(choice, sizes)), sharpness), distance))


BY_HAND = {
    "the policy's scale": lambda drawn: _with_policy(drawn, scale=-0.7),
    "a scale of nothing": lambda drawn: _with(drawn, scale=0.0),
    "the option's scale before the policy's": lambda drawn: _with(_with_policy(drawn, scale=2.0), scale=0.1),
    "a large epsilon of rms": lambda drawn: _with_policy(drawn, normalise="rms", epsilon=0.5),
    "a large epsilon of layer": lambda drawn: _with_policy(drawn, normalise="layer", epsilon=0.5),
    "a rotation of two channels": lambda drawn: _with_policy(drawn, rotation=attnspec.Rotation(pairing="interleaved", width=2)),
    "a cap that hardly bends": lambda drawn: _with_policy(drawn, cap=50.0),
    "causal, as a mask": lambda drawn: _with(drawn, keep=Mask.causal() & Mask.keep(np.arange(7) % 3 > 0, "seq_k")),
    "a window, as a mask": lambda drawn: _with(drawn, keep=Mask.window(1, None) & Mask.window(None, 2)),
    "one mask for all": lambda drawn: _with(drawn, keep=(np.arange(35).reshape(1, 1, 5, 7) % 4 > 0)),
    "a mask for each key": lambda drawn: _with(drawn, keep=(np.arange(14).reshape(2, 1, 1, 7) % 5 > 1)),
    "lowest additive numbers": lambda drawn: _with(drawn, keep=Mask.additive(np.where(np.arange(7) == 3, -np.inf, -1e30), "seq_k")),
    "positions for all sequences": lambda drawn: _with(
        _with_policy(drawn, rotation=attnspec.Rotation(), window=(3, 1)),
        positions=Positions(np.arange(5)[None] * 2, np.arange(7)[None] + 1),
    ),
}


def _with(drawn: Drawn, **more) -> Drawn:
    return replace(drawn, options=drawn.options | more)


def _with_policy(drawn: Drawn, **conventions) -> Drawn:
    return _with(drawn, policy=replace(drawn.options["policy"], **conventions))


@pytest.mark.parametrize("name", BY_HAND)
def test_what_no_choice_draws_is_exact_too(name):
    assert_exact(BY_HAND[name](options.draw(NEUTRAL | {"source": "cross", "heads": "contiguous"})))


@pytest.mark.parametrize("more", [{}, {"sinks": True}, {"extra": True}, {"cap": "after"}, {"dropout": True}, {"bias": "full"}], ids=str)
@pytest.mark.parametrize("empty_row", VALUES["empty_row"])
def test_a_query_that_keeps_no_key_gets_exactly_what_the_policy_says(empty_row, more):
    drawn = options.draw(NEUTRAL | {"source": "cross", "keep": "lengths", "empty_row": empty_row} | more)
    y = drawn.run()
    assert_exact(drawn)
    nothing = empty_row in {"zero", "nan"} and not {"extra", "cap"} & more.keys()
    assert np.isnan(y[0]).all() == (nothing and empty_row == "nan" and "sinks" not in more)
    assert np.array_equal(y[0], np.broadcast_to(drawn.parameters.b_o, y[0].shape)) == (nothing and not np.isnan(y[0]).any())
    assert np.isfinite(y[1]).all()


def test_a_vector_of_zeros_has_no_direction():
    drawn = _with_policy(options.draw(NEUTRAL | {"biases": False}), normalise="l2")
    drawn.x[0, 1] = 0.0
    assert_exact(drawn)


def test_masks_hold_what_they_are_given():  # the evaluator reads their rules
    flags, addend, numbers = np.zeros((2, 7), bool), np.zeros((2, 7)), np.arange(10).reshape(2, 5)
    for mask, polarity, array in ((Mask.keep, "keep", flags), (Mask.drop, "drop", flags), (Mask.additive, "additive", addend)):
        (rule,) = mask(array, "batch seq_k").rules
        assert (rule.array is array, rule.axes, rule.polarity) == (True, ("batch", "seq_k"), polarity)
    (lengths,), (documents,) = Mask.lengths(numbers[0]).rules, Mask.documents(numbers, numbers + 1).rules
    assert np.array_equal(lengths.lengths, numbers[0])
    assert np.array_equal(documents.queries, numbers)
    assert np.array_equal(documents.keys, numbers + 1)
    (window,), (both, _) = Mask.window(1, 2).rules, (Mask.lengths(numbers[0]) & Mask.causal()).rules
    assert (window.left, window.right, type(both)) == (1, 2, type(lengths))


# The check itself: what it catches, and what it lets pass.


def defective(name: str, seed: int, size: float) -> tuple[Enclosure, np.ndarray]:
    more, plant, _ = DEFECTS[name]
    drawn = options.draw(NEUTRAL | {"source": "cross", "heads": "contiguous"} | more, seed)
    with attnspec.substitute(**plant(size)):
        return enclosure_of(drawn), drawn.run()


@pytest.mark.parametrize("name", DEFECTS)
def test_small_defects_are_caught(name):
    for seed in range(3):
        enclosure, y = defective(name, seed, DEFECTS[name][2])
        assert not compare(enclosure, y).within(TOLERANCE)
        assert np.allclose(y, defective(name, seed, 0.0)[1], rtol=1e-9, atol=1e-9)  # no comparison by eye would notice


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_of_no_size_pass(name):
    assert compare(*defective(name, 0, 0.0)).within(TOLERANCE)


@pytest.mark.parametrize("sharpness", SHARPNESS)
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_other_orders_of_evaluation_pass(name, sharpness):
    for seed in range(3):
        drawn = sharpen(options.draw(NEUTRAL | {"source": "cross", "bias": "full"}, seed), sharpness)
        with attnspec.substitute(**EQUIVALENTS[name]):
            assert_exact(drawn)


STEPS = ("project_queries", "project_keys", "project_values", "normalise", "rotate", "score", "scale", "cap", "bias", "softmax", "drop")
STEPS += ("blend", "gate", "mix")


@pytest.mark.parametrize("sharpness", SHARPNESS)
@pytest.mark.parametrize("index", range(0, len(PAIRWISE), 3))
def test_the_condition_bounds_what_errors_in_all_steps_can_do(index, sharpness):
    drawn, enclosure = pairwise(index, sharpness)
    rng, size = np.random.default_rng(index), 1e-9

    def strayed(name):
        step = getattr(attnspec, name)
        return lambda *arrays, **more: (y := step(*arrays, **more)) * (1 + size * rng.choice([-1, 1], y.shape))

    with attnspec.substitute(**{name: strayed(name) for name in STEPS}):
        share = compare(enclosure, drawn.run()).share
    assert 0.01 * size < share < size * (1 + 1e-6)  # a bound, and no idle one


def test_a_number_in_place_of_nan_is_caught():
    drawn = options.draw(NEUTRAL | {"keep": "lengths", "empty_row": "nan"})
    enclosure, y = enclosure_of(drawn), drawn.run()
    assert compare(enclosure, y).within(TOLERANCE)
    assert not compare(enclosure, np.nan_to_num(y)).within(TOLERANCE)
    y[1, 0, 0] = np.nan
    assert not compare(enclosure, y).within(TOLERANCE)


def test_the_condition_of_a_single_key_is_a_sum_of_absolute_products():
    drawn = options.draw(NEUTRAL | {"source": "cross", "biases": False}, sizes={**options.SIZES, "seq_k": 1})
    w_v, context = drawn.parameters.w_v, drawn.options["context"][:, None]  # with a single key, no logit matters
    w_o = np.abs(drawn.parameters.w_o).reshape(3, 1, 3, 13)
    expected = np.sum((np.abs(context) @ np.abs(w_v) + 2 * np.abs(context @ w_v)).transpose(1, 0, 2, 3) @ w_o, axis=0)
    assert np.allclose(condition_of(enclosure_of(drawn)), expected, rtol=1e-12)


# What is given as a bias.


@pytest.mark.parametrize("h", range(1, 40))
def test_slopes_are_exact(h):
    def of_power(n: int) -> list[arb]:  # the recursion of Press et al. (2022), not the closed form of the library
        return [arb(2) ** (arb(-8 * (i + 1)) / n) for i in range(n)]

    power = max(n for n in (1, 2, 4, 8, 16, 32) if n <= h)
    with ctx.workdps(100):
        exact = of_power(power) + of_power(2 * power)[0::2][: h - power]
        errors = [abs(slope / ball - 1) for slope, ball in zip(attnspec.alibi_slopes(h), exact, strict=True)]
        assert all(error < 2 * UNIT for error in errors)


@given(slope=st.floats(2**-16, 1), query=st.integers(-(2**30), 2**30), key=st.integers(-(2**30), 2**30))
def test_linear_bias_is_correctly_rounded(slope, query, key):
    (bias,) = attnspec.linear_bias(np.array([slope]), np.array([[query]]), np.array([[key]])).reshape(-1)
    assert bias == float(-Fraction(slope) * abs(query - key))


def bucket(ahead: int, buckets: int, max_distance: int, *, bidirectional: bool) -> int:
    """The bucket of Raffel et al. (2020), floor(log(d/e) / log(max/e) (n - e)), in whole numbers: d^m e^k >= max^k e^m."""
    first, count, distance = 0, buckets, max(-ahead, 0)
    if bidirectional:
        first, count, distance = buckets // 2 * (ahead > 0), buckets // 2, abs(ahead)
    exact = count // 2
    if distance < exact:
        return first + distance
    more = count - exact
    far = sum(distance**more * exact**k >= max_distance**k * exact**more for k in range(1, more + 1))
    return first + min(exact + far, count - 1)


def assert_buckets(buckets: int, max_distance: int, ahead: list[int], *, bidirectional: bool) -> None:
    table = np.arange(float(buckets))[:, None]
    found = attnspec.relative_bias(table, np.array([[0]]), np.array([ahead]), max_distance=max_distance, bidirectional=bidirectional)
    assert found.reshape(-1).tolist() == [bucket(d, buckets, max_distance, bidirectional=bidirectional) for d in ahead]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 256), (64, 128), (12, 27), (16, 1024), (8, 5), (8, 64), (20, 160)])
def test_buckets_are_those_of_exact_arithmetic(buckets, max_distance, bidirectional):  # also where a distance opens a bucket
    assert_buckets(buckets, max_distance, list(range(-max_distance - 3, max_distance + 4)), bidirectional=bidirectional)


@given(st.data())
def test_buckets_of_any_number_and_distance_are_those_of_exact_arithmetic(data):
    bidirectional = data.draw(st.booleans())
    buckets = data.draw(st.integers(4, 128))
    exact = (buckets // 2 if bidirectional else buckets) // 2
    max_distance = data.draw(st.integers(exact + 1, 100_000))
    ahead = data.draw(st.lists(st.integers(-2 * max_distance, 2 * max_distance), min_size=1, max_size=50))
    assert_buckets(buckets, max_distance, ahead, bidirectional=bidirectional)
