"""x-transformers: its Attention is the specification, on its own path and on PyTorch's fused one, its conventions declared."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from peers import DOUBLE, SINGLE, SOFTMAX, assert_differs, assert_empty_row, assert_equal, draw, draw_problem, gap

import attnspec
from attnspec import Mask, Policy, Positions, Rotation, layouts

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    x_transformers = pytest.importorskip("x_transformers.x_transformers")

pytestmark = pytest.mark.peers
both_paths = pytest.mark.parametrize("flash", [True, False], ids=["flash", "own"])

CONTEXT = attnspec.Heads(d_model=17, h=6, h_kv=3, d_k=10, d_v=13, d_key_in=19)
SELF = attnspec.Heads(d_model=17, h=6, h_kv=3, d_k=10, d_v=13)


def policy(*, flash, **options):
    """Declare its conventions: it alone gives query head i the key/value head i % h_kv, and its causality ends bottom right."""
    options = {"grouping": "strided", "causal_anchor": "bottom_right", **options}
    return Policy(softmax_precision="input" if flash else "float32", **options)


def within(*, flash):
    """How near it comes: its own path takes the softmax in float32, unless queries and keys are normalised; PyTorch's does not."""
    return DOUBLE if flash else SOFTMAX


def load(parameters, *, dtype=torch.float64, state=None, **options):
    heads = parameters.heads
    sizes = {"dim_head": heads.d_k, "value_dim_head": heads.d_v, "heads": heads.h, "kv_heads": heads.h_kv, "dim_context": heads.d_key_in}
    layer = x_transformers.Attention(heads.d_model, **sizes, **options).to(dtype)
    matrices = attnspec.Parameters(parameters.w_q, parameters.w_k, parameters.w_v, parameters.w_o)
    weights = layouts.write(matrices, "x_transformers") | (state or {})
    layer.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in weights.items()})
    return layer


def call(layer, *inputs, **options):
    with torch.no_grad():
        return layer(
            *map(torch.from_numpy, inputs), **{name: torch.from_numpy(o) if isinstance(o, np.ndarray) else o for name, o in options.items()}
        )


def draw_attention(heads=CONTEXT, **options):
    """Draw a problem without biases, which it has not, and with one context for keys and values."""
    problem = draw_problem(heads, bias=False, **options)
    return replace(problem, context_v=problem.context)


def draw_self_attention(*, seq=7):
    problem = draw_attention(SELF, seq_q=seq, seq_k=seq)
    return replace(problem, context=problem.x, context_v=problem.x)


def mha(problem, /, **options):
    return attnspec.multi_head_attention(problem.x, problem.parameters, context=problem.context, context_v=problem.context_v, **options)


@both_paths
def test_masks_keep_where_they_are_true_and_grouped_heads_are_strided(flash):
    problem, real = draw_attention(), np.arange(7) < np.array([[7], [4]])
    keep = problem.keep | (np.arange(7) == 0)
    theirs = call(load(problem.parameters, flash=flash), problem.x, problem.context, context_mask=real, attn_mask=keep)
    mask = Mask.keep(keep) & Mask.keep(real, "batch seq_k")
    assert_equal(mha(problem, keep=mask, policy=policy(flash=flash)), theirs, within=within(flash=flash))
    assert_equal(
        mha(problem, keep=Mask.keep(keep) & Mask.lengths(np.array([7, 4])), policy=policy(flash=flash)), theirs, within=within(flash=flash)
    )
    assert_differs(mha(problem, keep=mask, policy=policy(flash=flash, grouping="contiguous")), theirs)
    assert_differs(mha(problem, keep=Mask.keep(keep), policy=policy(flash=flash)), theirs)


@both_paths
@pytest.mark.parametrize("seq_q", [1, 5])
def test_causality_ends_bottom_right(flash, seq_q):
    problem = draw_attention(seq_q=seq_q)
    theirs = call(load(problem.parameters, flash=flash, causal=True), problem.x, problem.context)
    assert_equal(mha(problem, causal=True, policy=policy(flash=flash)), theirs, within=within(flash=flash))
    assert_differs(mha(problem, causal=True, policy=policy(flash=flash, causal_anchor="top_left")), theirs)


