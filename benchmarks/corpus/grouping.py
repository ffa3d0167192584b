"""Faults of grouped heads: key/value heads reach the wrong query heads."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from attnspec import Heads

from .case import Case
from .textbook import softmax

GROUPED = Heads(d_model=24, h=6, h_kv=2)


def _attend(q: Any, k: Any, v: Any) -> Any:
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


def _tiled(query: Any, key: Any, value: Any) -> Any:
    """O-018: the key/value heads follow one another as a whole, again and again."""
    times = query.shape[1] // key.shape[1]
    return _attend(query, np.tile(key, (1, times, 1, 1)), np.tile(value, (1, times, 1, 1)))


def _repeated(query: Any, key: Any, value: Any) -> Any:
    times = query.shape[1] // key.shape[1]
    return _attend(query, np.repeat(key, times, axis=1), np.repeat(value, times, axis=1))


def _make_refactored(axis: int) -> Any:
    """O-019: repeating is written as a broadcast along a new axis, `axis`, and a reshape."""
    import jax
    import jax.numpy as jnp

    def expand(x: jax.Array, heads: int) -> jax.Array:
        batch, seq, _, width = x.shape
        shape = list(x.shape)
        shape.insert(axis, heads // x.shape[2])
        return jnp.broadcast_to(jnp.expand_dims(x, axis), shape).reshape(batch, seq, heads, width)

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        key, value = (expand(x, query.shape[2]) for x in (key, value))
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, axis=-1), value)

    return attention


def _repeated_in_time(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """O-020: keys and values are repeated along the sequence, and the kernel shares the heads by itself."""
    times = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def _repeated_in_heads(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    times = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(times, dim=2), v.repeat_interleave(times, dim=2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


class _MixedHeads(nn.Module):
    """O-021: fewer key/value heads meet the query heads as they are, and an index beyond the last one is clamped."""

    def __init__(self, embed_dim: int, num_heads: int, num_heads_kv: int) -> None:
        super().__init__()
        self.num_heads, self.num_heads_kv, self.head_dim = num_heads, num_heads_kv, embed_dim // num_heads
        self.in_proj = nn.Linear(embed_dim, self.head_dim * (num_heads + 2 * num_heads_kv))
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def expand(self, x: Any) -> Any:
        return x

    def pick(self, x: Any) -> Any:
        return x.index_select(2, torch.arange(self.num_heads).clamp(max=x.shape[2] - 1))

    def forward(self, x: Any) -> Any:
        q, kv = self.in_proj(x).split([self.num_heads * self.head_dim, 2 * self.num_heads_kv * self.head_dim], dim=-1)
        q = q.unflatten(-1, (-1, self.head_dim))
        k, v = kv.unflatten(-1, (2, -1, self.head_dim)).unbind(dim=-3)
        k, v = (self.pick(self.expand(y)) for y in (k, v))
        weights = torch.einsum("bthd,bshd->bhts", q, k).mul(self.head_dim**-0.5).softmax(-1)
        return self.out_proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))


class _MixedHeadsExpanded(_MixedHeads):
    def expand(self, x: Any) -> Any:
        return x.repeat_interleave(self.num_heads // self.num_heads_kv, dim=2)


_MIXED = {
    "w_qkv": ("in_proj.weight", "(part d_k) d_model"),
    "b_qkv": ("in_proj.bias", "(part d_k)"),
    "w_o": ("out_proj.weight", "d_model (h d_v)"),
    "b_o": ("out_proj.bias", "d_model"),
}

CASES = [
    Case(
        "O-018", "gqa_tile_vs_repeat", "gqa_head_mapping", "https://github.com/onnx/onnx/pull/7274",
        lambda: _tiled, lambda: _repeated, settings={"options": ("grouped",), "library": "numpy"},
    ),
    Case(
        "O-019", "gqa_tile_vs_repeat", "gqa_head_mapping", "https://github.com/apple/axlearn/pull/842",
        lambda: _make_refactored(2), lambda: _make_refactored(3),
        settings={"order": "bshd", "options": ("grouped",), "library": "jax"},
    ),
    Case(
        "O-020", "gqa_expand_wrong_axis", "gqa_head_mapping", "https://github.com/PrimeIntellect-ai/prime-rl/pull/2681",
        lambda: _repeated_in_time, lambda: _repeated_in_heads,
        settings={"order": "bshd", "options": ("grouped", "causal"), "library": "torch"},
    ),
    Case(
        "O-021", "gqa_expand_missing", "gqa_head_mapping", "https://github.com/state-spaces/mamba/pull/462",
        lambda: _MixedHeads(24, 6, 2).double(), lambda: _MixedHeadsExpanded(24, 6, 2).double(),
        "check", {"heads": GROUPED, "layout": _MIXED},
    ),
]  # fmt: skip
