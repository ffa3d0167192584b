"""PyTorch: scaled_dot_product_attention, MultiheadAttention and flex_attention are the specification, their conventions declared."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from einops import rearrange
from peers import DOUBLE, assert_differs, assert_empty_row, assert_equal, draw, draw_keep, draw_problem
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import attnspec
from attnspec import Mask, Policy, layouts

pytestmark = pytest.mark.peers

LOWEST = float(np.finfo(np.float64).min)
uncompiled = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")  # here to be read, not to be fast


@pytest.fixture(params=["numpy", "torch"])
def array(request):
    return {"numpy": np.asarray, "torch": torch.from_numpy}[request.param]


def draw_heads(*, h=6, h_kv=6, seq_q=5, seq_k=7):
    return draw(2, h, seq_q, 11) * 2, draw(2, h_kv, seq_k, 11), draw(2, h_kv, seq_k, 13)


def torch_all(*arrays):
    return tuple(torch.from_numpy(np.ascontiguousarray(each)) for each in arrays)


def attend(array, heads, *, grouping="contiguous", **options):
    queries, keys, values = map(array, heads)
    keys, values = attnspec.share_keys(keys, h=6, grouping=grouping), attnspec.share_values(values, h=6, grouping=grouping)
    return attnspec.attend(queries, keys, values, **options)


class TestScaledDotProductAttention:
    def test_a_boolean_mask_keeps_where_it_is_true(self, array):
        heads, keep = draw_heads(), draw_keep(2, 6, 5, 7)
        theirs = scaled_dot_product_attention(*torch_all(*heads), attn_mask=torch.from_numpy(keep))
        assert_equal(attend(array, heads, keep=array(keep)), theirs, within=DOUBLE)
        assert_differs(attend(array, heads, keep=Mask.drop(array(keep))), theirs)

    def test_a_float_mask_is_a_bias_and_drops_where_it_is_minus_infinity(self, array):
        heads, keep, bias = draw_heads(), draw_keep(2, 6, 5, 7), draw(2, 6, 5, 7)
        addend = np.where(keep, bias, -np.inf)
        theirs = scaled_dot_product_attention(*torch_all(*heads, addend))
        assert_equal(attend(array, heads, bias=array(bias), keep=Mask.additive(array(addend))), theirs, within=DOUBLE)
        assert_equal(attend(array, heads, bias=array(addend)), theirs, within=DOUBLE)
        assert_differs(attend(array, heads, keep=Mask.additive(array(addend))), theirs)

    @pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 7), (7, 5)])
    def test_is_causal_starts_top_left(self, array, seq_q, seq_k):
        heads = draw_heads(seq_q=seq_q, seq_k=seq_k)
        theirs = scaled_dot_product_attention(*torch_all(*heads), is_causal=True)
        assert_equal(attend(array, heads, causal=True), theirs, within=DOUBLE)
        assert_differs(attend(array, heads, causal=True, policy=Policy(causal_anchor="bottom_right")), theirs)

    def test_causal_lower_right_starts_bottom_right(self, array):
        heads = draw_heads()
        theirs = scaled_dot_product_attention(*torch_all(*heads), attn_mask=causal_lower_right(5, 7))
        assert_equal(attend(array, heads, causal=True, policy=Policy(causal_anchor="bottom_right")), theirs, within=DOUBLE)
        assert_equal(attend(array, heads, causal=True, offset=2), theirs, within=DOUBLE)
        assert_differs(attend(array, heads, causal=True), theirs)

    def test_grouped_heads_are_contiguous(self, array):
        heads = draw_heads(h_kv=3)
        theirs = scaled_dot_product_attention(*torch_all(*heads), enable_gqa=True)
        assert_equal(attend(array, heads), theirs, within=DOUBLE)
        assert_differs(attend(array, heads, grouping="strided"), theirs)

    def test_scale_is_the_factor(self, array):
        heads = draw_heads()
        theirs = scaled_dot_product_attention(*torch_all(*heads), scale=0.7)
        assert_equal(attend(array, heads, scale=0.7), theirs, within=DOUBLE)
        assert_equal(attend(array, heads, policy=Policy(scale=0.7)), theirs, within=DOUBLE)
        assert_differs(attend(array, heads), theirs)

    @pytest.mark.parametrize(("dropped", "row"), [(None, "zero"), (-np.inf, "zero"), (LOWEST, "uniform")])
    def test_a_query_without_keys_gets_zeros_unless_keys_are_dropped_by_the_lowest_number(self, array, dropped, row):
        heads, keep = draw_heads(), draw_keep(2, 6, 5, 7)
        keep[0, :, 1] = keep[1, 2, 3] = False
        theirs = scaled_dot_product_attention(*torch_all(*heads, keep if dropped is None else np.where(keep, 0.0, dropped)))
        mask = Mask.keep(array(keep)) if dropped is None else Mask.additive(array(np.where(keep, 0.0, dropped)))
        assert_empty_row(row, theirs, lambda policy: attend(array, heads, keep=mask, policy=policy), within=DOUBLE)


def load(parameters, **options):
    """Convert to PyTorch's layer: its matrices hold the heads in turn, and are one matrix where all inputs are equally wide."""
    heads = parameters.heads
    options = {"bias": parameters.b_q is not None, "kdim": heads.d_key_in, "vdim": heads.d_value_in, "batch_first": True, **options}
    module = torch.nn.MultiheadAttention(heads.d_model, heads.h, dtype=torch.float64, **options)
    extra = {name: getattr(parameters, name)[:, :1] if options.get("add_bias_kv") else None for name in ("extra_k", "extra_v")}
    layout = "torch" if heads.d_model == heads.d_key_in == heads.d_value_in else "torch_separate"
    state = layouts.write(replace(parameters, **extra), layout)
    module.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in state.items()})
    return module


