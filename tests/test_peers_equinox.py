"""Equinox: its MultiheadAttention is the specification, the conventions declared."""

import numpy as np
import pytest
from peers import DOUBLE, assert_differs, assert_empty_row, assert_equal, draw_problem

import attnspec
from attnspec import Mask, Policy, layouts

jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
jnp = jax.numpy

pytestmark = pytest.mark.peers

FREE = attnspec.Heads(d_model=17, h=3, d_k=11, d_v=13, d_key_in=19, d_value_in=23)
FOUR_BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def mha(problem, /, **options):
    return attnspec.multi_head_attention(problem.x, problem.parameters, context=problem.context, context_v=problem.context_v, **options)


def equinox_layer(parameters):
    heads = parameters.heads
    sizes = {"key_size": heads.d_key_in, "value_size": heads.d_value_in, "qk_size": heads.d_k, "vo_size": heads.d_v}
    layer = eqx.nn.MultiheadAttention(heads.h, heads.d_model, **sizes, **FOUR_BIASES, key=jax.random.key(0))
    new = list(layouts.write(parameters, "equinox").values())
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
