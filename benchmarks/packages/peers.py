"""The libraries' own attention, all of it right: what each is called, how it is called, and which conventions it keeps to."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import attnspec
import attnspec.numpy
import attnspec.torch
from attnspec import Heads, Parameters, Policy

from . import peers_jax, peers_models
from .entry import Entry, over_heads

EVEN = Heads(d_model=24, h=4)
APART = Heads(d_model=24, h=4, d_key_in=17, d_value_in=19)
GROUPED = Heads(d_model=24, h=4, h_kv=2)
FREE = Heads(d_model=24, h=4, d_k=5, d_v=3)
CANONICAL = {f"w_{r}": (f"w_{r}", f"{h} {source} {width}") for r, h, source, width in (
    ("q", "h", "d_model", "d_k"), ("k", "h_kv", "d_key_in", "d_k"), ("v", "h_kv", "d_value_in", "d_v"))}  # fmt: skip
CANONICAL |= {f"b_{r}": (f"b_{r}", f"{h} {width}") for r, h, width in (("q", "h", "d_k"), ("k", "h_kv", "d_k"), ("v", "h_kv", "d_v"))}
CANONICAL |= {"w_o": ("w_o", "(h d_v) d_model"), "b_o": ("b_o", "d_model")}


def _torch_layer(**options: Any) -> Callable[[], Any]:
    return lambda: nn.MultiheadAttention(24, 4, **{"batch_first": True, **options}).double().eval()


def _masked(m: Any, q: Any, k: Any, v: Any, keep: Any, padding: Any) -> Any:  # noqa: PLR0917
    """Call PyTorch's layer, or ours in its place; masks drop, and stand sample by sample, head by head."""
    drop = None if keep is None else keep.expand(len(q), q.shape[1], k.shape[1]).repeat_interleave(4, 0)
    return m(q, k, v, attn_mask=drop, key_padding_mask=padding, need_weights=False)[0]


def _seq_first(m: Any, q: Any, k: Any, v: Any, padding: Any) -> Any:
    y, _ = m(*(each.transpose(0, 1) for each in (q, k, v)), key_padding_mask=padding, average_attn_weights=False)
    return y.transpose(0, 1)


def _told(heads: Heads, layout: Any, call: Any, **more: Any) -> dict[str, Any]:
    return {"heads": heads, "layout": layout, "call": call, **more}


_LAYERS = [
    Entry("torch MultiheadAttention", _torch_layer(), "check", _told(EVEN, "torch", _masked, mask="drop")),
    Entry(
        "torch MultiheadAttention, sequence first", _torch_layer(batch_first=False), "check",
        _told(EVEN, "torch", _seq_first, mask="drop", policy=Policy(empty_row="nan")),
    ),
    Entry(
        "torch MultiheadAttention, kdim and vdim", _torch_layer(kdim=17, vdim=19), "check",
        _told(APART, "torch_separate", _masked, mask="drop"),
    ),
    Entry("torch MultiheadAttention, bias_kv", _torch_layer(add_bias_kv=True), "check", _told(EVEN, "torch", _masked, mask="drop")),
    # PyTorch 2.13, with extra keys, `is_causal` and `need_weights=False`: the triangle lies over the extra keys too and hides them
    Entry("torch MultiheadAttention, zero_attn, by itself", _torch_layer(add_zero_attn=True), "check", wrong=""),
    Entry("torch MultiheadAttention, no bias", _torch_layer(bias=False), "check", _told(EVEN, "torch", _masked, mask="drop")),
]  # fmt: skip


def _own_dropin(**options: Any) -> Callable[[], Any]:
    return lambda: attnspec.torch.MultiheadAttention(24, 4, batch_first=True, **options).double().eval()


def _own_function(m: Any, q: Any, k: Any, v: Any, keep: Any, bias: Any, causal: Any, offset: Any, scale: Any) -> Any:  # noqa: PLR0917
    options = {"keep": over_heads(keep), "bias": bias, "causal": causal, "offset": offset if causal else None, "scale": scale}
    return attnspec.multi_head_attention(q, Parameters(**vars(m)), context=k, context_v=v, **options)


def _own_layer(m: Any, q: Any, k: Any, v: Any, keep: Any, bias: Any, causal: Any) -> Any:  # noqa: PLR0917
    return m(q, context=k, context_v=v, keep=over_heads(keep), bias=bias, causal=causal)


def _own_step(m: Any, x: Any, cache: Any) -> Any:
    return m(x, cache=m.new_cache(batch=len(x)) if cache is None else cache)


def _own_attend(f: Any, q: Any, k: Any, v: Any, keep: Any, bias: Any, causal: Any, scale: Any, sinks: Any) -> Any:  # noqa: PLR0917
    return f(q, k, v, keep=keep, bias=bias, causal=causal, scale=scale, sinks=sinks)