def test_causality_with_more_queries_than_keys_differs_from_path_to_path():
    problem = draw_attention(seq_q=7, seq_k=5)
    fused = call(load(problem.parameters, flash=True, causal=True), problem.x, problem.context)
    assert_equal(mha(problem, causal=True, policy=policy(flash=True, causal_anchor="top_left")), fused, within=DOUBLE)
    # Its own path looks for queries without keys in the mask alone: those that causality empties keep what the softmax makes of
    # them, which in float64 is NaN, since -finfo(float64).max is -inf to a softmax in float32, and in float32 the mean of all values.
    own = call(load(problem.parameters, causal=True), problem.x, problem.context)
    assert_empty_row("nan", own, within=SOFTMAX, policy=policy(flash=False), compute=lambda p: mha(problem, causal=True, policy=p))
    narrow = replace(problem, parameters=problem.parameters.map(lambda a: a.astype("float32")))
    narrow = replace(
        narrow, x=problem.x.astype("float32"), context=problem.context.astype("float32"), context_v=problem.context.astype("float32")
    )
    own = call(load(problem.parameters, dtype=torch.float32, causal=True), narrow.x, narrow.context)
    assert_empty_row("uniform", own, within=SINGLE, policy=policy(flash=False), compute=lambda p: mha(narrow, causal=True, policy=p))


@both_paths
def test_a_query_without_keys_gets_zeros(flash):
    problem = draw_attention()
    problem.keep[0, :, 1] = problem.keep[1, 2, 3] = False
    theirs = call(load(problem.parameters, flash=flash), problem.x, problem.context, attn_mask=problem.keep)
    compute = {"compute": lambda p: mha(problem, keep=problem.keep, policy=p), "policy": policy(flash=flash)}
    assert_empty_row("zero", theirs, within=within(flash=flash), **compute)


@both_paths
@pytest.mark.parametrize("causal", [True, False])
def test_max_attend_past_counts_the_keys_to_the_left_and_bounds_no_other(flash, causal):
    problem = draw_attention()
    theirs = call(load(problem.parameters, flash=flash, causal=causal, max_attend_past=2), problem.x, problem.context)
    assert_equal(mha(problem, causal=causal, policy=policy(flash=flash, window=(2, None))), theirs, within=within(flash=flash))
    assert_differs(mha(problem, causal=causal, policy=policy(flash=flash, window=(1, None))), theirs)
    assert_differs(mha(problem, causal=causal, policy=policy(flash=flash, window=(2, None), causal_anchor="top_left")), theirs)


def test_a_soft_cap_comes_before_the_mask():
    problem = draw_attention()
    theirs = call(
        load(problem.parameters, softclamp_logits=True, logit_softclamp_value=1.5), problem.x, problem.context, attn_mask=problem.keep
    )
    assert_equal(mha(problem, keep=problem.keep, policy=policy(flash=False, cap=1.5)), theirs, within=SOFTMAX)
    assert_differs(mha(problem, keep=problem.keep, policy=policy(flash=False)), theirs)
    assert_differs(mha(problem, keep=problem.keep, policy=policy(flash=False, cap=1.5, cap_order="after")), theirs)


def test_a_soft_cap_comes_after_a_bias_for_which_the_policy_has_no_word():
    problem, bias = draw_attention(), draw(6, 5, 7)
    layer = load(problem.parameters, softclamp_logits=True, logit_softclamp_value=1.5)
    theirs = call(layer, problem.x, problem.context, attn_mask=problem.keep, attn_bias=bias)
    for order in ("before", "after"):
        assert_differs(mha(problem, keep=problem.keep, bias=bias[None], policy=policy(flash=False, cap=1.5, cap_order=order)), theirs)
    with attnspec.substitute(cap=lambda scores, /, *, limit: attnspec.cap(scores + bias, limit=limit)):
        mine = mha(problem, keep=problem.keep, policy=policy(flash=False, cap=1.5))
    assert_equal(mine, theirs, within=SOFTMAX)


