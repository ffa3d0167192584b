"""Every option of the specification: alone at its neutral value, and in pairs with every other on every library."""

import dataclasses
from copy import copy

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from options import NEUTRAL, PAIRWISE, VALUES, draw

import attnspec
from attnspec import Cache, ConfigError, Dropout, Mask, Policy, Positions, Rotation, ShapeError
from attnspec.spec.chain import Places

jax.config.update("jax_enable_x64", val=True)
array_api_strict.set_array_api_strict_flags(boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=())

IDS = [f"pair{index}" for index in range(len(PAIRWISE))]
LIBRARIES = {"torch": torch.from_numpy, "jax": jax.numpy.asarray, "array_api_strict": array_api_strict.asarray}

# Rounding: the longest sum of products has some 40 terms (h*d_v and the scores before it) and the numbers are of size
# 1 to 10, so two orders of the same additions differ by at most a few times 40 * 10 * 2^-53 = 5e-14.
ROUNDING = 2e-13


def test_every_pair_of_values_occurs():
    for one, first_values in VALUES.items():
        for other, second_values in VALUES.items():
            seen = {(choice[one], choice[other]) for choice in PAIRWISE}
            assert one == other or len(seen) == len(first_values) * len(second_values)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("choice", PAIRWISE, ids=IDS)
def test_libraries_agree_on_every_pair_of_options(choice, library):
    drawn = draw(choice, seed=1)
    y = drawn.run()
    other = drawn.convert(LIBRARIES[library]).run()
    assert type(other) is type(LIBRARIES[library](np.zeros(1)))
    np.testing.assert_allclose(np.asarray(other), y, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("choice", PAIRWISE[::4], ids=IDS[::4])
def test_float32_keeps_its_dtype_and_is_near(choice):
    drawn = draw(choice, seed=1)
    narrow = drawn.convert(lambda array: array.astype("float32") if array.dtype == "float64" else array).run()
    assert narrow.dtype == "float32"
    np.testing.assert_allclose(narrow, drawn.run(), rtol=0, atol=ROUNDING * 2**29)


@pytest.mark.parametrize("choice", PAIRWISE, ids=IDS)
def test_compiled_code_sees_every_option(choice):
    drawn = draw(choice, seed=2).convert(torch.from_numpy)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: dataclasses.replace(drawn, x=x).run(), fullgraph=True, backend="eager")
    assert torch.equal(compiled(drawn.x).nan_to_num(7.0), drawn.run().nan_to_num(7.0))


DIFFERENTIABLE = [choice for choice in PAIRWISE if choice["empty_row"] != "nan"]


@pytest.mark.parametrize("choice", DIFFERENTIABLE, ids=[f"pair{PAIRWISE.index(choice)}" for choice in DIFFERENTIABLE])
def test_gradients_equal_finite_differences(choice):
    drawn = draw(choice, seed=3).convert(torch.from_numpy)
    arrays = {"x": drawn.x, **{n: drawn.options.get(n) for n in ("context", "context_v", "bias")}, **vars(drawn.parameters)}
    arrays = {name: array.requires_grad_() for name, array in arrays.items() if array is not None}

    def function(*values):
        given = dict(zip(arrays, values, strict=True))
        inputs = {name: given.pop(name) for name in ("context", "context_v", "bias") if name in given}
        return attnspec.multi_head_attention(given.pop("x"), attnspec.Parameters(**given), **drawn.options | inputs)

    assert torch.autograd.gradcheck(function, tuple(arrays.values()), fast_mode=True)


