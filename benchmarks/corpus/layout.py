"""Faults of layout: heads split or merged wrongly, and axes taken for one another."""

from typing import Any

import numpy as np
import torch
from torch import nn

from attnspec import Heads

from .case import Case
from .textbook import masked_softmax, softmax

HEADS = Heads(d_model=12, h=3)


class _InteractingFields(nn.Module):
    """O-001: the projected rows are cut into heads in one view."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, d_model // heads
        self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.w_res = nn.Linear(d_model, d_model)

    def split(self, x: Any) -> Any:
        return x.view(len(x) * self.heads, -1, self.width)

    def merge(self, x: Any, batch: int) -> Any:
        return x.view(batch, -1, self.heads * self.width)

    def forward(self, x: Any) -> Any:
        queries, keys, values = (self.split(project(x)) for project in (self.w_q, self.w_k, self.w_v))
        weights = (torch.bmm(queries, keys.transpose(1, 2)) / self.width**0.5).softmax(-1)
        return self.w_res(self.merge(torch.bmm(weights, values), len(x)))


class _InteractingFieldsSwapped(_InteractingFields):
    def split(self, x: Any) -> Any:
        return x.view(len(x), -1, self.heads, self.width).transpose(1, 2).flatten(0, 1)

    def merge(self, x: Any, batch: int) -> Any:
        return x.view(batch, self.heads, -1, self.width).transpose(1, 2).flatten(2)


class _SelfAttentionFromScratch(nn.Module):
    """O-002: the heads are joined without moving their axis beside the channels."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.qkv_dim = heads, hidden // heads
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        batch, length, hidden = x.shape
        qkv = self.qkv_proj(x).reshape(batch, length, self.num_heads, 3 * self.qkv_dim).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / self.qkv_dim**0.5, dim=-1)
        return self.o_proj(self.join(weights @ v, (batch, length, hidden)))

    def join(self, values: Any, shape: tuple[int, int, int]) -> Any:
        return values.reshape(shape)


class _SelfAttentionFromScratchJoined(_SelfAttentionFromScratch):
    def join(self, values: Any, shape: tuple[int, int, int]) -> Any:
        return values.transpose(1, 2).reshape(shape)


def _flattened(q: Any, k: Any, v: Any) -> tuple[Any, tuple[int, int, int, int]]:
    """O-003: attend with batch and heads on one axis, the batch outside."""
    (batch, seq, heads, _), width = q.shape, v.shape[-1]
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(batch * heads, x.shape[1], -1) for x in (q, k, v))
    weights = softmax(np.matmul(q, k.swapaxes(1, 2)) / np.sqrt(q.shape[-1]))
    return np.matmul(weights, v), (batch, heads, seq, width)


def _unflatten_heads_first(q: Any, k: Any, v: Any) -> Any:
    found, (batch, heads, seq, width) = _flattened(q, k, v)
    return found.reshape(heads, batch, seq, width).transpose(1, 2, 0, 3)


def _unflatten_batch_first(q: Any, k: Any, v: Any) -> Any:
    found, (batch, heads, seq, width) = _flattened(q, k, v)
    return found.reshape(batch, heads, seq, width).transpose(0, 2, 1, 3)