_OWN = [
    Entry(
        "attnspec multi_head_attention", lambda: SimpleNamespace(**vars(Parameters.random(FREE, bias=True))), "check",
        _told(FREE, CANONICAL, _own_function),
    ),
    Entry(
        "attnspec.numpy MultiHeadAttention", lambda: attnspec.numpy.MultiHeadAttention(24, 4, d_k=5, d_v=3, dtype="float64"), "check",
        _told(FREE, CANONICAL, _own_layer),
    ),
    Entry(
        "attnspec.numpy MultiHeadAttention, cached", lambda: attnspec.numpy.MultiHeadAttention(24, 4, dtype="float64"), "check",
        _told(EVEN, CANONICAL, _own_step, causal=True),
    ),
    Entry(
        "attnspec.torch MultiHeadAttention", lambda: attnspec.torch.MultiHeadAttention(24, 4, h_kv=2).double().eval(), "check",
        _told(GROUPED, CANONICAL, _own_layer),
    ),
    Entry(
        "attnspec.torch MultiHeadAttention, cached", lambda: attnspec.torch.MultiHeadAttention(24, 4).double().eval(), "check",
        _told(EVEN, CANONICAL, _own_step, causal=True),
    ),
    Entry("attnspec.torch MultiheadAttention", _own_dropin(), "check", _told(EVEN, "torch", _masked, mask="drop")),
    Entry(
        "attnspec.torch MultiheadAttention, kdim and vdim", _own_dropin(kdim=17, vdim=19), "check",
        _told(APART, "torch_separate", _masked, mask="drop"),
    ),
    *(
        Entry(f"attnspec attend, {library}", lambda: attnspec.attend, "check_attention", {"call": _own_attend, "library": library})
        for library in ("numpy", "torch", "jax")
    ),
]  # fmt: skip


def _of_torch(name: str, function: Any, call: Any, **more: Any) -> Entry:
    return Entry(f"torch {name}", lambda: function, "check_attention", {"call": call, "library": "torch", **more})


def _either(f: Any, q: Any, k: Any, v: Any, causal: Any, scale: Any) -> Any:  # noqa: PLR0917
    return f(q, k, v, is_causal=causal, scale=scale)


def _grouped(f: Any, q: Any, k: Any, v: Any, keep: Any, enable_gqa: Any) -> Any:  # noqa: PLR0917
    return f(q, k, v, attn_mask=keep, enable_gqa=enable_gqa)


def _biased(f: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
    return f(q, k, v, attn_mask=bias)


def _dropped(f: Any, q: Any, k: Any, v: Any, dropout: Any) -> Any:
    return f(q, k, v, dropout_p=dropout)


def _lower_right(f: Any, q: Any, k: Any, v: Any) -> Any:
    return f(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))


def _flex(f: Any, q: Any, k: Any, v: Any, keep: Any, bias: Any, causal: Any, scale: Any, softcap: Any, enable_gqa: Any) -> Any:  # noqa: PLR0917
    batch, h, seq_q, seq_k = *q.shape[:3], k.shape[2]
    keep = torch.ones(1, 1, 1, 1, dtype=torch.bool) if keep is None else keep
    keep = keep.expand(batch, h, seq_q, seq_k)
    bias = None if bias is None else bias.expand(batch, h, seq_q, seq_k)

    def rule(b: Any, head: Any, i: Any, j: Any) -> Any:
        return keep[b, head, i, j] & ((i >= j) | (not causal))

    def score(s: Any, b: Any, head: Any, i: Any, j: Any) -> Any:
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        return s if bias is None else s + bias[b, head, i, j]

    blocks = create_block_mask(rule, batch, h, seq_q, seq_k, device="cpu")
    return f(q, k, v, score_mod=score, block_mask=blocks, scale=scale, enable_gqa=enable_gqa)


_FUNCTIONS = [
    _of_torch("scaled_dot_product_attention, a mask", scaled_dot_product_attention, lambda f, q, k, v, keep: f(q, k, v, attn_mask=keep)),
    _of_torch("scaled_dot_product_attention, causal and a scale", scaled_dot_product_attention, _either),
    _of_torch("scaled_dot_product_attention, a bias", scaled_dot_product_attention, _biased),
    _of_torch("scaled_dot_product_attention, grouped", scaled_dot_product_attention, _grouped),
    _of_torch("scaled_dot_product_attention, dropout", scaled_dot_product_attention, _dropped),
    _of_torch(
        "scaled_dot_product_attention, causal from the lower right", scaled_dot_product_attention, _lower_right,
        causal=True, policy=Policy(causal_anchor="bottom_right"),
    ),
    _of_torch("flex_attention", flex_attention, _flex),
]  # fmt: skip

_KNOWN = (
    "torch MultiheadAttention", "torch MultiheadAttention, sequence first", "torch MultiheadAttention, kdim and vdim",
    "torch MultiheadAttention, bias_kv", "torch MultiheadAttention, no bias", "attnspec.numpy MultiHeadAttention",
    "attnspec.torch MultiHeadAttention", "attnspec.torch MultiheadAttention", "attnspec.torch MultiheadAttention, kdim and vdim",
    "flax linen.MultiHeadDotProductAttention", "flax nnx.MultiHeadAttention", "flax nnx.MultiHeadAttention, grouped",
    "equinox MultiheadAttention", "keras MultiHeadAttention", "timm Attention, fused", "timm Attention, not fused",
    "x-transformers Attention, flash", "x-transformers Attention", "x-transformers Attention, causal and flash",
)  # fmt: skip
"""What the oracle knows of itself."""

_TOLD = [*_LAYERS, *_FUNCTIONS, *_OWN, *peers_jax.ENTRIES, *peers_models.ENTRIES]

_ITSELF = [Entry(f"{e.name}, by itself", e.build, "check", wrong="" if "bias_kv" in e.name else e.wrong) for e in _TOLD if e.name in _KNOWN]
ENTRIES = [*_TOLD, *_ITSELF]