def test_the_gradients_of_a_query_without_keys_are_zero():
    choice = NEUTRAL | {"source": "cross", "normalise": "rms", "rotation": "half", "cap": "before"}
    drawn = draw(choice).convert(torch.from_numpy)
    x = drawn.x.requires_grad_()
    options = drawn.options | {"keep": torch.zeros(1, 1, 5, 7, dtype=torch.bool)}
    y = attnspec.multi_head_attention(x, drawn.parameters, **options)
    assert torch.equal(y, drawn.parameters.b_o.expand_as(y))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def neutral_cases():
    drawn = draw(NEUTRAL | {"source": "cross_v", "heads": "contiguous", "normalise": "rms"})
    policy = drawn.options["policy"]
    seq_q, seq_k, h, h_kv, d_k = 5, 7, 6, 3, 6
    order = Positions(np.arange(seq_q)[None], np.arange(seq_k)[None])
    still = Positions(np.zeros((1, seq_q), int), np.zeros((1, seq_k), int))
    more = {
        "keep": {"keep": np.ones((2, h, seq_q, seq_k), bool)},
        "no rules": {"keep": Mask()},
        "keep flags": {"keep": Mask.keep(np.ones((2, seq_k), bool), "batch seq_k")},
        "drop nothing": {"keep": Mask.drop(np.zeros((seq_q, seq_k), bool), "seq_q seq_k")},
        "add nothing": {"keep": Mask.additive(np.zeros((seq_q, seq_k)), "seq_q seq_k")},
        "full lengths": {"keep": Mask.lengths(np.array([seq_k, seq_k]))},
        "one document": {"keep": Mask.documents(np.zeros((1, seq_q), int), np.zeros((1, seq_k), int))},
        "bias": {"bias": np.zeros((1, 1, 1, 1))},
        "scale": {"scale": 1 / np.sqrt(d_k).item()},
        "dropout": {"dropout": Dropout(0.0, np.random.default_rng(0))},
        "causal from the end on": {"causal": True, "offset": seq_k},
        "wide window": {"policy": dataclasses.replace(policy, window=(seq_q, seq_k))},
        "positions": {"positions": order},
        "rotation at rest": {"policy": dataclasses.replace(policy, rotation=Rotation()), "positions": still},
        "scale by policy": {"policy": dataclasses.replace(policy, scale=1 / np.sqrt(d_k).item())},
        "anchor": {"policy": dataclasses.replace(policy, causal_anchor="bottom_right")},
        "softmax in float64": {"policy": dataclasses.replace(policy, softmax_precision="float64")},
        "softmax as the input": {"policy": dataclasses.replace(policy, softmax_precision="input")},
        "products in float64": {"policy": dataclasses.replace(policy, product_precision="float64")},
        "empty rows nan": {"policy": dataclasses.replace(policy, empty_row="nan")},
        "empty rows uniform": {"policy": dataclasses.replace(policy, empty_row="uniform"), "keep": np.ones((1, 1, 1, seq_k), bool)},
        "empty rows unmasked": {"policy": dataclasses.replace(policy, empty_row="unmasked"), "keep": np.ones((1, 1, 1, seq_k), bool)},
        "gates": {"gates": np.ones(h)},
        "sinks": {"sinks": np.full(h, -np.inf)},
        "gains": {"gain_q": np.ones((h, d_k)), "gain_k": np.ones((1, d_k))},
        "no extra keys": {"extra_k": np.ones((h_kv, 0, d_k)), "extra_v": np.ones((h_kv, 0, 3))},
    }
    return drawn, more


@pytest.mark.parametrize("name", neutral_cases()[1])
def test_an_option_at_its_neutral_value_changes_nothing(name):
    drawn, cases = neutral_cases()
    case = cases[name]
    arrays = {key: value for key, value in case.items() if key in vars(drawn.parameters)}
    options = {key: value for key, value in case.items() if key not in arrays}
    changed = dataclasses.replace(drawn, parameters=dataclasses.replace(drawn.parameters, **arrays), options=drawn.options | options)
    np.testing.assert_array_equal(changed.run(), drawn.run())


def test_strided_groups_of_one_are_contiguous():
    drawn = draw(NEUTRAL)
    changed = dataclasses.replace(drawn, options=drawn.options | {"policy": Policy(grouping="strided")})
    np.testing.assert_array_equal(changed.run(), drawn.run())


CALLS = {
    "offset without use": ({"offset": 2}, "offset=2 says where the queries stand, but nothing asks"),
    "offset and positions": (
        {"offset": 2, "causal": True, "positions": Positions(np.arange(5)[None], np.arange(5)[None])},
        "offset=2 and positions both say where the queries stand; give one.",
    ),
    "gains without normalisation": ({"gain_q": np.ones((1, 6))}, "parameters have gains, but policy.normalise=None"),
    "extra keys without values": ({"extra_k": np.ones((3, 2, 6))}, "extra_k and extra_v come in pairs"),
    "odd rotation": ({"policy": lambda: Policy(rotation=Rotation(width=3))}, "Rotation: width=3 must be an even number of channels"),
    "rotation wider than the head": ({"policy": Policy(rotation=Rotation(width=8))}, "rotate: width=8 must be even"),
    "cap of zero": ({"policy": lambda: Policy(cap=0.0)}, "Policy: cap=0.0 must be positive"),
    "negative window": ({"policy": lambda: Policy(window=(-1, 0))}, "Policy: window=(-1, 0) must count keys"),
    "infinite scale": ({"policy": lambda: Policy(scale=float("inf"))}, "Policy: scale=inf must be finite"),
    "unknown word": ({"policy": lambda: Policy(empty_row="zeros")}, "Policy: empty_row='zeros' must be 'zero' or 'nan' or"),
    "dropout of all": ({"dropout": lambda: Dropout(1.0, None)}, "Dropout: rate=1.0 must be at least 0 and less than 1"),
    "axes out of order": ({"keep": lambda: Mask.keep(np.ones((5, 2), bool), "seq_k batch")}, "Mask: axes='seq_k batch' must be some of"),
}


