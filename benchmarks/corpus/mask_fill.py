"""Faults of masks, continued: fills that scores can beat, and masks made wrongly of what was given."""

from typing import Any

import numpy as np
import torch
from torch import nn

from attnspec import Heads, Policy

from .case import Case
from .textbook import masked_softmax, softmax

HEADS = Heads(d_model=12, h=3)
POSITIONS = np.sin(np.arange(64)[:, None] / 10.0 ** np.arange(64))
HALF_MIN = float(np.finfo(np.float16).min)


class _CausalSelfAttention(nn.Module):
    """O-055: a score can lie below the fill."""

    def __init__(self, n_embd: int, n_head: int, fill: float) -> None:
        super().__init__()
        self.n_head, self.fill = n_head, fill
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Any) -> Any:
        batch, seq, width = x.size()
        q, k, v = (y.view(batch, seq, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(width, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(self.bias[:, :, :seq, :seq] == 0, self.fill)
        y = (att.softmax(-1) @ v).transpose(1, 2).contiguous().view(batch, seq, width)
        return self.c_proj(y)


def _fills_added(q: Any, k: Any, v: Any, *, padding: Any = None, causal: bool = False) -> Any:
    """O-056: each mask adds its own fill, and a key that both block lies twice as deep."""
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if padding is not None:
        scores = scores + np.where(padding, 0.0, -10_000.0)[:, None, None, :]
    if causal:
        scores = scores + np.where(np.tri(q.shape[2], k.shape[2], dtype=bool), 0.0, -10_000.0)
    return softmax(scores) @ v


def _masks_joined(q: Any, k: Any, v: Any, *, padding: Any = None, causal: bool = False) -> Any:
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    keep = np.ones((1, 1, 1, k.shape[2]), bool) if padding is None else padding[:, None, None, :]
    if causal:
        keep = keep & np.tri(q.shape[2], k.shape[2], dtype=bool)
    return softmax(np.where(keep, scores, -np.inf)) @ v


def _half_minimum_added(query: Any, key: Any, value: Any, *, mask: Any = None) -> Any:
    """O-057: the smallest half-precision number is added, and what falls below it is raised to it again."""
    scores = torch.baddbmm(query.new_zeros(()), query.flatten(0, 1), key.flatten(0, 1).mT, alpha=query.shape[-1] ** -0.5)
    scores = scores.unflatten(0, query.shape[:2])
    if mask is not None:
        scores = torch.clamp(scores + torch.where(mask, 0.0, HALF_MIN).to(scores.dtype), min=HALF_MIN)
    return scores.softmax(-1) @ value


def _half_minimum_filled(query: Any, key: Any, value: Any, *, mask: Any = None) -> Any:
    scores = torch.baddbmm(query.new_zeros(()), query.flatten(0, 1), key.flatten(0, 1).mT, alpha=query.shape[-1] ** -0.5)
    scores = scores.unflatten(0, query.shape[:2])
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ value


class _EncoderLayerAttention(nn.Module):
    """O-058: outside training, the mask is taken for one that all samples and heads share."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj, self.out_proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def is_fast(self, attn_mask: Any) -> bool:
        return attn_mask is not None and not self.training

    def forward(self, src: Any, attn_mask: Any = None) -> Any:
        batch, seq, _ = src.shape
        q, k, v = self.in_proj(src).view(batch, seq, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if self.is_fast(attn_mask):
            attn_mask = attn_mask.view(1, 1, seq, seq)
        elif attn_mask is not None:
            attn_mask = attn_mask.view(-1, self.num_heads if attn_mask.dim() > 2 else 1, seq, seq)  # noqa: PLR2004
        weights = masked_softmax(q @ k.mT * q.shape[-1] ** -0.5, attn_mask)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class _EncoderLayerAttentionGuarded(_EncoderLayerAttention):
    def is_fast(self, attn_mask: Any) -> bool:
        return super().is_fast(attn_mask) and attn_mask.dim() == 2  # noqa: PLR2004


def _call_encoder_layer(layer: Any, x: Any, keep: Any) -> Any:
    if keep is None:
        return layer(x)
    return layer(x, keep.expand(len(x), layer.num_heads, x.shape[1], x.shape[1]).flatten(0, 1))


class _AutoMasked:
    """O-059: the axes of the automatic mask are counted from the front, and batches may have several axes."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        rng = np.random.default_rng(0)
        self.query, self.key, self.value = rng.normal(size=(3, d_model, num_heads, d_model // num_heads)) / d_model
        self.output = rng.normal(size=(num_heads, d_model // num_heads, d_model)) / d_model

    def make_mask(self, padding: Any) -> Any:
        return padding[:, None, :]

    def __call__(self, inputs: Any, padding: Any = None) -> Any:
        q, k, v = (np.einsum("...tm,mhd->...thd", inputs, kernel) for kernel in (self.query, self.key, self.value))
        scores = np.einsum("...qhd,...khd->...hqk", q, k) / np.sqrt(q.shape[-1])
        if padding is not None:
            scores = np.where(self.make_mask(padding)[..., None, :, :], scores, -np.inf)
        return np.einsum("...hqk,...khd,hdm->...qm", softmax(scores), v, self.output)


class _AutoMaskedFromTheEnd(_AutoMasked):
    def make_mask(self, padding: Any) -> Any:
        return padding[..., None, :]


def _call_with_two_batch_axes(layer: Any, x: Any, padding: Any) -> Any:
    return layer(x[None], None if padding is None else padding[None])[0]


def _sums_of_placed_keys(queries: Any, keys: Any, values: Any) -> Any:
    """O-060: a key whose sum is zero is taken for padding, and when it is looked at, it has got its position already."""
    keys = keys + POSITIONS[: keys.shape[2], : keys.shape[3]]
    real = np.sign(np.abs(keys.sum(-1)))[:, :, None, :]
    scores = queries @ keys.swapaxes(2, 3) / np.sqrt(queries.shape[-1])
    return softmax(np.where(real == 0, -np.inf, scores)) @ values


def _zeros_of_keys(queries: Any, keys: Any, values: Any) -> Any:
    real = np.sign(np.abs(keys).sum(-1))[:, :, None, :]
    keys = keys + POSITIONS[: keys.shape[2], : keys.shape[3]]
    scores = queries @ keys.swapaxes(2, 3) / np.sqrt(queries.shape[-1])
    return softmax(np.where(real == 0, -np.inf, scores)) @ values


def _call_with_zeroed_keys(function: Any, queries: Any, keys: Any, values: Any, padding: Any) -> Any:
    unplaced = keys - POSITIONS[: keys.shape[2], : keys.shape[3]]
    return function(queries, unplaced if padding is None else unplaced * padding[:, None, :, None], values)


_EMBEDDED = {
    "w_qkv": ("c_attn.weight", "(three h d_k) d_model"), "b_qkv": ("c_attn.bias", "(three h d_k)"),
    "w_o": ("c_proj.weight", "d_model (h d_v)"), "b_o": ("c_proj.bias", "d_model"),
}  # fmt: skip
_ENCODER = {
    "w_qkv": ("in_proj.weight", "(three h d_k) d_model"), "b_qkv": ("in_proj.bias", "(three h d_k)"),
    "w_o": ("out_proj.weight", "d_model (h d_v)"), "b_o": ("out_proj.bias", "d_model"),
}  # fmt: skip
_KERNELS = {
    "w_q": ("query", "d_model h d_k"), "w_k": ("key", "d_model h_kv d_k"),
    "w_v": ("value", "d_model h_kv d_v"), "w_o": ("output", "h d_v d_model"),
}  # fmt: skip

CASES = [
    Case(
        "O-055", "mask_finite_fill", "mask_finite_fill", "https://github.com/karpathy/minGPT/issues/75",
        lambda: _CausalSelfAttention(12, 3, -1e4).double(), lambda: _CausalSelfAttention(12, 3, -torch.inf).double(),
        "check", {"heads": HEADS, "layout": _EMBEDDED, "causal": True},
    ),
    Case(
        "O-056", "mask_finite_fill", "mask_finite_fill", "https://github.com/microsoft/onnxruntime/issues/14363",
        lambda: _fills_added, lambda: _masks_joined, settings={"library": "numpy"},
    ),
    Case(
        "O-057", "mask_min_revived", "mask_finite_fill", "https://github.com/huggingface/transformers/pull/18185",
        lambda: _half_minimum_added, lambda: _half_minimum_filled,
        settings={"policy": Policy(empty_row="uniform"), "library": "torch"},
    ),
    Case(
        "O-058", "mask_shape_batched", "mask_construction", "https://github.com/pytorch/pytorch/issues/97409",
        lambda: _EncoderLayerAttention(12, 3).double(), lambda: _EncoderLayerAttentionGuarded(12, 3).double(),
        "check", {"heads": HEADS, "layout": _ENCODER, "call": _call_encoder_layer, "mask_axes": "batch h seq_q seq_k"},
    ),
    Case(
        "O-059", "mask_shape_batched", "mask_construction", "https://github.com/tensorflow/tensorflow/issues/60626",
        lambda: _AutoMasked(12, 3), lambda: _AutoMaskedFromTheEnd(12, 3),
        "check", {"heads": HEADS, "layout": _KERNELS, "call": _call_with_two_batch_axes},
    ),
    Case(
        "O-060", "mask_from_data_zero_test", "mask_construction", "https://github.com/Kyubyong/transformer/pull/69",
        lambda: _sums_of_placed_keys, lambda: _zeros_of_keys, settings={"call": _call_with_zeroed_keys, "library": "numpy"},
    ),
]  # fmt: skip