SAME = attnspec.Heads(d_model=33, h=3)
APART = attnspec.Heads(d_model=33, h=3, d_key_in=17, d_value_in=19)


def inputs_of(problem):
    return torch_all(problem.x, problem.context, problem.context_v)


def mha(array, problem, /, *, parameters=None, **options):
    parameters = (problem.parameters if parameters is None else parameters).map(array)
    context, context_v = array(problem.context), array(problem.context_v)
    return attnspec.multi_head_attention(array(problem.x), parameters, context=context, context_v=context_v, **options)


def weights_of(array, problem, /, **options):
    with attnspec.trace() as steps:
        mha(array, problem, **options)
    return steps["softmax"].result


class TestMultiheadAttention:
    @pytest.mark.parametrize("heads", [SAME, APART], ids=["same widths", "kdim and vdim"])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("need_weights", [True, False])
    def test_queries_keys_and_values_have_sources_of_their_own(self, array, heads, bias, need_weights):
        problem = draw_problem(heads, bias=bias)
        theirs, _ = load(problem.parameters)(*inputs_of(problem), need_weights=need_weights)
        assert_equal(mha(array, problem), theirs, within=DOUBLE)
        if heads is SAME:
            assert_differs(mha(array, replace(problem, context=problem.context_v, context_v=problem.context)), theirs)

    def test_sequences_come_first_unless_batch_first(self, array):
        problem = draw_problem(SAME)
        inputs = (rearrange(t, "b s d -> s b d") for t in (problem.x, problem.context, problem.context_v))
        theirs, _ = load(problem.parameters, batch_first=False)(*torch_all(*inputs))
        assert_equal(rearrange(mha(array, problem), "b t d -> t b d"), theirs, within=DOUBLE)

    def test_the_weights_are_those_of_the_softmax_and_their_mean_over_the_heads(self, array):
        problem = draw_problem(APART)
        module, inputs = load(problem.parameters), inputs_of(problem)
        mine = weights_of(array, problem)
        assert_equal(mine, module(*inputs, average_attn_weights=False)[1], within=DOUBLE)
        assert_equal(mine.mean(1), module(*inputs)[1], within=DOUBLE)

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_boolean_masks_drop_where_they_are_true(self, array, need_weights):
        problem = draw_problem(APART)
        module, inputs = load(problem.parameters), inputs_of(problem)
        each, shared, padding = ~problem.keep, ~draw_keep(5, 7), np.arange(7) >= np.array([[7], [4]])
        shared[:, 0] = each[..., 0] = False  # so that all together leave a key
        for drop, axes in ((each, "batch h seq_q seq_k"), (shared, "seq_q seq_k")):
            given = torch.from_numpy(drop.reshape(-1, 5, 7).squeeze())
            theirs, _ = module(*inputs, attn_mask=given, key_padding_mask=torch.from_numpy(padding), need_weights=need_weights)
            mask = Mask.drop(array(drop), axes)
            assert_equal(mha(array, problem, keep=mask & Mask.drop(array(padding), "batch seq_k")), theirs, within=DOUBLE)
            assert_equal(mha(array, problem, keep=mask & Mask.lengths(array(np.array([7, 4])))), theirs, within=DOUBLE)
            assert_differs(mha(array, problem, keep=Mask.keep(array(drop), axes)), theirs)
            assert_differs(mha(array, problem, keep=mask), theirs)

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_float_masks_are_biases(self, array, need_weights):
        problem, addend = draw_problem(APART), draw(6, 5, 7)
        theirs, _ = load(problem.parameters)(*inputs_of(problem), attn_mask=torch.from_numpy(addend), need_weights=need_weights)
        assert_equal(mha(array, problem, bias=array(addend.reshape(2, 3, 5, 7))), theirs, within=DOUBLE)

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("names", [("add_bias_kv",), ("add_zero_attn",), ("add_bias_kv", "add_zero_attn")], ids=" ".join)
    @pytest.mark.parametrize("heads", [SAME, APART], ids=["same widths", "kdim and vdim"])
    def test_extra_keys_are_projected_already_and_never_masked(self, array, heads, names, need_weights):
        problem = draw_problem(heads)
        extra = np.concatenate([{"add_bias_kv": draw(3, 1, 11), "add_zero_attn": np.zeros((3, 1, 11))}[name] for name in names], axis=1)
        parameters = replace(problem.parameters, extra_k=extra, extra_v=extra * 0.5)
        drop = torch.from_numpy(~problem.keep.reshape(6, 5, 7))
        drop[2] = True
        theirs, weights = load(parameters, **dict.fromkeys(names, True))(
            *inputs_of(problem), attn_mask=drop, need_weights=need_weights, average_attn_weights=False
        )
        mine = {"parameters": parameters, "keep": Mask.drop(array(drop.numpy().reshape(2, 3, 5, 7)))}
        assert_equal(mha(array, problem, **mine), theirs, within=DOUBLE)
        assert_differs(mha(array, problem, keep=mine["keep"]), theirs)
        if need_weights:
            assert_equal(weights_of(array, problem, **mine), weights, within=DOUBLE)

    @pytest.mark.parametrize("fast", [True, False])
    def test_the_fused_fast_path_is_the_same_function(self, array, fast):
        problem = draw_problem(attnspec.Heads(d_model=44, h=4), seq_q=7)
        padding = np.arange(7) >= np.array([[7], [4]])
        module, (x, drop) = load(problem.parameters).eval(), torch_all(problem.x, padding)
        native = torch._native_multi_head_attention
        with mock.patch("torch._native_multi_head_attention", side_effect=native) as call, torch.set_grad_enabled(not fast):
            theirs, weights = module(x, x, x, key_padding_mask=drop, average_attn_weights=False)
        assert call.called is fast
        problem = replace(problem, context=problem.x, context_v=problem.x)
        options = {"keep": Mask.drop(array(padding), "batch seq_k")}
        assert_equal(mha(array, problem, **options), theirs, within=DOUBLE)
        assert_equal(weights_of(array, problem, **options), weights, within=DOUBLE)

    @pytest.mark.parametrize(("path", "row"), [("need_weights", "nan"), ("no weights", "zero"), ("fast", "nan")])
    def test_a_query_without_keys_gets_nan_or_zeros_by_the_path_taken(self, array, path, row):
        problem = draw_problem(attnspec.Heads(d_model=44, h=4), seq_q=7)
        padding = np.arange(7) >= np.array([[7], [0]])
        module, (x, drop) = load(problem.parameters).eval(), torch_all(problem.x, padding)
        with torch.set_grad_enabled(path != "fast"):
            theirs, _ = module(x, x, x, key_padding_mask=drop, need_weights=path != "no weights")
        problem, mask = replace(problem, context=problem.x, context_v=problem.x), Mask.drop(array(padding), "batch seq_k")
        assert_empty_row(row, theirs, lambda policy: mha(array, problem, keep=mask, policy=policy), within=DOUBLE)
        if row == "zero":
            np.testing.assert_array_equal(theirs[1].detach(), np.broadcast_to(problem.parameters.b_o, (7, 44)))

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_the_causal_hint_replaces_the_mask_where_no_weights_are_needed(self, array, need_weights):
        problem, drop = draw_problem(APART), ~draw_keep(5, 7)
        theirs, _ = load(problem.parameters)(
            *inputs_of(problem), attn_mask=torch.from_numpy(drop), need_weights=need_weights, is_causal=True
        )
        obeyed, replaced = mha(array, problem, keep=Mask.drop(array(drop), "seq_q seq_k")), mha(array, problem, causal=True)
        assert_equal(obeyed if need_weights else replaced, theirs, within=DOUBLE)
        assert_differs(replaced if need_weights else obeyed, theirs)

    def test_gradients_are_equal(self):
        problem = draw_problem(APART)
        module, drop = load(problem.parameters), torch.from_numpy(~problem.keep.reshape(6, 5, 7))
        theirs = [t.requires_grad_() for t in inputs_of(problem)]
        mine = [t.detach().clone().requires_grad_() for t in theirs]
        direction = torch.from_numpy(draw(2, 5, 33))
        module(*theirs, attn_mask=drop)[0].backward(direction)
        parameters = problem.parameters.to_torch().map(torch.Tensor.requires_grad_)
        y = attnspec.multi_head_attention(mine[0], parameters, context=mine[1], context_v=mine[2], keep=Mask.drop(drop.reshape(2, 3, 5, 7)))
        y.backward(direction)
        # A gradient is two more products deep than an output, of numbers up to about 10.
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one.grad, other.grad, within=10 * DOUBLE)
        assert_equal(rearrange(parameters.w_q.grad, "h e k -> (h k) e"), module.q_proj_weight.grad, within=10 * DOUBLE)
        assert_equal(rearrange(parameters.w_o.grad, "i o -> o i"), module.out_proj.weight.grad, within=10 * DOUBLE)