@pytest.mark.parametrize("name", CALLS)
def test_impossible_combinations_say_which_two_and_why(name):
    case, sentence = CALLS[name]
    drawn = draw(NEUTRAL)
    with pytest.raises(ConfigError) as refusal:
        made = {key: value() if callable(value) else value for key, value in case.items()}
        arrays = {key: made.pop(key) for key in [*made] if key in vars(drawn.parameters)}
        parameters = dataclasses.replace(drawn.parameters, **arrays)
        dataclasses.replace(drawn, parameters=parameters, options=drawn.options | made).run()
    assert sentence in str(refusal.value)


def test_a_padding_mask_cannot_pass_for_an_attention_mask():
    square = np.ones((5, 5), bool)
    with pytest.raises(ShapeError, match="needs 4"):
        dataclasses.replace(drawn := draw(NEUTRAL), options=drawn.options | {"keep": square}).run()
    drawn = draw(NEUTRAL, sizes={**draw.__defaults__[1], "batch": 5})
    padding, attention = (Mask.keep(np.tri(5, dtype=bool), axes) for axes in ("batch seq_k", "seq_q seq_k"))
    first, second = (dataclasses.replace(drawn, options=drawn.options | {"keep": keep}).run() for keep in (padding, attention))
    assert not np.allclose(first, second)
    with pytest.raises(ShapeError, match="Mask: keep \\(2, 5\\) has batch=2, but batch=5 was set by the queries"):
        dataclasses.replace(drawn, options=drawn.options | {"keep": Mask.keep(np.ones((2, 5), bool), "batch seq_k")}).run()


DECODABLE = {
    "plain": {},
    "rotary, windowed, capped": {"rotation": "interleaved", "window": (2, None), "cap": "before"},
    "grouped, normalised": {"heads": "strided", "normalise": "rms", "gains": "each", "rotation": "partial"},
    "with extra keys and sinks": {"heads": "contiguous", "extra": True, "sinks": True, "gates": True},
}


@pytest.mark.parametrize("chunks", [(1,) * 11, (11,), (4, 1, 6), (10, 1)])
@pytest.mark.parametrize("name", DECODABLE)
def test_one_call_of_n_tokens_equals_n_calls_of_one(name, chunks):
    drawn = draw(NEUTRAL | DECODABLE[name] | {"causal": True}, sizes={**draw.__defaults__[1], "seq_q": 11})
    cache, found, start = None, [], 0
    for length in chunks:
        y, cache = attnspec.decode(drawn.x[:, start : start + length], drawn.parameters, cache, policy=drawn.options["policy"])
        found.append(y)
        start += length
    np.testing.assert_allclose(np.concatenate(found, axis=1), drawn.run(), rtol=0, atol=ROUNDING)
    assert cache.seen == 11


def test_a_cropped_cache_is_the_cache_of_an_earlier_moment():
    drawn = draw(NEUTRAL | {"rotation": "half"})
    x, parameters, policy = drawn.x, drawn.parameters, drawn.options["policy"]
    _, early = attnspec.decode(x[:, :2], parameters, None, policy=policy)
    _, late = attnspec.decode(x[:, 2:], parameters, early, policy=policy)
    np.testing.assert_array_equal(late.crop(2).keys, early.keys)
    np.testing.assert_array_equal(late.crop(2).values, early.values)
    with pytest.raises(ConfigError, match="crop: seen=6 must lie between the 0 forgotten and the 5 seen tokens"):
        late.crop(6)


def test_a_reordered_cache_goes_on_with_the_picked_sequences():
    drawn = draw(NEUTRAL | {"rotation": "half"})
    x, parameters, policy = drawn.x, drawn.parameters, drawn.options["policy"]
    order = np.array([1, 1])
    _, cache = attnspec.decode(x[:, :3], parameters, None, policy=policy)
    picked, _ = attnspec.decode(x[order, 3:], parameters, cache.reorder(order), policy=policy)
    _, whole = attnspec.decode(x[order, :3], parameters, None, policy=policy)
    wanted, _ = attnspec.decode(x[order, 3:], parameters, whole, policy=policy)
    np.testing.assert_array_equal(picked, wanted)


