"""Hugging Face transformers: the attention of its models is the specification, each model's conventions declared.

The layers are built from configurations, with random weights, and get their masks and angles from the library's own functions.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from einops import rearrange
from peers import DOUBLE, SINGLE, SOFTMAX, assert_differs, assert_empty_row, assert_equal, draw, draw_problem

import attnspec
from attnspec import Mask, Policy, Positions, Rotation, layouts

pytest.importorskip("transformers")

from transformers import DynamicCache, masking_utils
from transformers.models.bert import modeling_bert as bert
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.codegen import modeling_codegen as codegen
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.mpt import modeling_mpt as mpt
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.t5 import modeling_t5 as t5

pytestmark = pytest.mark.peers
implementations = pytest.mark.parametrize("how", ["eager", "sdpa"])

GROUPED = attnspec.Heads(d_model=18, h=6, h_kv=3, d_k=10)
SAME = attnspec.Heads(d_model=60, h=6)
REAL = np.arange(7) < np.array([[7], [5]])
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def configure(config, how="eager", **options):
    config = config(**options)
    config._attn_implementation = how
    return config


def load(module, state, dtype=torch.float64):
    module = module.to(dtype).eval()
    module.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in state.items() if each is not None})
    return module


def linear(name, w, b):
    return {f"{name}.weight": rearrange(w, "h e k -> (h k) e"), f"{name}.bias": None if b is None else rearrange(b, "h k -> (h k)")}


def separate(p, names=("q_proj", "k_proj", "v_proj", "o_proj")):
    """One matrix for the queries, one for the keys, one for the values, one for the output."""
    q, k, v, o = names
    if names == ("q_proj", "k_proj", "v_proj", "o_proj"):
        return layouts.write(p, "llama")
    state = linear(q, p.w_q, p.b_q) | linear(k, p.w_k, p.b_k) | linear(v, p.w_v, p.b_v)
    return state | {f"{o}.weight": p.w_o.T, f"{o}.bias": p.b_o}


def fused(p, order, names=("query_key_value", "dense")):
    """One matrix for queries, keys and values together, whose rows stand in the given order."""
    together, o = names
    if names == ("query_key_value", "dense") and order == "h three k":
        return layouts.write(p, "gpt_neox")
    weight = rearrange(np.stack([p.w_q, p.w_k, p.w_v]), f"three h e k -> ({order}) e")
    bias = None if p.b_q is None else rearrange(np.stack([p.b_q, p.b_k, p.b_v]), f"three h k -> ({order})")
    return {f"{together}.weight": weight, f"{together}.bias": bias, f"{o}.weight": p.w_o.T, f"{o}.bias": p.b_o}


def mask_of(config, x, *, real=None, position_ids=None, cache=None, sliding=False):
    make = masking_utils.create_sliding_window_causal_mask if sliding else masking_utils.create_causal_mask
    return make(
        config, x, attention_mask=None if real is None else torch.from_numpy(real.astype(int)), cache=cache, position_ids=position_ids
    )


def call(layer, rotary, x, *, config, positions=None, cache=None, **options):
    """Call a layer with the mask and the angles that its model would give it."""
    x = torch.from_numpy(x)
    seen = 0 if cache is None else cache.get_seq_length()
    positions = torch.arange(seen, seen + x.shape[1])[None] if positions is None else torch.from_numpy(positions)
    mask = mask_of(config, x, position_ids=positions, cache=cache, **options)
    with torch.no_grad():
        return layer(x, attention_mask=mask, position_embeddings=rotary(x, positions), **({} if cache is None else {"cache": cache}))[0]


def draw_self_attention(heads, *, bias=True, seq=7):
    problem = draw_problem(heads, bias=bias, seq_q=seq, seq_k=seq)
    return replace(problem, context=problem.x, context_v=problem.x)


def mha(problem, /, **options):
    return attnspec.multi_head_attention(problem.x, problem.parameters, context=problem.context, context_v=problem.context_v, **options)


def softmax_of(how):
    """The precision of the softmax in the models that take it in float32; PyTorch's fused function takes it in that of its input."""
    return "float32" if how == "eager" else "input"