@uncompiled
class TestFlexAttention:
    def test_a_soft_cap_comes_before_the_mask(self, array):
        heads, keep = draw_heads(h_kv=3), draw_keep(2, 6, 5, 7)
        kept = torch.from_numpy(keep)
        blocks = create_block_mask(lambda b, h, i, j: kept[b, h, i, j], 2, 6, 5, 7, device="cpu")
        theirs = flex_attention(*torch_all(*heads), score_mod=lambda s, *_: 1.5 * torch.tanh(s / 1.5), block_mask=blocks, enable_gqa=True)
        assert_equal(attend(array, heads, keep=array(keep), policy=Policy(cap=1.5)), theirs, within=DOUBLE)
        assert_differs(attend(array, heads, keep=array(keep), policy=Policy(cap=1.5, cap_order="after")), theirs)
        assert_differs(attend(array, heads, keep=array(keep)), theirs)

    def test_a_distance_may_be_a_score_mod(self, array):
        heads, slopes = draw_heads(), np.array(attnspec.alibi_slopes(6))
        lean = torch.from_numpy(slopes)
        theirs = flex_attention(*torch_all(*heads), score_mod=lambda s, _b, h, i, j: s - lean[h] * abs(i + 2 - j))
        places = array(np.arange(2, 7)[None]), array(np.arange(7)[None])
        assert_equal(attend(array, heads, bias=attnspec.linear_bias(array(slopes), *places)), theirs, within=DOUBLE)
        assert_differs(attend(array, heads, bias=attnspec.linear_bias(array(slopes), places[0] - 2, places[1])), theirs)

    def test_documents_and_a_sliding_window_may_be_mask_mods(self, array):
        heads = draw_heads()
        documents = np.array([[0, 0, 0, 1, 1], [0, 0, 1, 1, 2]]), np.array([[0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]])
        asks, holds = torch_all(*documents)
        rules = and_masks(lambda b, _h, i, j: asks[b, i] == holds[b, j], lambda _b, _h, i, j: (i - 2 <= j) & (j <= i + 3))
        blocks = create_block_mask(rules, 2, None, 5, 7, device="cpu")
        theirs = flex_attention(*torch_all(*heads), block_mask=blocks)
        mask = Mask.documents(*map(array, documents))
        assert_equal(attend(array, heads, keep=mask & Mask.window(2, 3)), theirs, within=DOUBLE)
        assert_equal(attend(array, heads, keep=mask, policy=Policy(window=(2, 3))), theirs, within=DOUBLE)
        assert_differs(attend(array, heads, keep=mask & Mask.window(3, 2)), theirs)
        assert_differs(attend(array, heads, keep=mask & Mask.window(2, 3), policy=Policy(causal_anchor="bottom_right")), theirs)

    @pytest.mark.parametrize("through", ["mask_mod", "score_mod"])
    def test_a_query_without_keys_gets_zeros(self, array, through):
        heads, keep = draw_heads(), draw_keep(2, 6, 5, 7)
        keep[0, :, 1] = keep[1, 2, 3] = False
        kept = torch.from_numpy(keep)
        if through == "mask_mod":
            given = {"block_mask": create_block_mask(lambda b, h, i, j: kept[b, h, i, j], 2, 6, 5, 7, device="cpu")}
        else:
            given = {"score_mod": lambda s, b, h, i, j: torch.where(kept[b, h, i, j], s, -math.inf)}
        theirs = flex_attention(*torch_all(*heads), **given)
        assert_empty_row("zero", theirs, lambda policy: attend(array, heads, keep=array(keep), policy=policy), within=DOUBLE)
