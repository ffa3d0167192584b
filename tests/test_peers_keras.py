"""Keras: MultiHeadAttention and GroupQueryAttention are the specification, on each of their backends that is installed."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from peers import DOUBLE, SINGLE, assert_differs, assert_empty_row, assert_equal, draw_problem

import attnspec
from attnspec import Mask, Policy, layouts

os.environ.setdefault("KERAS_BACKEND", "torch")  # settled when Keras is imported, once for a process
keras = pytest.importorskip("keras")

BACKEND = keras.config.backend()
GROUPED = attnspec.Heads(d_model=17, h=6, h_kv=3, d_k=11)

# The widths of Keras' layers are free, but its fused path on JAX refuses values of another width than that of the keys.
FREE = attnspec.Heads(d_model=17, h=3, d_k=11, d_v=13, d_key_in=19, d_value_in=23)
NARROW = attnspec.Heads(d_model=17, h=3, d_k=11, d_key_in=19, d_value_in=23)

pytestmark = pytest.mark.peers
both_paths = pytest.mark.parametrize("scores", [True, False], ids=["scores", "fused"])
both_layers = pytest.mark.parametrize("heads", [FREE, GROUPED], ids=["multi-head", "grouped"])


def within(*, scores):
    """How near it comes: Keras' promotion of types knows no float64, so only the path that returns the scores stays wide."""
    return DOUBLE if scores and BACKEND != "numpy" else SINGLE


def draw(heads, *, scores):
    return draw_problem(NARROW if heads is FREE and BACKEND == "jax" and not scores else heads)


def put(dense, kernel, bias):
    assert (dense.kernel.shape, dense.bias.shape) == (kernel.shape, bias.shape)
    dense.kernel.assign(kernel)
    dense.bias.assign(bias)


def load(problem, **options):
    """Build the layer for the problem, of which heads are an axis of the kernels, as they are here."""
    heads, parameters = problem.parameters.heads, problem.parameters
    if heads.h == heads.h_kv:
        layer = keras.layers.MultiHeadAttention(heads.h, heads.d_k, heads.d_v, dtype="float64", **options)
    else:
        layer = keras.layers.GroupQueryAttention(heads.d_k, heads.h, heads.h_kv, dtype="float64", **options)
    layer.build(problem.x.shape, problem.context_v.shape, problem.context.shape)
    stored = layouts.write(parameters, "keras")
    for name in ("query", "key", "value", "attention_output"):
        dense = getattr(layer, f"_{name.removeprefix('attention_')}_dense")
        put(dense, stored[f"{name}/kernel"], stored.get(f"{name}/bias"))
    return layer


def call(problem, *, scores, layer=None, **options):
    """Call the layer with query, value and key: this is Keras' order."""
    layer, inputs = (
        load(problem) if layer is None else layer,
        map(keras.ops.convert_to_tensor, (problem.x, problem.context_v, problem.context)),
    )
    result = layer(*inputs, return_attention_scores=scores, **options)
    return tuple(np.asarray(t.detach() if BACKEND == "torch" else t, "float64") for t in (result if scores else (result,)))


def mha(problem, /, **options):
    return attnspec.multi_head_attention(problem.x, problem.parameters, context=problem.context, context_v=problem.context_v, **options)


@both_paths
@both_layers
def test_a_mask_keeps_where_it_is_not_zero(heads, scores):
    problem = draw(heads, scores=scores)
    keep = problem.keep[:, 0]
    y, *weights = call(problem, scores=scores, attention_mask=keep)
    with attnspec.trace() as steps:
        mine = mha(problem, keep=Mask.keep(keep, "batch seq_q seq_k"))
    assert_equal(mine, y, within=within(scores=scores))
    for each in weights:
        assert_equal(steps["softmax"].result, each, within=within(scores=scores))
    assert_differs(mha(problem, keep=Mask.drop(keep, "batch seq_q seq_k")), y)
    if heads is GROUPED:
        assert_differs(mha(problem, keep=Mask.keep(keep, "batch seq_q seq_k"), policy=Policy(grouping="strided")), y)


