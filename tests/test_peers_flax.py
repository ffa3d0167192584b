"""Flax: nnx.MultiHeadAttention is the specification, the conventions declared."""

import itertools
from dataclasses import replace

import pytest
from peers import DOUBLE, SOFTMAX, assert_differs, assert_empty_row, assert_equal, draw, draw_problem

import attnspec
from attnspec import Mask, Policy, layouts

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
jnp = jax.numpy

pytestmark = pytest.mark.peers

GROUPED = attnspec.Heads(d_model=17, h=6, h_kv=3, d_k=11, d_key_in=19)
EVEN = attnspec.Heads(d_model=17, h=3, d_k=11, d_key_in=19)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def flax_layer(parameters, **options):
    heads = parameters.heads
    layer = nnx.MultiHeadAttention(
        heads.h,
        heads.d_model,
        qkv_features=heads.h * heads.d_k,
        num_kv_heads=heads.h_kv,
        in_kv_features=heads.d_key_in,
        use_bias=parameters.b_q is not None,
        param_dtype=jnp.float64,
        decode=options.pop("decode", False),
        rngs=nnx.Rngs(0),
        **options,
    )
    stored = layouts.write(parameters, "flax")
    for linear, name in itertools.product(("query", "key", "value", "out"), ("kernel", "bias")):
        put(getattr(getattr(layer, linear), name), stored.get(f"{linear}.{name}"))
    return layer


def put(variable, value):
    if value is not None:
        assert variable[...].shape == value.shape
        variable[...] = jnp.asarray(value)


def flax_call(layer, *inputs, sow, **options):
    """Call the layer, and get its weights too where they are sown."""
    inputs = [jnp.asarray(each) for each in inputs]
    if not sow:
        return layer(*inputs, **options), None
    y, sown = nnx.capture(lambda each, *arrays: each(*arrays, sow_weights=True, **options), nnx.Intermediate)(layer, *inputs)
    return y, sown["attention_weights"][0]


def mha(problem, /, **options):
    return attnspec.multi_head_attention(problem.x, problem.parameters, context=problem.context, context_v=problem.context_v, **options)


@pytest.mark.parametrize("sow", [True, False])
class TestFlax:
    """Whoever asks for the weights (`sow`) gets a softmax in the dtype of the input, everyone else JAX's in float32."""

    @pytest.fixture
    def policy(self, sow):
        return Policy(empty_row="uniform", softmax_precision="input" if sow else "float32")

    @pytest.mark.parametrize("heads", [GROUPED, EVEN], ids=["grouped", "even"])
    @pytest.mark.parametrize("bias", [True, False])
    def test_queries_keys_and_values_have_sources_of_their_own(self, sow, policy, heads, bias):
        problem = draw_problem(heads, bias=bias)
        layer, inputs = flax_layer(problem.parameters), (problem.x, problem.context, problem.context_v)
        theirs, weights = flax_call(layer, *inputs, mask=jnp.asarray(problem.keep), sow=sow)
        with attnspec.trace() as steps:
            mine = mha(problem, keep=problem.keep, policy=policy)
        assert_equal(mine, theirs, within=DOUBLE if sow else SOFTMAX)
        assert_differs(mha(problem, keep=Mask.drop(problem.keep), policy=policy), theirs)
        if sow:
            assert_equal(steps["softmax"].result, weights, within=DOUBLE)
        if heads is GROUPED:
            assert_differs(mha(problem, keep=problem.keep, policy=replace(policy, grouping="strided")), theirs)

    def test_is_causal_starts_top_left(self, sow, policy):
        problem = draw_problem(GROUPED)
        theirs, _ = flax_call(flax_layer(problem.parameters), problem.x, problem.context, problem.context_v, is_causal=True, sow=sow)
        assert_equal(mha(problem, causal=True, policy=policy), theirs, within=DOUBLE if sow else SOFTMAX)
        assert_differs(mha(problem, causal=True, policy=replace(policy, causal_anchor="bottom_right")), theirs)

    def test_normalize_qk_is_layer_normalisation_with_a_gain(self, sow, policy):
        problem = draw_problem(GROUPED)
        layer = flax_layer(problem.parameters, normalize_qk=True)
        gains = {"gain_q": draw(1, 11), "gain_k": draw(1, 11, seed=1)}
        put(layer.query_ln.scale, gains["gain_q"][0])
        put(layer.key_ln.scale, gains["gain_k"][0])
        problem = replace(problem, parameters=replace(problem.parameters, **gains))
        theirs, _ = flax_call(layer, problem.x, problem.context, problem.context_v, mask=jnp.asarray(problem.keep), sow=sow)
        policy = replace(policy, normalise="layer")
        assert_equal(mha(problem, keep=problem.keep, policy=policy), theirs, within=DOUBLE if sow else SOFTMAX)
        assert_differs(mha(problem, keep=problem.keep, policy=replace(policy, normalise="rms")), theirs)

    def test_decoding_token_by_token_is_decoding_all_at_once(self, sow, policy):
        heads = attnspec.Heads(d_model=17, h=6, h_kv=3, d_k=11)
        problem = draw_problem(heads)
        layer = flax_layer(problem.parameters, decode=True)
        layer.init_cache((2, 5, 17), dtype=jnp.float64)
        theirs = jnp.concatenate([flax_call(layer, problem.x[:, [token]], sow=sow)[0] for token in range(5)], axis=1)
        cache = None
        for chunk in (slice(0, 2), slice(2, 5)):
            mine, cache = attnspec.decode(problem.x[:, chunk], problem.parameters, cache, policy=policy)
            assert_equal(mine, theirs[:, chunk], within=DOUBLE if sow else SOFTMAX)

    def test_a_query_without_keys_gets_the_mean_of_all_values(self, sow, policy):
        problem = draw_problem(EVEN)
        problem.keep[0, :, 1] = problem.keep[1, 2, 3] = False
        layer = flax_layer(problem.parameters)
        theirs, _ = flax_call(layer, problem.x, problem.context, problem.context_v, mask=jnp.asarray(problem.keep), sow=sow)

        def compute(policy):
            return mha(problem, keep=problem.keep, policy=policy)

        assert_empty_row("uniform", theirs, compute, within=DOUBLE if sow else SOFTMAX, policy=policy)
