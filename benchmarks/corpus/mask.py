"""Faults of masks: their meaning turned round, applied too late, or on the wrong axis."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from attnspec import Heads, Policy

from .case import Case
from .textbook import masked_softmax, softmax

HEADS = Heads(d_model=12, h=3)


def _blocked_handed_over(q: Any, k: Any, v: Any, *, mask: Any = None, attn_bias: Any = None) -> Any:
    """O-038: inside, True is blocked; the fused function takes True for kept. Only a bias puts it right."""
    blocked = None if mask is None else ~mask
    if attn_bias is not None:
        blocked = attn_bias if blocked is None else torch.where(blocked, -torch.inf, attn_bias)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=blocked)


def _kept_handed_over(q: Any, k: Any, v: Any, *, mask: Any = None, attn_bias: Any = None) -> Any:
    blocked = None if mask is None else ~mask
    if attn_bias is not None:
        added = attn_bias if blocked is None else torch.where(blocked, -torch.inf, attn_bias)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=added)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=None if blocked is None else ~blocked)


def _eager_added(query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
    """O-039: the mask is added, whatever it is made of."""
    weights = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    if attention_mask is not None:
        weights = weights + attention_mask
    return torch.matmul(functional.softmax(weights, dim=-1), value)


def _eager_converted(query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
    weights = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attention_mask, torch.finfo(weights.dtype).min)
    elif attention_mask is not None:
        weights = weights + attention_mask
    return torch.matmul(functional.softmax(weights, dim=-1), value)


def _fast_attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attend; a boolean mask keeps, any other is added."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    return softmax(scores) @ v


def _ones_and_zeros(q: Any, k: Any, v: Any, *, padding: Any = None) -> Any:
    """O-040: a mask of 1.0 and 0.0 is given where a float mask is added."""
    return _fast_attention(q, k, v, None if padding is None else padding[:, None, None, :].astype(q.dtype))


def _booleans(q: Any, k: Any, v: Any, *, padding: Any = None) -> Any:
    return _fast_attention(q, k, v, None if padding is None else padding[:, None, None, :])


def _kept_where_not_zero(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """O-041: a mask that is added is read as if it said what to keep."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask != 0)


def _kept_where_zero(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask == 0)