def test_a_learned_sink_takes_its_share():
    problem, sinks = draw_attention(), draw(6)
    theirs = call(
        load(problem.parameters, head_learned_sink=True, state={"attend.head_attn_sink": sinks}),
        problem.x,
        problem.context,
        attn_mask=problem.keep,
    )
    with_sinks = replace(problem, parameters=replace(problem.parameters, sinks=sinks))
    assert_equal(mha(with_sinks, keep=problem.keep, policy=policy(flash=False)), theirs, within=SOFTMAX)
    assert_differs(mha(problem, keep=problem.keep, policy=policy(flash=False)), theirs)


@both_paths
@pytest.mark.parametrize("zero", [True, False])
def test_memory_keys_are_extra_keys_which_every_query_sees(flash, zero):
    problem = draw_attention(attnspec.Heads(d_model=17, h=6, h_kv=3, d_k=10, d_key_in=19))  # its memory has one width, d_k
    extra = {"mem_k": draw(3, 2, 10), "mem_v": draw(3, 2, 10, seed=1)}
    layer = load(problem.parameters, flash=flash, num_mem_kv=2, add_zero_kv=zero, causal=True, state=extra)
    keep = problem.keep | (np.arange(7) == 0)
    theirs = call(layer, problem.x, problem.context, context_mask=keep[:, 0, 0])
    extra_k, extra_v = (np.concatenate([t, np.zeros_like(t[:, : int(zero)])], axis=1) for t in extra.values())
    extended = replace(problem, parameters=replace(problem.parameters, extra_k=extra_k, extra_v=extra_v))
    mask = Mask.keep(keep[:, 0, 0], "batch seq_k")
    assert_equal(mha(extended, keep=mask, causal=True, policy=policy(flash=flash)), theirs, within=within(flash=flash))
    assert_differs(mha(problem, keep=mask, causal=True, policy=policy(flash=flash)), theirs)


@both_paths
def test_head_scale_is_the_gate_of_each_head(flash):
    problem, gates = draw_attention(), draw(6)
    theirs = call(
        load(problem.parameters, flash=flash, head_scale=True, state={"head_scale_params": gates.reshape(1, 6, 1, 1)}),
        problem.x,
        problem.context,
    )
    gated = replace(problem, parameters=replace(problem.parameters, gates=gates))
    assert_equal(mha(gated, policy=policy(flash=flash)), theirs, within=within(flash=flash))
    assert_differs(mha(problem, policy=policy(flash=flash)), theirs)


@both_paths
@pytest.mark.parametrize("gain", [True, False])
def test_qk_norm_brings_queries_and_keys_to_length_one(flash, gain):
    problem = draw_attention()
    gains = {"gain_q": draw(6, 10), "gain_k": draw(3, 10)} if gain else {}
    state = {"qk_norm_q_scale": gains["gain_q"][:, None], "qk_norm_k_scale": gains["gain_k"][:, None]} if gain else {}
    layer = load(problem.parameters, flash=flash, qk_norm=True, qk_norm_dim_scale=gain, state=state)
    theirs = call(layer, problem.x, problem.context, attn_mask=problem.keep)
    problem = replace(problem, parameters=replace(problem.parameters, **gains))
    options = {"keep": problem.keep, "scale": None if gain else 10.0}
    right = policy(flash=True, normalise="l2")  # the softmax is in the dtype of its input on both paths
    assert_equal(mha(problem, **options, policy=right), theirs, within=DOUBLE)
    assert_differs(mha(problem, **options, policy=replace(right, normalise="rms")), theirs)