def test_evicting_what_no_window_reaches_changes_nothing():
    drawn = draw(NEUTRAL | {"rotation": "half", "window": (2, None)}, sizes={**draw.__defaults__[1], "seq_q": 11})
    x, parameters, policy = drawn.x, drawn.parameters, drawn.options["policy"]
    full = short = None
    for token in range(11):
        wanted, full = attnspec.decode(x[:, token : token + 1], parameters, full, policy=policy)
        got, short = attnspec.decode(x[:, token : token + 1], parameters, short, policy=policy)
        short = short.evict(2)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=ROUNDING)
    assert (short.seen, short.evicted, short.keys.shape[2]) == (11, 9, 2)


def test_a_cache_refuses_keys_that_do_not_fit():
    cache = Cache(np.ones((2, 3, 5, 7)), np.ones((2, 3, 5, 11)))
    with pytest.raises(ShapeError, match="append_to_cache: new \\(2, 4, 1, 7\\) has h_kv=4, but h_kv=3 was set by cached"):
        cache.append(np.ones((2, 4, 1, 7)), np.ones((2, 4, 1, 11)))
    with pytest.raises(ShapeError, match="Cache: values \\(2, 3, 4, 11\\) has past=4, but past=5 was set by keys"):
        Cache(np.ones((2, 3, 5, 7)), np.ones((2, 3, 4, 11)))


