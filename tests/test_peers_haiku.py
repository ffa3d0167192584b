"""Haiku: its MultiHeadAttention is the specification, in its own layout."""

import numpy as np
import pytest
from peers import DOUBLE, assert_equal, draw_problem

import attnspec
from attnspec import layouts

hk = pytest.importorskip("haiku")
jax = pytest.importorskip("jax")
jax.config.update("jax_enable_x64", val=True)

pytestmark = pytest.mark.peers

HEADS = attnspec.Heads(d_model=15, h=3, d_k=10, d_v=13, d_key_in=19, d_value_in=17)


def run(problem, *, keep):
    """Haiku's own forward pass on the tensors that the layout writes."""

    def forward(query, key, value):
        layer = hk.MultiHeadAttention(
            HEADS.h, HEADS.d_k, w_init=hk.initializers.Constant(0.0), value_size=HEADS.d_v, model_size=HEADS.d_model
        )
        return layer(query, key, value, mask=keep)

    named = layouts.write(problem.parameters, "haiku")
    stored = {f"multi_head_attention/{linear}": {n: named[f"{linear}/{n}"] for n in "wb"} for linear in ("query", "key", "value", "linear")}
    return hk.transform(forward).apply(stored, None, problem.x, problem.context, problem.context_v)


@pytest.mark.parametrize("masked", [False, True])
def test_haiku_computes_the_specification_in_the_layout_of_haiku(masked):
    problem = draw_problem(HEADS)
    keep = problem.keep if masked else None
    wanted = attnspec.multi_head_attention(problem.x, problem.parameters, context=problem.context, context_v=problem.context_v, keep=keep)
    assert_equal(np.asarray(run(problem, keep=keep)), wanted, within=DOUBLE)