@both_paths
def test_a_mask_may_differ_from_head_to_head(scores):
    problem = draw(FREE, scores=scores)
    y, *_ = call(problem, scores=scores, attention_mask=problem.keep)
    assert_equal(mha(problem, keep=problem.keep), y, within=within(scores=scores))
    assert_differs(mha(problem, keep=problem.keep[:, :1]), y)


@both_paths
def test_values_come_before_keys(scores):
    problem = draw_problem(attnspec.Heads(d_model=17, h=3, d_k=11))
    y, *_ = call(problem, scores=scores)
    assert_equal(mha(problem), y, within=within(scores=scores))
    assert_differs(mha(replace(problem, context=problem.context_v, context_v=problem.context)), y)


@both_paths
@both_layers
def test_causality_starts_top_left(heads, scores):
    problem = draw(heads, scores=scores)
    y, *_ = call(problem, scores=scores, use_causal_mask=True)
    assert_equal(mha(problem, causal=True), y, within=within(scores=scores))
    assert_differs(mha(problem, causal=True, policy=Policy(causal_anchor="bottom_right")), y)


@both_paths
@both_layers
@pytest.mark.parametrize("causal", [True, False])
def test_a_sliding_window_is_a_band_on_both_sides_that_counts_the_query_itself(heads, scores, causal):
    problem = draw(heads, scores=scores)
    y, *_ = call(problem, scores=scores, layer=load(problem, sliding_window=2), use_causal_mask=causal)
    assert_equal(mha(problem, causal=causal, policy=Policy(window=(1, 1))), y, within=within(scores=scores))
    assert_differs(mha(problem, causal=causal, policy=Policy(window=(2, 2))), y)


@both_paths
@both_layers
def test_padding_of_keys_and_of_values_both_drop(heads, scores):
    problem = draw(heads, scores=scores)
    keys, values = np.arange(7) < np.array([[7], [5]]), np.arange(7) >= np.array([[2], [0]])
    keep = problem.keep[:, 0] | (np.arange(7) == 3)  # so that all together leave a key
    y, *_ = call(problem, scores=scores, key_mask=keys, value_mask=values, attention_mask=keep)
    rules = [Mask.keep(keys, "batch seq_k"), Mask.keep(values, "batch seq_k"), Mask.keep(keep, "batch seq_q seq_k")]
    assert_equal(mha(problem, keep=rules[0] & rules[1] & rules[2]), y, within=within(scores=scores))
    for one, other in ((0, 2), (1, 2), (0, 1)):
        assert_differs(mha(problem, keep=rules[one] & rules[other]), y)


@both_paths
@both_layers
def test_a_query_without_keys_gets_zeros_or_the_mean_of_all_values_by_the_path_taken(heads, scores):
    problem = draw(heads, scores=scores)
    keep = problem.keep[:, 0]
    keep[0, 1] = keep[1, 3] = False
    y, *_ = call(problem, scores=scores, attention_mask=keep)
    row, mask = "zero" if scores else "uniform", Mask.keep(keep, "batch seq_q seq_k")
    assert_empty_row(row, y, lambda policy: mha(problem, keep=mask, policy=policy), within=within(scores=scores))


@pytest.mark.skipif("PEERS_OF_KERAS" in os.environ, reason="this is the child process")
@pytest.mark.parametrize("backend", ["torch", "jax", "numpy"])
def test_all_of_this_holds_on_the_other_backends(backend):
    if backend == BACKEND:
        pytest.skip("this is the backend of this process")
    environment = {**os.environ, "KERAS_BACKEND": backend, "JAX_ENABLE_X64": "1", "PEERS_OF_KERAS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "peers", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert "failed" not in run.stdout
    assert " passed" in run.stdout