@pytest.mark.parametrize("library", ["numpy", *LIBRARIES])
@pytest.mark.parametrize("rotation", [None, "half"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_equal_padded_ones(causal, rotation, library):
    wrap = LIBRARIES.get(library, np.asarray)
    drawn = draw(NEUTRAL | {"source": "cross", "rotation": rotation})
    lengths_q, lengths_k = (3, 5), (7, 4)
    x, context = drawn.x, drawn.options["context"]
    padded = dataclasses.replace(drawn, options=drawn.options | {"keep": Mask.lengths(np.array(lengths_k)), "causal": causal}).run()

    def pack(array, lengths):
        return wrap(np.concatenate([row[:length] for row, length in zip(array, lengths, strict=True)])[None])

    cumulative_q, cumulative_k = (wrap(np.cumsum([0, *lengths])) for lengths in (lengths_q, lengths_k))
    keep, positions = attnspec.packed(cumulative_q, cumulative_k, seq_q=8, seq_k=11)
    options = {"keep": keep, "positions": positions, "context": pack(context, lengths_k), "policy": drawn.options["policy"]}
    packed = attnspec.multi_head_attention(pack(x, lengths_q), drawn.parameters.map(wrap), causal=causal, **options)
    np.testing.assert_allclose(np.asarray(packed), np.asarray(pack(padded, lengths_q)), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("heads", [{0}, {1, 2}])
def test_pruned_heads_are_gated_heads(heads):
    drawn = draw(NEUTRAL | {"sinks": True, "extra": True, "gates": True, "normalise": "rms", "gains": "each"})
    gates = drawn.parameters.gates * np.array([head not in heads for head in range(3)])
    gated = dataclasses.replace(drawn, parameters=dataclasses.replace(drawn.parameters, gates=gates))
    pruned = dataclasses.replace(drawn, parameters=drawn.parameters.prune(heads))
    assert pruned.parameters.heads.h == 3 - len(heads)
    np.testing.assert_allclose(pruned.run(), gated.run(), rtol=0, atol=ROUNDING)


def test_whole_groups_are_pruned_with_their_keys():
    drawn = draw(NEUTRAL | {"heads": "contiguous"})
    pruned = drawn.parameters.prune({2, 3})
    assert (pruned.heads.h, pruned.heads.h_kv) == (4, 2)
    np.testing.assert_array_equal(pruned.w_k, drawn.parameters.w_k[[0, 2]])
    for heads in ({0}, {6}, range(6)):
        with pytest.raises(ConfigError, match="prune: heads="):
            drawn.parameters.prune(heads)


@pytest.mark.parametrize("h", range(1, 20))
def test_slopes_fall_and_powers_of_two_are_a_geometric_sequence(h):
    slopes = attnspec.alibi_slopes(h)
    assert len(slopes) == len(set(slopes)) == h
    assert all(0 < slope < 1 for slope in slopes)
    if h & (h - 1) == 0:
        assert slopes == tuple(2 ** (-8 * (i + 1) / h) for i in range(h))


def test_near_keys_have_buckets_of_their_own_and_far_ones_share():
    table = np.arange(32.0)[:, None]
    ahead = np.array([0, 1, 7, 8, 127, 128, 10_000])
    both = attnspec.relative_bias(table, np.zeros((1, 1), int), ahead[None])[0, 0, 0]
    np.testing.assert_array_equal(both, [0, 17, 23, 24, 31, 31, 31])
    back = attnspec.relative_bias(table, np.zeros((1, 1), int), -ahead[None], bidirectional=False)[0, 0, 0]
    np.testing.assert_array_equal(back, [0, 1, 7, 8, 31, 31, 31])


def test_what_dropout_drops_is_zero_and_the_rest_is_raised():
    weights = np.full((2, 3, 50, 70), 1 / 70)
    survivors = attnspec.draw_survivors(weights, rate=0.25, generator=np.random.default_rng(0))
    dropped = attnspec.drop(weights, survivors, rate=0.25)
    assert set(np.unique(dropped)) == {0.0, 1 / 70 / 0.75}
    assert abs(survivors.mean() - 0.75) < 6 * np.sqrt(0.25 * 0.75 / survivors.size)


def test_weights_are_those_before_dropout():
    drawn = draw(NEUTRAL | {"dropout": True})
    with attnspec.trace() as steps:
        drawn.run()
    np.testing.assert_allclose(steps["softmax"].result.sum(-1), 1, rtol=ROUNDING)
    assert not np.allclose(steps["drop"].result.sum(-1), 1)


def test_a_convention_that_is_not_said_is_that_of_its_source():
    assert dataclasses.asdict(Rotation()) == {"pairing": "half", "width": None, "base": 10_000.0}
    assert dataclasses.asdict(Policy()) == {
        "scale": None, "cap": None, "cap_order": "before", "causal_anchor": "top_left", "window": (None, None), "empty_row": "zero",
        "grouping": "contiguous", "rotation": None, "normalise": None, "epsilon": 1e-6,
        "softmax_precision": None, "product_precision": None,
    }  # fmt: skip
    x, positions = np.random.default_rng(0).normal(size=(2, 3, 5, 8)), np.arange(5)[None]
    np.testing.assert_array_equal(attnspec.rotate(x, positions), attnspec.rotate(x, positions, **vars(Rotation())))
    np.testing.assert_array_equal(attnspec.normalise(x, kind="rms"), attnspec.normalise(x, kind="rms", epsilon=Policy().epsilon))


X, AT = np.zeros((2, 3, 5, 4)), np.zeros((2, 5), int)
HOLDS_ARRAYS = (
    Dropout(0.5, np.random.default_rng(0)), Cache(X, X), Positions(AT, AT), attnspec.Parameters.random(attnspec.Heads(d_model=6, h=3)),
    Mask.causal(), *(Mask.keep(X > 0) & Mask.lengths(AT[:, 0]) & Mask.causal() & Mask.window(1, 1) & Mask.documents(AT)).rules,
)  # fmt: skip
HOLDS_WORDS = Rotation(), Policy(), attnspec.Heads(d_model=6, h=3)


@pytest.mark.parametrize("built", [*HOLDS_ARRAYS, *HOLDS_WORDS], ids=lambda built: type(built).__name__)
def test_what_was_checked_when_it_was_built_cannot_be_changed(built):
    for name in vars(built):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(built, name, getattr(built, name))


@pytest.mark.parametrize("built", [*HOLDS_ARRAYS, Places(X, X)], ids=lambda built: type(built).__name__)
def test_what_holds_arrays_equals_itself_alone(built):
    assert len({built, built, copy(built)}) == 2


@pytest.mark.parametrize("built", HOLDS_WORDS, ids=lambda built: type(built).__name__)
def test_what_holds_words_and_numbers_equals_what_holds_the_same(built):
    assert len({built, built, copy(built)}) == 1


@pytest.mark.parametrize("asked", [{"causal": True}, {"keep": np.ones((2, 1, 1, 0), bool)}, {"bias": np.zeros((1, 1, 5, 0))}], ids=str)
def test_extra_keys_serve_where_the_context_has_none(asked):
    heads, rng = attnspec.Heads(d_model=12, h=3), np.random.default_rng(0)
    extra = {"extra_k": rng.normal(size=(3, 1, 4)), "extra_v": rng.normal(size=(3, 1, 4))}
    parameters = dataclasses.replace(attnspec.Parameters.random(heads, seed=0), **extra)
    with attnspec.trace() as steps:
        attnspec.multi_head_attention(rng.normal(size=(2, 5, 12)), parameters, context=np.zeros((2, 0, 12)), **asked)
    np.testing.assert_array_equal(steps["softmax"].result, np.ones((2, 3, 5, 1)))
