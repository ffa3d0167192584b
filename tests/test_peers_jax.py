"""JAX and the layers built on it, Flax and Equinox: they are the specification, their conventions declared."""

from dataclasses import replace

import numpy as np
import pytest
from einops import rearrange
from peers import DOUBLE, SOFTMAX, assert_differs, assert_empty_row, assert_equal, draw, draw_keep, draw_problem, gap

import attnspec
from attnspec import Mask, Policy

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")
jnp = jax.numpy

pytestmark = pytest.mark.peers

# "always carried out in fp32", says a comment in jax.nn.dot_product_attention of its softmax, whatever the dtype.
JAX = Policy(softmax_precision="float32", empty_row="uniform")


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):  # noqa: FBT003  # its only parameter
        yield


@pytest.fixture(params=["numpy", "jax"])
def array(request):
    return {"numpy": np.asarray, "jax": jnp.asarray}[request.param]


def draw_heads(*, h_kv=6, seq_q=5, seq_k=7):
    """Draw queries, keys and values of one width: JAX knows no other."""
    return draw(2, 6, seq_q, 11) * 2, draw(2, h_kv, seq_k, 11), draw(2, h_kv, seq_k, 11, seed=1)


def attend(array, heads, *, policy=JAX, **options):
    queries, keys, values = map(array, heads)
    keys, values = attnspec.share_keys(keys, h=6, grouping=policy.grouping), attnspec.share_values(values, h=6, grouping=policy.grouping)
    return attnspec.attend(queries, keys, values, policy=policy, **options)


def jax_attend(heads, **options):
    """JAX's function, whose heads stand behind the sequence."""
    blended = jax.nn.dot_product_attention(*(jnp.asarray(rearrange(t, "b h s d -> b s h d")) for t in heads), **options)
    return rearrange(blended, "b t h d -> b h t d")


class TestDotProductAttention:
    def test_a_mask_keeps_where_it_is_true_and_a_bias_is_added(self, array):
        heads, keep, bias = draw_heads(), draw_keep(2, 6, 5, 7), draw(2, 6, 5, 7)
        theirs = jax_attend(heads, mask=jnp.asarray(keep), bias=jnp.asarray(bias))
        assert_equal(attend(array, heads, keep=array(keep), bias=array(bias)), theirs, within=SOFTMAX)
        assert_differs(attend(array, heads, keep=Mask.drop(array(keep)), bias=array(bias)), theirs)
        assert_differs(attend(array, heads, keep=array(keep)), theirs)

    @pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 7), (7, 5)])
    def test_is_causal_starts_top_left(self, array, seq_q, seq_k):
        heads = draw_heads(seq_q=seq_q, seq_k=seq_k)
        theirs = jax_attend(heads, is_causal=True)
        assert_equal(attend(array, heads, causal=True), theirs, within=SOFTMAX)
        assert_differs(attend(array, heads, causal=True, policy=replace(JAX, causal_anchor="bottom_right")), theirs)

    @pytest.mark.parametrize("causal", [True, False])
    def test_a_local_window_counts_keys_to_the_left_and_the_right(self, array, causal):
        heads = draw_heads()
        theirs = jax_attend(heads, local_window_size=(2, 1), is_causal=causal)
        assert_equal(attend(array, heads, causal=causal, policy=replace(JAX, window=(2, 1))), theirs, within=SOFTMAX)
        assert_equal(attend(array, heads, causal=causal, keep=Mask.window(2, 1)), theirs, within=SOFTMAX)
        assert_differs(attend(array, heads, causal=causal, policy=replace(JAX, window=(1, 2))), theirs)
        assert_differs(attend(array, heads, causal=causal, policy=replace(JAX, window=(1, 0))), theirs)

    def test_lengths_count_the_keys_that_are_real(self, array):
        heads, lengths = draw_heads(), np.array([4, 6])
        theirs = jax_attend(heads, key_value_seq_lengths=jnp.asarray(lengths, "int32"))
        assert_equal(attend(array, heads, keep=Mask.lengths(array(lengths))), theirs, within=SOFTMAX)
        assert_differs(attend(array, heads, keep=Mask.lengths(array(lengths + 1))), theirs)

    def test_lengths_of_queries_silence_the_others(self, array):
        """What the specification has no word for: padded queries give exactly zero, though their weights are uniform."""
        heads, lengths = draw_heads(), np.array([3, 5])
        theirs = jax_attend(heads, query_seq_lengths=jnp.asarray(lengths, "int32"))
        real = np.arange(5) < lengths[:, None]
        assert_equal(attend(array, heads) * array(real[:, None, :, None].astype(float)), theirs, within=SOFTMAX)

    @pytest.mark.parametrize("h_kv", [1, 3])
    def test_grouped_heads_are_contiguous(self, array, h_kv):
        heads, keep = draw_heads(h_kv=h_kv), draw_keep(2, 6, 5, 7)
        theirs = jax_attend(heads, mask=jnp.asarray(keep))
        assert_equal(attend(array, heads, keep=array(keep)), theirs, within=SOFTMAX)
        if h_kv > 1:
            assert_differs(attend(array, heads, keep=array(keep), policy=replace(JAX, grouping="strided")), theirs)

    def test_scale_is_the_factor(self, array):
        heads = draw_heads()
        assert_equal(attend(array, heads, scale=0.7), jax_attend(heads, scale=0.7), within=SOFTMAX)

    @pytest.mark.parametrize("through", ["mask", "lengths", "bias"])
    def test_a_query_without_keys_gets_the_mean_of_all_values_or_nan_from_a_bias(self, array, through):
        heads, lengths = draw_heads(), np.array([0, 6])
        keep = np.arange(7) < lengths[:, None, None, None]
        given = {
            "mask": {"mask": jnp.asarray(keep)},
            "lengths": {"key_value_seq_lengths": jnp.asarray(lengths, "int32")},
            "bias": {"bias": jnp.where(keep, 0.0, -jnp.inf)},
        }[through]
        row = "nan" if through == "bias" else "uniform"

        def compute(policy):
            return attend(array, heads, keep=array(keep), policy=policy)

        assert_empty_row(row, jax_attend(heads, **given), compute, within=SOFTMAX, policy=JAX)

    def test_the_declared_precision_of_the_softmax_is_the_peers(self, array):
        queries, keys, values = draw_heads()
        heads = queries * 30, keys, values  # scores of some 100, of which float32 rounds each by 4e-6
        theirs = jax_attend(heads)
        declared, other = (
            gap(attend(array, heads, policy=replace(JAX, softmax_precision=each)), theirs) for each in ("float32", "float64")
        )
        assert 10 * declared < other