class TestLlama:
    @pytest.fixture
    def problem(self):
        return draw_self_attention(GROUPED)

    @pytest.fixture
    def config(self, how):
        sizes = {"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
        return configure(llama.LlamaConfig, how, **sizes, attention_bias=True, rope_parameters=ROPE, num_hidden_layers=1)

    @pytest.fixture
    def policy(self, how):
        return Policy(rotation=Rotation(), softmax_precision=softmax_of(how))

    def layer(self, config, problem, dtype=torch.float64):
        return load(llama.LlamaAttention(config, 0), separate(problem.parameters), dtype), llama.LlamaRotaryEmbedding(config)

    @implementations
    @pytest.mark.parametrize("real", [None, REAL], ids=["full", "padded"])
    def test_heads_are_grouped_and_turn_by_halves(self, problem, config, policy, real):
        theirs = call(*self.layer(config, problem), problem.x, config=config, real=real)
        options = {"causal": True, "keep": None if real is None else Mask.keep(real, "batch seq_k")}
        # The angles are taken in float32: up to 6 radians, off by 4e-7, and so are the scores.
        assert_equal(mha(problem, **options, policy=policy), theirs, within=SINGLE)
        assert_differs(mha(problem, **options, policy=replace(policy, rotation=Rotation(pairing="interleaved"))), theirs)
        assert_differs(mha(problem, **options, policy=replace(policy, grouping="strided")), theirs)
        assert_differs(mha(problem, **options, policy=replace(policy, rotation=Rotation(base=500_000.0))), theirs)

    @implementations
    def test_left_padding_shifts_the_positions(self, problem, config, policy):
        real = REAL[:, ::-1].copy()
        positions = np.cumsum(real, axis=1) - 1
        theirs = call(*self.layer(config, problem), problem.x, config=config, real=real, positions=positions)
        stand = Positions(positions, positions)
        mine = mha(problem, keep=Mask.keep(real, "batch seq_k"), causal=True, positions=stand, policy=policy)
        shown = real[:, :, None]  # what padding sees is another test's concern
        assert_equal(np.where(shown, mine, 0.0), torch.where(torch.from_numpy(shown), theirs, 0.0), within=SINGLE)

    @pytest.mark.parametrize(
        ("how", "dtype", "row"), [("eager", "float64", "nan"), ("eager", "float32", "uniform"), ("sdpa", "float64", "zero")]
    )
    def test_a_query_without_keys_gets_what_implementation_and_dtype_make_of_it(self, problem, config, policy, dtype, row):
        """In float64 the lowest number, which drops, is minus infinity to the softmax in float32: NaN instead of a mean."""
        real = REAL[:, ::-1].copy()
        problem = replace(problem, **{name: getattr(problem, name).astype(dtype) for name in ("x", "context", "context_v")})
        problem = replace(problem, parameters=problem.parameters.map(lambda each: each.astype(dtype)))
        theirs = call(*self.layer(config, problem, getattr(torch, dtype)), problem.x, config=config, real=real)
        options = {"keep": Mask.keep(real, "batch seq_k"), "causal": True}
        assert_empty_row(row, theirs, lambda policy: mha(problem, **options, policy=policy), within=SINGLE, policy=policy)

    @implementations
    def test_a_cache_of_the_past_gives_what_decoding_does(self, problem, config, policy):
        layer, rotary = self.layer(config, problem)
        theirs, mine, past, cache = [], [], DynamicCache(config=config), None
        for chunk in (slice(0, 3), slice(3, 4), slice(4, 7)):
            theirs.append(call(layer, rotary, problem.x[:, chunk], config=config, cache=past))
            y, cache = attnspec.decode(problem.x[:, chunk], problem.parameters, cache, policy=policy)
            mine.append(y)
        assert_equal(np.concatenate(mine, axis=1), torch.cat(theirs, dim=1), within=SINGLE)
        assert_equal(np.concatenate(mine, axis=1), mha(problem, causal=True, policy=policy), within=SOFTMAX)
        assert_equal(cache.keys, past.layers[0].keys, within=SINGLE)
        assert_equal(cache.values, past.layers[0].values, within=DOUBLE)

    @implementations
    def test_positions_that_start_again_are_documents(self, problem, config, policy):
        positions = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
        documents = np.cumsum(positions == 0, axis=1)
        theirs = call(*self.layer(config, problem), problem.x, config=config, positions=positions)
        mine = mha(problem, keep=Mask.documents(documents), causal=True, positions=Positions(positions, positions), policy=policy)
        assert_equal(mine, theirs, within=SINGLE)
        assert_differs(mha(problem, causal=True, positions=Positions(positions, positions), policy=policy), theirs)


class TestGPT2:
    @implementations
    @pytest.mark.parametrize("layer_idx", [0, 2])
    def test_conv1d_stores_the_transpose_and_the_scale_may_fall_with_the_layer(self, how, layer_idx):
        problem = draw_self_attention(SAME)
        config = configure(gpt2.GPT2Config, how, n_embd=60, n_head=6, scale_attn_by_inverse_layer_idx=True)
        state = layouts.write(problem.parameters, "gpt2")
        layer, x = load(gpt2.GPT2Attention(config, layer_idx=layer_idx), state), torch.from_numpy(problem.x)
        theirs, weights = layer(x, attention_mask=mask_of(config, x, real=REAL))
        options = {"causal": True, "keep": Mask.keep(REAL, "batch seq_k"), "scale": 10**-0.5 / (layer_idx + 1)}
        with attnspec.trace() as steps:
            assert_equal(mha(problem, **options), theirs, within=DOUBLE)
        if how == "eager":
            assert_equal(steps["softmax"].result, weights, within=DOUBLE)
        wrong = replace(problem.parameters, **dict(zip(("w_q", "w_k", "w_v"), per_head(problem.parameters), strict=True)))
        assert_differs(mha(replace(problem, parameters=wrong), **options), theirs)

    @implementations
    def test_cross_attention_has_a_matrix_for_queries_and_one_for_keys_and_values(self, how):
        problem = draw_problem(SAME)
        p, config = problem.parameters, configure(gpt2.GPT2Config, how, n_embd=60, n_head=6)
        state = {"q_attn.weight": rearrange(p.w_q, "h e k -> e (h k)"), "q_attn.bias": rearrange(p.b_q, "h k -> (h k)")}
        state |= {"c_attn.weight": np.concatenate([rearrange(w, "h e k -> e (h k)") for w in (p.w_k, p.w_v)], axis=1)}
        state |= {"c_attn.bias": np.concatenate([rearrange(b, "h k -> (h k)") for b in (p.b_k, p.b_v)])}
        state |= {"c_proj.weight": p.w_o, "c_proj.bias": p.b_o}
        layer = load(gpt2.GPT2Attention(config, is_cross_attention=True, layer_idx=0), state)
        mask = masking_utils.create_bidirectional_mask(
            config, torch.from_numpy(problem.x), torch.from_numpy(REAL), torch.from_numpy(problem.context)
        )
        theirs, _ = layer(torch.from_numpy(problem.x), encoder_hidden_states=torch.from_numpy(problem.context), encoder_attention_mask=mask)
        problem = replace(problem, context_v=problem.context)
        assert_equal(mha(problem, keep=Mask.keep(REAL, "batch seq_k")), theirs, within=DOUBLE)
        assert_differs(mha(problem), theirs)


def per_head(parameters):
    """Misread the fused weights, as a converter does that takes one order of their rows for the other."""
    rows = rearrange(np.stack([parameters.w_q, parameters.w_k, parameters.w_v]), "three h e k -> (three h k) e")
    return rearrange(rows, "(h three k) e -> three h e k", three=3, h=parameters.heads.h)


class TestBert:
    """Its output projection belongs to the next module, so what is compared is what the heads found, side by side."""

    @implementations
    @pytest.mark.parametrize("cross", [True, False])
    def test_the_heads_find_the_same(self, how, cross):
        problem = draw_problem(SAME) if cross else draw_self_attention(SAME)
        problem = replace(problem, context_v=problem.context)
        config = configure(bert.BertConfig, how, hidden_size=60, num_attention_heads=6)
        p = problem.parameters
        state = linear("query", p.w_q, p.b_q) | linear("key", p.w_k, p.b_k) | linear("value", p.w_v, p.b_v)
        layer = load((bert.BertCrossAttention if cross else bert.BertSelfAttention)(config), state)
        x, context = map(torch.from_numpy, (problem.x, problem.context))
        mask = masking_utils.create_bidirectional_mask(config, x, torch.from_numpy(REAL), context)
        theirs, weights = layer(x, **({"encoder_hidden_states": context} if cross else {}), attention_mask=mask)
        with attnspec.trace() as steps:
            mha(problem, keep=Mask.keep(REAL, "batch seq_k"))
        assert_equal(steps["concatenate"].result, theirs, within=DOUBLE)
        if how == "eager":
            assert_equal(steps["softmax"].result, weights, within=DOUBLE)

    def test_a_boolean_mask_is_added_to_the_scores(self):
        """Accepted without a word, where the library's own masks are not used: what should be kept is raised by 1."""
        problem, config = draw_self_attention(SAME), configure(bert.BertConfig, hidden_size=60, num_attention_heads=6)
        p = problem.parameters
        layer = load(
            bert.BertSelfAttention(config), linear("query", p.w_q, p.b_q) | linear("key", p.w_k, p.b_k) | linear("value", p.w_v, p.b_v)
        )
        theirs, _ = layer(torch.from_numpy(problem.x), attention_mask=torch.from_numpy(problem.keep))
        with attnspec.trace() as added:
            mha(problem, bias=problem.keep.astype("float64"))
        with attnspec.trace() as kept:
            mha(problem, keep=problem.keep)
        assert_equal(added["concatenate"].result, theirs, within=DOUBLE)
        assert_differs(kept["concatenate"].result, theirs)

    @pytest.mark.parametrize(("how", "row"), [("eager", "uniform"), ("sdpa", "zero")])
    def test_a_query_without_keys_gets_the_mean_or_zeros_by_the_implementation(self, how, row):
        problem, config = draw_self_attention(SAME), configure(bert.BertConfig, how, hidden_size=60, num_attention_heads=6)
        p, real = problem.parameters, np.arange(7) < np.array([[7], [0]])
        layer = load(
            bert.BertSelfAttention(config), linear("query", p.w_q, p.b_q) | linear("key", p.w_k, p.b_k) | linear("value", p.w_v, p.b_v)
        )
        x = torch.from_numpy(problem.x)
        theirs, _ = layer(x, attention_mask=masking_utils.create_bidirectional_mask(config, x, torch.from_numpy(real)))

        def compute(policy):
            with attnspec.trace() as steps:
                mha(problem, keep=Mask.keep(real, "batch seq_k"), policy=policy)
            return steps["concatenate"].result

        assert_empty_row(row, theirs, compute, within=DOUBLE)


class TestGemma2:
    @pytest.mark.parametrize("sliding", [True, False])
    def test_scores_are_capped_windows_count_the_query_and_the_scale_is_given(self, sliding):
        problem = draw_self_attention(GROUPED)
        sizes = {"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "num_hidden_layers": 2}
        ways = {
            "attention_bias": True,
            "query_pre_attn_scalar": 3,
            "attn_logit_softcapping": 2.5,
            "sliding_window": 3,
            "rope_parameters": ROPE,
        }
        config = configure(gemma2.Gemma2Config, **sizes, **ways)
        assert config.layer_types == ["sliding_attention", "full_attention"]
        layer = load(gemma2.Gemma2Attention(config, 0 if sliding else 1), separate(problem.parameters))
        theirs = call(layer, gemma2.Gemma2RotaryEmbedding(config), problem.x, config=config, sliding=sliding, real=REAL)
        options = {"causal": True, "keep": Mask.keep(REAL, "batch seq_k")}
        window = (2, None) if sliding else (None, None)
        policy = Policy(rotation=Rotation(), softmax_precision="float32", scale=3**-0.5, cap=2.5, window=window)
        assert_equal(mha(problem, **options, policy=policy), theirs, within=SINGLE)
        for wrong in ({"scale": None}, {"cap": None}, {"cap_order": "after"}, {"window": (3 if sliding else 2, None)}):
            assert_differs(mha(problem, **options, policy=replace(policy, **wrong)), theirs)


class TestQwen3:
    @implementations
    def test_each_head_is_normalised_before_it_turns(self, how):
        problem = draw_self_attention(GROUPED)
        gains = {"gain_q": draw(1, 10), "gain_k": draw(1, 10, seed=1)}
        problem = replace(problem, parameters=replace(problem.parameters, **gains))
        sizes = {"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "num_hidden_layers": 1}
        config = configure(qwen3.Qwen3Config, how, **sizes, attention_bias=True, rms_norm_eps=0.3, rope_parameters=ROPE)
        state = layouts.write(problem.parameters, "qwen3")
        theirs = call(load(qwen3.Qwen3Attention(config, 0), state), qwen3.Qwen3RotaryEmbedding(config), problem.x, config=config, real=REAL)
        options = {"causal": True, "keep": Mask.keep(REAL, "batch seq_k")}
        policy = Policy(rotation=Rotation(), normalise="rms", epsilon=0.3, softmax_precision=softmax_of(how))
        assert_equal(mha(problem, **options, policy=policy), theirs, within=SINGLE)  # the norm too is taken in float32
        for wrong in ({"normalise": "layer"}, {"epsilon": 1e-6}, {"rotation": None}):
            assert_differs(mha(problem, **options, policy=replace(policy, **wrong)), theirs)


class TestGPTNeoX:
    @implementations
    def test_rows_are_fused_head_by_head_and_some_channels_turn_by_halves(self, how):
        problem = draw_self_attention(SAME)
        rope = {**ROPE, "partial_rotary_factor": 0.4}
        config = configure(neox.GPTNeoXConfig, how, hidden_size=60, num_attention_heads=6, rope_parameters=rope, attention_bias=True)
        layer = load(neox.GPTNeoXAttention(config, 0), fused(problem.parameters, "h three k"))
        theirs = call(layer, neox.GPTNeoXRotaryEmbedding(config), problem.x, config=config, real=REAL)
        options = {"causal": True, "keep": Mask.keep(REAL, "batch seq_k")}
        policy = Policy(rotation=Rotation(width=4), softmax_precision=softmax_of(how))
        assert_equal(mha(problem, **options, policy=policy), theirs, within=SINGLE)
        for wrong in (Rotation(), Rotation(width=4, pairing="interleaved")):
            assert_differs(mha(problem, **options, policy=replace(policy, rotation=wrong)), theirs)


class TestGPTJ:
    @implementations
    def test_some_channels_turn_in_adjacent_pairs(self, how):
        problem = draw_self_attention(SAME, bias=False)
        config = configure(gptj.GPTJConfig, how, n_embd=60, n_head=6, rotary_dim=4)
        layer = load(gptj.GPTJAttention(config, 0), separate(problem.parameters, ("q_proj", "k_proj", "v_proj", "out_proj")))
        theirs = call(layer, gptj.GPTJRotaryEmbedding(config), problem.x, config=config, real=REAL)
        options = {"causal": True, "keep": Mask.keep(REAL, "batch seq_k")}
        policy = Policy(rotation=Rotation(width=4, pairing="interleaved"), softmax_precision=softmax_of(how))
        assert_equal(mha(problem, **options, policy=policy), theirs, within=SINGLE)  # eager: the scores are taken in float32 too
        for wrong in (Rotation(width=4), Rotation(pairing="interleaved")):
            assert_differs(mha(problem, **options, policy=replace(policy, rotation=wrong)), theirs)


class TestCodeGen:
    @implementations
    def test_rows_are_fused_in_four_blocks_of_queries_values_keys(self, how):
        problem = draw_self_attention(attnspec.Heads(d_model=80, h=8), bias=False)
        p, config = problem.parameters, configure(codegen.CodeGenConfig, how, n_embd=80, n_head=8, rotary_dim=4)
        layer = load(codegen.CodeGenAttention(config, 0), layouts.write(replace(p, b_o=None), "codegen"))
        theirs = call(layer, codegen.CodeGenRotaryEmbedding(config), problem.x, config=config, real=REAL)
        policy = Policy(rotation=Rotation(width=4, pairing="interleaved"), softmax_precision=softmax_of(how))
        options = {"causal": True, "keep": Mask.keep(REAL, "batch seq_k"), "policy": policy}
        assert_equal(mha(problem, **options), theirs, within=SINGLE)
        assert_differs(mha(replace(problem, parameters=replace(p, w_k=p.w_v, w_v=p.w_k)), **options), theirs)


class TestFalcon:
    @implementations
    def test_rows_are_fused_group_by_group(self, how):
        problem = draw_self_attention(attnspec.Heads(d_model=60, h=6, h_kv=3))
        p = problem.parameters
        options = {"hidden_size": 60, "num_attention_heads": 6, "num_kv_heads": 3, "new_decoder_architecture": True, "bias": True}
        config = configure(falcon.FalconConfig, how, **options, rope_parameters=ROPE)
        layer = load(falcon.FalconAttention(config, 0), layouts.write(p, "falcon"))
        theirs = call(partial(layer, alibi=None), falcon.FalconRotaryEmbedding(config), problem.x, config=config, real=REAL)
        options = {"causal": True, "keep": Mask.keep(REAL, "batch seq_k")}
        policy = Policy(rotation=Rotation(), softmax_precision="input")
        assert_equal(mha(problem, **options, policy=policy), theirs, within=SINGLE)
        assert_differs(mha(problem, **options, policy=replace(policy, grouping="strided")), theirs)


class TestGptOss:
    @pytest.mark.parametrize("sliding", [True, False])
    def test_a_sink_takes_its_share(self, sliding):
        problem, sinks = draw_self_attention(GROUPED), draw(6)
        sizes = {"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "num_hidden_layers": 2}
        config = configure(gpt_oss.GptOssConfig, **sizes, attention_bias=True, sliding_window=3, rope_parameters=ROPE)
        layer = load(
            gpt_oss.GptOssAttention(config, 0 if sliding else 1), layouts.write(replace(problem.parameters, sinks=sinks), "gpt_oss")
        )
        theirs = call(layer, gpt_oss.GptOssRotaryEmbedding(config), problem.x, config=config, sliding=sliding, real=REAL)
        options = {"causal": True, "keep": Mask.keep(REAL, "batch seq_k")}
        policy = Policy(rotation=Rotation(), softmax_precision="input", window=(2, None) if sliding else (None, None))
        with_sinks = replace(problem, parameters=replace(problem.parameters, sinks=sinks))
        assert_equal(mha(with_sinks, **options, policy=policy), theirs, within=SINGLE)
        assert_differs(mha(problem, **options, policy=policy), theirs)


T5 = attnspec.Heads(d_model=17, h=6, d_k=10)


class TestT5:
    def layer(self, problem, table, *, how, decoder, relative=True):
        sizes = {"d_model": 17, "d_kv": 10, "num_heads": 6, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 5}
        config = configure(t5.T5Config, how, **sizes, is_decoder=decoder)
        state = separate(problem.parameters, ("q", "k", "v", "o")) | ({"relative_attention_bias.weight": table} if relative else {})
        return config, load(t5.T5Attention(config, relative, layer_idx=0, is_causal=decoder), state)

    @implementations
    @pytest.mark.parametrize("decoder", [True, False])
    def test_scores_are_not_scaled_and_biased_by_relative_positions(self, how, decoder):
        problem, table = draw_self_attention(T5, bias=False), draw(8, 6)
        problem = replace(problem, parameters=replace(problem.parameters, w_q=problem.parameters.w_q / 3))
        config, layer = self.layer(problem, table, how=how, decoder=decoder)
        x = torch.from_numpy(problem.x)
        mask = mask_of(config, x, real=REAL) if decoder else masking_utils.create_bidirectional_mask(config, x, torch.from_numpy(REAL))
        theirs, _, weights = layer(x, mask=mask)
        at = np.arange(7)[None]
        bias = {way: attnspec.relative_bias(table, at, at, max_distance=5, bidirectional=way) for way in (True, False)}
        options = {"causal": decoder, "keep": Mask.keep(REAL, "batch seq_k")}
        with attnspec.trace() as steps:
            assert_equal(mha(problem, **options, bias=bias[not decoder], policy=Policy(scale=1.0)), theirs, within=DOUBLE)
        if how == "eager":
            assert_equal(steps["softmax"].result, weights, within=DOUBLE)
        assert_differs(mha(problem, **options, bias=bias[not decoder]), theirs)
        assert_differs(mha(problem, **options, bias=bias[decoder], policy=Policy(scale=1.0)), theirs)

    @implementations
    def test_cross_attention_has_no_bias(self, how):
        problem = draw_problem(T5, bias=False)
        problem = replace(problem, context_v=problem.context)
        config, layer = self.layer(problem, None, how=how, decoder=True, relative=False)
        x, context = map(torch.from_numpy, (problem.x, problem.context))
        theirs, *_ = layer(
            x, key_value_states=context, mask=masking_utils.create_bidirectional_mask(config, x, torch.from_numpy(REAL), context)
        )
        assert_equal(mha(problem, keep=Mask.keep(REAL, "batch seq_k"), policy=Policy(scale=1.0)), theirs, within=DOUBLE)

    @pytest.mark.parametrize("whole", ["int32", "int64"])
    @pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (32, 256), (16, 64), (64, 50), (12, 512), (20, 100)])
    def test_every_distance_has_its_bucket(self, whole, buckets, furthest):
        """T5's own numbers are 32 and 128: a distance of 64 starts a bucket exactly, which a rounded logarithm can miss."""
        keys, table = np.arange(2 * furthest, dtype=whole)[None], np.arange(float(buckets))[:, None]
        query = np.array([[furthest]], dtype=whole)
        for way in (True, False):
            distance = torch.from_numpy(keys - query)
            theirs = t5.T5Attention._relative_position_bucket(distance, bidirectional=way, num_buckets=buckets, max_distance=furthest)
            for array in (np.asarray, torch.from_numpy):
                mine = attnspec.relative_bias(array(table), array(query), array(keys), max_distance=furthest, bidirectional=way)
                np.testing.assert_array_equal(np.asarray(mine)[0, 0], theirs.numpy())


class TestLinearBias:
    """BLOOM and MPT add the slope times the key's position alone, which under causality is the distance, but for a constant."""

    def bias(self, problem):
        at = np.arange(problem.x.shape[1])[None]
        return attnspec.linear_bias(np.array(attnspec.alibi_slopes(6)), at, at)

    def test_bloom(self):
        problem, config = draw_self_attention(SAME), configure(bloom.BloomConfig, hidden_size=60, n_head=6)
        layer, x = load(bloom.BloomAttention(config, 0), fused(problem.parameters, "h three k")), torch.from_numpy(problem.x)
        alibi = bloom.build_alibi_tensor(torch.from_numpy(REAL.astype(int)), 6, torch.float64)
        theirs, weights = layer(x, torch.zeros_like(x), alibi, mask_of(config, x, real=REAL))
        options = {"causal": True, "keep": Mask.keep(REAL, "batch seq_k"), "policy": Policy(softmax_precision="float32")}
        with attnspec.trace() as steps:
            assert_equal(mha(problem, **options, bias=self.bias(problem)), theirs, within=SOFTMAX)
        assert_equal(steps["softmax"].result, weights, within=SOFTMAX)
        assert_differs(mha(problem, **options), theirs)

    def test_mpt(self):
        problem, config = draw_self_attention(SAME, bias=False), configure(mpt.MptConfig, d_model=60, n_heads=6)
        layer, x = (
            load(mpt.MptAttention(config, 0), fused(problem.parameters, "three h k", ("Wqkv", "out_proj"))),
            torch.from_numpy(problem.x),
        )
        keep = Mask.keep(REAL, "batch seq_k") & Mask.causal()
        drop = ~(np.tril(np.ones((7, 7), dtype=bool)) & REAL[:, None, None, :])
        theirs, _ = layer(x, mpt.build_mpt_alibi_tensor(6, 7), attention_mask=torch.from_numpy(drop))
        policy = Policy(softmax_precision="float32")
        assert_equal(mha(problem, keep=keep, bias=self.bias(problem), policy=policy), theirs, within=SOFTMAX)
        assert_differs(mha(problem, keep=keep, policy=policy), theirs)