@both_paths
def test_qk_rmsnorm_has_a_gain_for_each_head(flash):
    problem, gains = draw_attention(), {"gain_q": draw(6, 10), "gain_k": draw(3, 10)}
    state = {"q_rmsnorm.gamma": gains["gain_q"][:, None] - 1, "k_rmsnorm.gamma": gains["gain_k"][:, None] - 1}
    theirs = call(load(problem.parameters, flash=flash, qk_rmsnorm=True, state=state), problem.x, problem.context, attn_mask=problem.keep)
    problem = replace(problem, parameters=replace(problem.parameters, **gains))
    right = policy(flash=flash, normalise="rms", epsilon=0.0)
    assert_equal(mha(problem, keep=problem.keep, policy=right), theirs, within=within(flash=flash))
    assert_differs(mha(problem, keep=problem.keep, policy=replace(right, normalise="layer")), theirs)
    assert gap(mha(problem, keep=problem.keep, policy=replace(right, epsilon=1e-4)), theirs) > within(flash=flash)


@both_paths
def test_rotation_is_interleaved_and_may_be_partial(flash):
    problem = draw_self_attention()
    rope = x_transformers.RotaryEmbedding(4, base=4096).double()  # so that its angles, made in float32, are exact: i / 64
    theirs = call(load(problem.parameters, flash=flash, causal=True), problem.x, rotary_pos_emb=rope.forward_from_seq_len(7))
    right = Rotation(pairing="interleaved", width=4, base=4096.0)
    assert_equal(mha(problem, causal=True, policy=policy(flash=flash, rotation=right)), theirs, within=within(flash=flash))
    for wrong in ({"pairing": "half"}, {"width": None}, {"base": 64.0}):
        assert_differs(mha(problem, causal=True, policy=policy(flash=flash, rotation=replace(right, **wrong))), theirs)


@both_paths
def test_alibi_is_a_linear_bias(flash):
    problem = draw_attention()
    theirs = call(
        load(problem.parameters, flash=flash, causal=True),
        problem.x,
        problem.context,
        rel_pos=x_transformers.AlibiPositionalBias(6).double(),
    )
    positions = Positions(np.arange(2, 7)[None], np.arange(7)[None])
    bias = attnspec.linear_bias(np.array(attnspec.alibi_slopes(6)), positions.queries, positions.keys)
    assert_equal(mha(problem, causal=True, bias=bias, policy=policy(flash=flash)), theirs, within=within(flash=flash))
    assert_differs(mha(problem, causal=True, policy=policy(flash=flash)), theirs)


@both_paths
@pytest.mark.parametrize("causal", [True, False])
def test_relative_positions_are_those_of_t5_times_a_scale(flash, causal):
    problem, table = draw_attention(), draw(8, 6)
    module = x_transformers.RelativePositionBias(scale=1.7, causal=causal, num_buckets=8, max_distance=6, heads=6).double()
    module.load_state_dict({"relative_attention_bias.weight": torch.from_numpy(table)})
    theirs = call(load(problem.parameters, flash=flash, causal=causal), problem.x, problem.context, rel_pos=module)
    bias = {
        way: attnspec.relative_bias(table * 1.7, np.arange(2, 7)[None], np.arange(7)[None], max_distance=6, bidirectional=way)
        for way in (True, False)
    }
    assert_equal(mha(problem, causal=causal, bias=bias[not causal], policy=policy(flash=flash)), theirs, within=within(flash=flash))
    assert_differs(mha(problem, causal=causal, bias=bias[causal], policy=policy(flash=flash)), theirs)


def test_the_declared_precision_of_the_softmax_is_the_peers():
    problem = draw_attention()
    problem = replace(problem, parameters=replace(problem.parameters, w_q=problem.parameters.w_q * 30))
    theirs = call(load(problem.parameters), problem.x, problem.context)
    declared, other = (gap(mha(problem, policy=policy(flash=flash)), theirs) for flash in (False, True))
    assert 10 * declared < other  # as with JAX


@both_paths
def test_its_own_mask_silences_padded_queries_too(flash):
    """What the specification has no word for: where a query is padding, the output is zero."""
    problem, real = draw_self_attention(), np.arange(7) < np.array([[7], [4]])
    theirs = call(load(problem.parameters, flash=flash), problem.x, mask=real)
    mine = mha(problem, keep=Mask.keep(real, "batch seq_k"), policy=policy(flash=flash))
    assert_equal(mine * real[:, :, None], theirs, within=within(flash=flash))
    assert_differs(mine, theirs)