GROUPED = attnspec.Heads(d_model=17, h=6, h_kv=3, d_k=11, d_key_in=19)
EVEN = attnspec.Heads(d_model=17, h=3, d_k=11, d_key_in=19)


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
    for name, linear in (("q", layer.query), ("k", layer.key), ("v", layer.value)):
        put(linear.kernel, rearrange(getattr(parameters, f"w_{name}"), "h e k -> e h k"))
        put(linear.bias, getattr(parameters, f"b_{name}"))
    put(layer.out.kernel, rearrange(parameters.w_o, "(h v) o -> h v o", h=heads.h))
    put(layer.out.bias, parameters.b_o)
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


FREE = attnspec.Heads(d_model=17, h=3, d_k=11, d_v=13, d_key_in=19, d_value_in=23)
FOUR_BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


def equinox_layer(parameters):
    heads = parameters.heads
    sizes = {"key_size": heads.d_key_in, "value_size": heads.d_value_in, "qk_size": heads.d_k, "vo_size": heads.d_v}
    layer = eqx.nn.MultiheadAttention(heads.h, heads.d_model, **sizes, **FOUR_BIASES, key=jax.random.key(0))
    new = []
    for w, b in ((parameters.w_q, parameters.b_q), (parameters.w_k, parameters.b_k), (parameters.w_v, parameters.b_v)):
        new += [rearrange(w, "h e k -> (h k) e"), rearrange(b, "h k -> (h k)")]
    new += [parameters.w_o.T, parameters.b_o]
    assert [each.shape for each in equinox_arrays(layer)] == [each.shape for each in new]
    return eqx.tree_at(equinox_arrays, layer, list(map(jnp.asarray, new)))


def equinox_arrays(layer):
    return [
        getattr(each, name)
        for each in (layer.query_proj, layer.key_proj, layer.value_proj, layer.output_proj)
        for name in ("weight", "bias")
    ]


def equinox_attend(problem, keep, **options):
    """Equinox knows no batch: one call for each sequence, all at once."""
    layer = equinox_layer(problem.parameters)

    def one(x, context, context_v, keep):
        return layer(x, context, context_v, mask=keep, **options)

    return jax.vmap(one)(*map(jnp.asarray, (problem.x, problem.context, problem.context_v, keep)))


class TestEquinox:
    @pytest.mark.parametrize("per_head", [True, False])
    def test_all_widths_are_free(self, per_head):
        problem = draw_problem(FREE)
        keep = problem.keep if per_head else problem.keep[:, 0]
        theirs = equinox_attend(problem, keep)
        mask = Mask.keep(keep, "batch h seq_q seq_k" if per_head else "batch seq_q seq_k")
        assert_equal(mha(problem, keep=mask), theirs, within=DOUBLE)
        assert_differs(mha(problem, keep=~problem.keep), theirs)

    def test_processed_heads_may_be_rotated_by_halves(self):
        problem = draw_problem(attnspec.Heads(d_model=17, h=3, d_k=10))
        rope = jax.vmap(eqx.nn.RotaryPositionalEmbedding(10, theta=100.0, dtype=jnp.float64), in_axes=1, out_axes=1)
        theirs = equinox_attend(problem, problem.keep, process_heads=lambda queries, keys, values: (rope(queries), rope(keys), values))
        policy = Policy(rotation=attnspec.Rotation(pairing="half", base=100.0))
        assert_equal(mha(problem, keep=problem.keep, policy=policy), theirs, within=DOUBLE)
        interleaved = Policy(rotation=attnspec.Rotation(pairing="interleaved", base=100.0))
        assert_differs(mha(problem, keep=problem.keep, policy=interleaved), theirs)

    def test_a_query_without_keys_gets_the_mean_of_all_values(self):
        problem = draw_problem(FREE)
        problem.keep[0, :, 1] = problem.keep[1, 2, 3] = False
        theirs = equinox_attend(problem, problem.keep)
        assert_empty_row("uniform", theirs, lambda policy: mha(problem, keep=problem.keep, policy=policy), within=DOUBLE)

    def test_an_additive_mask_is_taken_for_its_opposite(self):
        """Accepted and inverted: 0 is False and minus infinity is true, so what should be dropped is kept alone."""
        problem = draw_problem(FREE)
        keep = problem.keep & ~np.eye(5, 7, dtype=bool)
        keep[..., 1, 0] = True
        theirs = equinox_attend(problem, np.where(keep, 0.0, -np.inf))
        assert_equal(mha(problem, keep=Mask.drop(keep), policy=Policy(empty_row="uniform")), theirs, within=DOUBLE)
        assert_differs(mha(problem, keep=Mask.additive(np.where(keep, 0.0, -np.inf))), theirs)
