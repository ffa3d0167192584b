"""JAX: its dot_product_attention is the specification, the conventions declared."""

from dataclasses import replace

import numpy as np
import pytest
from einops import rearrange
from peers import SOFTMAX, assert_differs, assert_empty_row, assert_equal, draw, draw_keep, gap

import attnspec
from attnspec import Mask, Policy

jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = pytest.mark.peers

# "always carried out in fp32", says a comment in jax.nn.dot_product_attention of its softmax, whatever the dtype.
JAX = Policy(softmax_precision="float32", empty_row="uniform")


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
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