class _WindowAttention(nn.Module):
    """O-004: the windows are the batch, and stand first."""

    def __init__(self, channels: int, heads: int, *, batch_first: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(channels, heads, batch_first=batch_first)

    def forward(self, x: Any) -> Any:
        return self.attn(x, x, x, need_weights=False)[0]


def _documented_formula(query: Any, key: Any, value: Any) -> Any:
    """O-005: the formula of a docstring, on arrays that have the heads behind the sequence."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    return scores.softmax(-1) @ value


def _documented_formula_swapped(query: Any, key: Any, value: Any) -> Any:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def _kernel_bshd(q: Any, k: Any, v: Any) -> Any:
    """O-006: a kernel that reads the length from axis 1."""
    seq, width = q.shape[1], q.shape[3]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * width**-0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)[:, :seq]


def _adapted_by_swapping(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.permute(0, 2, 1, 3).contiguous() for x in (q, k, v))
    return _kernel_bshd(q, k, v).permute(0, 2, 1, 3)


def _adapted_in_memory(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in (q, k, v))
    return _kernel_bshd(q, k, v)


class _VisionBlockAttention(nn.Module):
    """O-007: the number of heads only appears in the scale."""

    def __init__(self, emb_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (emb_size // num_heads) ** -0.5
        self.qkv = nn.Linear(emb_size, 3 * emb_size)
        self.projection = nn.Linear(emb_size, emb_size)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.projection(self.attend(q, k, v))

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        energy = torch.einsum("bqd,bkd->bqk", q, k) * self.scale
        return torch.einsum("bqk,bkd->bqd", energy.softmax(-1), v)


class _VisionBlockAttentionSplit(_VisionBlockAttention):
    def attend(self, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in (q, k, v))
        energy = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        return torch.einsum("bhqk,bkhd->bqhd", energy.softmax(-1), v).flatten(2)


def _map_over_heads_and_keys(q: Any, k: Any, v: Any, *, padding: Any = None) -> Any:
    """O-008: one softmax over heads and keys together."""
    scores = torch.einsum("bqnc,bknc->bqnk", q * q.shape[-1] ** -0.5, k)
    keep = None if padding is None else padding[:, None, None, :].expand_as(scores).flatten(2)
    weights = masked_softmax(scores.flatten(2), keep).view_as(scores)
    return torch.einsum("bqnk,bknc->bqnc", weights, v)


def _map_over_keys(q: Any, k: Any, v: Any, *, padding: Any = None) -> Any:
    scores = torch.einsum("bqnc,bknc->bqnk", q * q.shape[-1] ** -0.5, k)
    weights = masked_softmax(scores, None if padding is None else padding[:, None, None, :])
    return torch.einsum("bqnk,bknc->bqnc", weights, v)


_FIELDS = {
    "w_q": ("w_q.weight", "(h d_k) d_model"),
    "w_k": ("w_k.weight", "(h_kv d_k) d_key_in"),
    "w_v": ("w_v.weight", "(h_kv d_v) d_value_in"),
    "w_o": ("w_res.weight", "d_model (h d_v)"),
    "b_o": ("w_res.bias", "d_model"),
}
_FROM_SCRATCH = {"w_qkv": ("qkv_proj.weight", "(h three d_k) d_model"), "w_o": ("o_proj.weight", "d_model (h d_v)")}
_WINDOWS = {
    "w_qkv": ("attn.in_proj_weight", "(three h d_k) d_model"),
    "b_qkv": ("attn.in_proj_bias", "(three h d_k)"),
    "w_o": ("attn.out_proj.weight", "d_model (h d_v)"),
    "b_o": ("attn.out_proj.bias", "d_model"),
}
_BLOCK = {
    "w_qkv": ("qkv.weight", "(three h d_k) d_model"),
    "b_qkv": ("qkv.bias", "(three h d_k)"),
    "w_o": ("projection.weight", "d_model (h d_v)"),
    "b_o": ("projection.bias", "d_model"),
}

CASES = [
    Case(
        "O-001", "head_split_no_transpose", "head_split_merge_order", "https://github.com/reczoo/FuxiCTR/issues/30",
        lambda: _InteractingFields(12, 3).double(), lambda: _InteractingFieldsSwapped(12, 3).double(),
        "check", {"heads": HEADS, "layout": _FIELDS},
    ),
    Case(
        "O-002", "head_merge_no_transpose", "head_split_merge_order", "https://github.com/jsbaan/transformer-from-scratch/pull/6",
        lambda: _SelfAttentionFromScratch(12, 3).double(), lambda: _SelfAttentionFromScratchJoined(12, 3).double(),
        "check", {"heads": HEADS, "layout": _FROM_SCRATCH},
    ),
    Case(
        "O-003", "batch_head_order_swap", "batch_axis_mixup",
        "https://github.com/gazelle93/Transformer-Various-Positional-Encoding/issues/1",
        lambda: _unflatten_heads_first, lambda: _unflatten_batch_first, settings={"order": "bshd", "library": "numpy"},
    ),
    Case(
        "O-004", "batch_seq_axis_swap", "batch_axis_mixup", "https://github.com/aipixel/AEMatter/issues/3",
        lambda: _WindowAttention(12, 3, batch_first=False).double(), lambda: _WindowAttention(12, 3, batch_first=True).double(),
        "check", {"heads": HEADS, "layout": _WINDOWS},
    ),
    Case(
        "O-005", "bhsd_bshd_confusion", "head_seq_axis_swap", "https://github.com/facebookresearch/xformers/issues/922",
        lambda: _documented_formula, lambda: _documented_formula_swapped, settings={"order": "bshd", "library": "torch"},
    ),
    Case(
        "O-006", "bhsd_bshd_confusion", "head_seq_axis_swap", "https://github.com/AMD-AGI/Primus-Turbo/pull/304",
        lambda: _adapted_by_swapping, lambda: _adapted_in_memory, settings={"order": "bshd", "library": "torch"},
    ),
    Case(
        "O-007", "heads_not_split", "heads_not_separated", "https://github.com/kornia/kornia/issues/2186",
        lambda: _VisionBlockAttention(12, 3).double(), lambda: _VisionBlockAttentionSplit(12, 3).double(),
        "check", {"heads": HEADS, "layout": _BLOCK},
    ),
    Case(
        "O-008", "softmax_joint_axis", "heads_not_separated", "https://github.com/facebookresearch/detr/issues/247",
        lambda: _map_over_heads_and_keys, lambda: _map_over_keys, settings={"order": "bshd", "library": "torch"},
    ),
]  # fmt: skip
