"""timm, x-transformers and Hugging Face transformers, all of it right; masks and angles are made as their models make them."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from attnspec import Heads, Policy, Rotation

from .entry import Entry, linear, over_heads

EVEN = Heads(d_model=24, h=4)
WIDE = Heads(d_model=24, h=4, h_kv=2, d_k=10)
STRIDED = Heads(d_model=24, h=4, h_kv=2, d_k=5, d_v=3, d_key_in=17)
SELF = Heads(d_model=24, h=4, h_kv=2, d_k=5, d_v=3)
ANY = "any"
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def _timm_class() -> Any:
    """Import it without what timm has of torchvision: its datasets, and a norm that attention does not use."""
    names = ("timm", "torchvision", "torchvision.ops", "torchvision.ops.misc")
    before = {name: sys.modules.get(name) for name in names}
    folders = importlib.util.find_spec("timm").submodule_search_locations
    try:
        sys.modules.update({name: ModuleType(name) for name in names})
        sys.modules["timm"].__path__ = folders
        sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = nn.BatchNorm2d
        return importlib.import_module("timm.layers.attention").Attention
    finally:
        for name, module in before.items():
            del sys.modules[name]
            sys.modules.update({name: module} if module else {})


def _timm(*, is_fused: bool) -> Callable[[], Any]:
    def build() -> Any:
        layer = _timm_class()(24, num_heads=4, qkv_bias=True).double().eval()
        layer.fused_attn = is_fused
        return layer

    return build


def _timm_call(m: Any, x: Any, keep: Any) -> Any:
    return m(x, attn_mask=over_heads(keep))


def _x_transformers(**options: Any) -> Callable[[], Any]:
    def build() -> Any:
        attention = importlib.import_module("x_transformers.x_transformers").Attention
        sizes = {"dim_head": 5, "value_dim_head": 3, "heads": 4, "kv_heads": 2, "dim_context": 17}
        return attention(24, **{**sizes, **options}).double().eval()

    return build


def _x_call(m: Any, q: Any, k: Any, keep: Any, padding: Any) -> Any:
    return m(q, k, attn_mask=over_heads(keep), context_mask=padding)


def _strided(**more: Any) -> Policy:
    return Policy(grouping="strided", causal_anchor="bottom_right", **more)


def _modelling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _configure(name: str, how: str, **options: Any) -> Any:
    module = importlib.import_module(f"transformers.models.{name}")
    config = getattr(module, {"bert": "BertConfig", "gpt2": "GPT2Config", "llama": "LlamaConfig"}[name])(**options)
    config._attn_implementation = how  # noqa: SLF001  # as its models do
    return config


def _bert(how: str) -> Callable[[], Any]:
    """Build what finds the heads' answers; the output projection is part of another module of its."""
    return lambda: _modelling("bert").BertSelfAttention(_configure("bert", how, hidden_size=24, num_attention_heads=4)).double().eval()


def _bert_call(m: Any, x: Any, padding: Any) -> Any:
    make = importlib.import_module("transformers.masking_utils").create_bidirectional_mask
    return m(x, attention_mask=make(m.config, x, None if padding is None else padding.to(torch.int64)))[0]


def _causal_mask(config: Any, x: Any, padding: Any, positions: Any) -> Any:
    make = importlib.import_module("transformers.masking_utils").create_causal_mask
    return make(config, x, attention_mask=None if padding is None else padding.to(torch.int64), cache=None, position_ids=positions)


def _gpt2(how: str) -> Callable[[], Any]:
    return lambda: _modelling("gpt2").GPT2Attention(_configure("gpt2", how, n_embd=24, n_head=4), layer_idx=0).double().eval()


def _gpt2_call(m: Any, x: Any, padding: Any) -> Any:
    return m(x, attention_mask=_causal_mask(m.config, x, padding, torch.arange(x.shape[1])[None]))[0]


def _llama(how: str) -> Callable[[], Any]:
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "num_hidden_layers": 1}

    def build() -> Any:
        config = _configure("llama", how, **sizes, attention_bias=True, rope_parameters=ROPE)
        return _modelling("llama").LlamaAttention(config, 0).double().eval()

    return build


def _llama_call(m: Any, x: Any, padding: Any, positions: Any) -> Any:
    """Positions that do not go on by one would be packed documents to its masks, so they are given to the rotation alone."""
    steps = torch.arange(x.shape[1])[None]
    angles = _modelling("llama").LlamaRotaryEmbedding(m.config)(x, steps if positions is None else positions)
    return m(x, attention_mask=_causal_mask(m.config, x, padding, steps), position_embeddings=angles)[0]


def _layer(name: str, build: Any, layout: Any, call: Any, heads: Heads = EVEN, wrong: str | None = None, **more: Any) -> Entry:  # noqa: PLR0917
    return Entry(name, build, "check", {"heads": heads, "layout": layout, "call": call, **more}, wrong)


def _rotated(how: str) -> Policy:
    return Policy(rotation=Rotation(), empty_row=ANY, softmax_precision="float32" if how == "eager" else "input")


_BERT = {name: line for name, line in linear("query key value output").items() if not name.endswith("_o")}

ENTRIES = [
    _layer("timm Attention, fused", _timm(is_fused=True), "timm", _timm_call),
    _layer("timm Attention, not fused", _timm(is_fused=False), "timm", _timm_call, policy=Policy(empty_row="nan")),
    _layer("x-transformers Attention, flash", _x_transformers(flash=True), "x_transformers", _x_call, STRIDED, policy=_strided()),
    # x-transformers 2.31: where a query keeps no key the output is zeros, but the gradients of the softmax are NaN
    _layer(
        "x-transformers Attention", _x_transformers(), "x_transformers", _x_call, STRIDED, policy=_strided(softmax_precision="float32"),
        wrong="fully_masked_row",
    ),
    _layer(
        "x-transformers Attention, causal and flash", _x_transformers(flash=True, causal=True, dim_context=None), "x_transformers",
        lambda m, x: m(x), SELF, causal=True, policy=_strided(),
    ),
    *(
        _layer(f"transformers BertSelfAttention, {how}", _bert(how), _BERT, _bert_call, policy=Policy(empty_row=ANY))
        for how in ("eager", "sdpa")
    ),
    *(
        _layer(f"transformers GPT2Attention, {how}", _gpt2(how), "gpt2", _gpt2_call, causal=True, policy=Policy(empty_row=ANY))
        for how in ("eager", "sdpa")
    ),
    *(
        _layer(f"transformers LlamaAttention, {how}", _llama(how), "llama", _llama_call, WIDE, causal=True, policy=_rotated(how))
        for how in ("eager", "sdpa")
    ),
]  # fmt: skip