class _PooledAttention(nn.Module):
    """O-042: the mask goes to the weights."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def weigh(self, attn: Any, mask: Any) -> Any:
        attn = attn.softmax(dim=-1)
        return attn if mask is None else attn.masked_fill(~mask, -torch.inf)

    def forward(self, x: Any, mask: Any = None) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attn = self.weigh(self.scale * q @ k.transpose(-2, -1), None if mask is None else mask[:, None])
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class _PooledAttentionOfScores(_PooledAttention):
    def weigh(self, attn: Any, mask: Any) -> Any:
        return masked_softmax(attn, mask)


def _compressed_then_masked(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """O-043: the future is removed from the weights, and the rest does not grow."""
    attn = (torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5).softmax(dim=-1)
    if causal:
        future = torch.ones(attn.shape[-2:], dtype=torch.bool).triu(1)
        attn = attn.masked_fill(future, 0)
    return torch.einsum("bhij,bhjd->bhid", attn, v)


def _masked_then_normalised(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    dots = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(dots.shape[-2:], dtype=torch.bool).triu(1)
        dots = dots.masked_fill(future, -torch.inf)
    return torch.einsum("bhij,bhjd->bhid", dots.softmax(dim=-1), v)


class _PaddedEncoder(nn.Module):
    """O-044: the padding blocks queries in place of keys."""

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.w_q, self.w_k, self.w_v, self.w_concat = (nn.Linear(d_model, d_model) for _ in range(4))

    def make_mask(self, padding: Any) -> Any:
        return padding[:, None, :, None]

    def forward(self, x: Any, padding: Any = None) -> Any:
        q, k, v = (project(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for project in (self.w_q, self.w_k, self.w_v))
        score = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        if padding is not None:
            score = score.masked_fill(~self.make_mask(padding), torch.finfo(score.dtype).min)
        return self.w_concat((score.softmax(-1) @ v).transpose(1, 2).flatten(2))


class _PaddedEncoderByKey(_PaddedEncoder):
    def make_mask(self, padding: Any) -> Any:
        return padding[:, None, None, :]


def _flattened(q: Any, k: Any, v: Any, keep: Any) -> Any:
    """Attend with batch and heads on one axis, the batch outside."""
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) * q.shape[-1] ** -0.5
    return torch.bmm(masked_softmax(scores, keep), v.flatten(0, 1)).unflatten(0, q.shape[:2])


def _mask_repeated_as_a_whole(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """O-045: batch and heads are flattened with the batch outside, and the mask is repeated with the heads outside."""
    return _flattened(q, k, v, None if mask is None else mask.repeat(q.shape[1], 1, 1))


def _mask_repeated_by_sample(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    return _flattened(q, k, v, None if mask is None else mask.repeat_interleave(q.shape[1], dim=0))


class _HeadsOutside:
    """O-046: batch and heads are flattened with the heads outside, and the mask is repeated with the batch outside."""

    def __init__(self, d_model: int, n_head: int) -> None:
        rng = np.random.default_rng(0)
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qs, self.ks, self.vs, self.w_o = rng.normal(size=(4, d_model, d_model)) / d_model

    def repeat(self, mask: Any) -> Any:
        return np.repeat(mask, self.n_head, axis=0)

    def split(self, x: Any) -> Any:
        return x.reshape(*x.shape[:2], self.n_head, self.d_head).transpose(2, 0, 1, 3).reshape(-1, x.shape[1], self.d_head)

    def __call__(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        batch, seq, _ = q.shape
        q, k, v = self.split(q @ self.qs), self.split(k @ self.ks), self.split(v @ self.vs)
        scores = np.matmul(q, k.transpose(0, 2, 1)) / np.sqrt(self.d_head)
        if mask is not None:
            scores = np.where(self.repeat(mask), scores, -np.inf)
        found = np.matmul(softmax(scores), v).reshape(self.n_head, batch, seq, self.d_head)
        return found.transpose(1, 2, 0, 3).reshape(batch, seq, -1) @ self.w_o


class _HeadsOutsideTiled(_HeadsOutside):
    def repeat(self, mask: Any) -> Any:
        return np.tile(mask, (self.n_head, 1, 1))


def _make_planner(repeat: str) -> Any:
    """O-047: data with samples outside, and padding repeated by `repeat`."""
    import jax
    import jax.numpy as jnp

    def attention(queries: jax.Array, keys: jax.Array, values: jax.Array, key_padding_mask: jax.Array | None = None) -> jax.Array:
        (batch, modes, seq, width), out = queries.shape, values.shape[-1]
        q, k, v = (x.reshape(batch * modes, x.shape[2], -1) for x in (queries, keys, values))
        scores = q @ k.transpose(0, 2, 1) / width**0.5
        if key_padding_mask is not None:
            repeated = jnp.tile(key_padding_mask, (modes, 1)) if repeat == "tile" else jnp.repeat(key_padding_mask, modes, axis=0)
            scores = jnp.where(repeated[:, None, :], scores, jnp.finfo(scores.dtype).min)
        return (jax.nn.softmax(scores, axis=-1) @ v).reshape(batch, modes, seq, out)

    return attention


_ENCODER = {
    "w_q": ("w_q.weight", "(h d_k) d_model"), "b_q": ("w_q.bias", "(h d_k)"),
    "w_k": ("w_k.weight", "(h_kv d_k) d_model"), "b_k": ("w_k.bias", "(h_kv d_k)"),
    "w_v": ("w_v.weight", "(h_kv d_v) d_model"), "b_v": ("w_v.bias", "(h_kv d_v)"),
    "w_o": ("w_concat.weight", "d_model (h d_v)"), "b_o": ("w_concat.bias", "d_model"),
}  # fmt: skip
_OUTSIDE = {
    "w_q": ("qs", "d_model (h d_k)"), "w_k": ("ks", "d_key_in (h_kv d_k)"),
    "w_v": ("vs", "d_value_in (h_kv d_v)"), "w_o": ("w_o", "(h d_v) d_model"),
}  # fmt: skip

CASES = [
    Case(
        "O-038", "mask_polarity_inverted", "mask_polarity_inverted", "https://github.com/lucidrains/x-transformers/issues/160",
        lambda: _blocked_handed_over, lambda: _kept_handed_over, settings={"library": "torch"},
    ),
    Case(
        "O-039", "mask_type_confusion", "mask_type_confusion", "https://github.com/huggingface/transformers/pull/41443",
        lambda: _eager_added, lambda: _eager_converted, settings={"policy": Policy(empty_row="uniform"), "library": "torch"},
    ),
    Case(
        "O-040", "mask_type_confusion", "mask_type_confusion", "https://github.com/ml-explore/mlx/issues/2626",
        lambda: _ones_and_zeros, lambda: _booleans, settings={"library": "numpy"},
    ),
    Case(
        "O-041", "mask_type_confusion", "mask_type_confusion", "https://github.com/nishide-dev/unturtle/pull/56",
        lambda: _kept_where_not_zero, lambda: _kept_where_zero, settings={"mask": "additive", "library": "torch"},
    ),
    Case(
        "O-042", "mask_after_softmax", "mask_after_softmax", "https://github.com/huggingface/pytorch-image-models/pull/2236",
        lambda: _PooledAttention(12, 3).double(), lambda: _PooledAttentionOfScores(12, 3).double(),
        "check", {"heads": HEADS, "layout": "timm"},
    ),
    Case(
        "O-043", "mask_after_softmax", "mask_after_softmax", "https://github.com/lucidrains/memory-compressed-attention/issues/2",
        lambda: _compressed_then_masked, lambda: _masked_then_normalised, settings={"library": "torch"},
    ),
    Case(
        "O-044", "mask_wrong_axis", "mask_wrong_axis", "https://github.com/hyunwoongko/transformer/pull/40",
        lambda: _PaddedEncoder(12, 3).double(), lambda: _PaddedEncoderByKey(12, 3).double(),
        "check", {"heads": HEADS, "layout": _ENCODER, "policy": Policy(empty_row="uniform")},
    ),
    Case(
        "O-045", "mask_batch_head_tiling", "mask_batch_head_tiling", "https://github.com/ArrowLuo/CLIP4Clip/issues/22",
        lambda: _mask_repeated_as_a_whole, lambda: _mask_repeated_by_sample,
        settings={"mask_axes": "batch seq_q seq_k", "library": "torch"},
    ),
    Case(
        "O-046", "mask_batch_head_tiling", "mask_batch_head_tiling",
        "https://github.com/lsdefine/attention-is-all-you-need-keras/issues/36",
        lambda: _HeadsOutside(12, 3), lambda: _HeadsOutsideTiled(12, 3), "check", {"heads": HEADS, "layout": _OUTSIDE},
    ),
    Case(
        "O-047", "mask_batch_head_tiling", "mask_batch_head_tiling", "https://github.com/jchengai/pluto/issues/38",
        lambda: _make_planner("tile"), lambda: _make_planner("repeat"),
        settings={"policy": Policy(empty_row="uniform"), "library": "jax"},
    ),
]  # fmt: skip
