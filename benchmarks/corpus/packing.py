"""Faults of layout, continued: fused projections split in another order, and strides that are ignored."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from attnspec import Heads

from .case import Case
from .textbook import softmax

HEADS = Heads(d_model=12, h=3)


class _ParallelSelfAttention(nn.Module):
    """O-009: weights packed head by head are split into thirds."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def split(self, qkv: Any) -> Any:
        return [x.unflatten(-1, (self.num_heads, -1)) for x in qkv.chunk(3, dim=-1)]

    def forward(self, hidden_states: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in self.split(self.query_key_value(hidden_states)))
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(context.transpose(1, 2).flatten(2))


class _ParallelSelfAttentionByHead(_ParallelSelfAttention):
    def split(self, qkv: Any) -> Any:
        return qkv.unflatten(-1, (self.num_heads, -1)).chunk(3, dim=-1)


class _FusedSequenceFirst(nn.Module):
    """O-010: weights packed in thirds are seen as triples of each head."""

    def __init__(self, embed_dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, embed_dim // heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim).normal_(std=0.1))
        self.out_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim).normal_(std=0.1))

    def slices(self, projected: Any) -> Any:
        seq, batch, _ = projected.shape
        return projected.view(seq, batch * self.heads, 3, self.head_dim).unbind(2)

    def forward(self, inputs: Any) -> Any:
        seq, batch, width = inputs.shape
        q, k, v = (x.transpose(0, 1) for x in self.slices(functional.linear(inputs, self.in_proj_weight)))
        weights = torch.bmm(q, k.transpose(1, 2)).mul(self.head_dim**-0.5).softmax(-1)
        context = torch.bmm(weights, v).transpose(0, 1).reshape(seq, batch, width)
        return functional.linear(context, self.out_proj_weight)


class _FusedSequenceFirstThirds(_FusedSequenceFirst):
    def slices(self, projected: Any) -> Any:
        seq, batch, _ = projected.shape
        return [x.reshape(seq, batch * self.heads, self.head_dim) for x in projected.chunk(3, dim=-1)]


def _with_unit_stride(x: Any) -> Any:
    return x.as_strided(x.shape, (*x.stride()[:-1], 1))


def _kernel_of_unit_stride(q: Any, k: Any, v: Any) -> Any:
    """O-011: a kernel that takes neighbouring channels for neighbours in memory."""
    return functional.scaled_dot_product_attention(*(_with_unit_stride(x) for x in (q, k, v)))


def _kernel_of_any_stride(q: Any, k: Any, v: Any) -> Any:
    return functional.scaled_dot_product_attention(*(_with_unit_stride(x.contiguous()) for x in (q, k, v)))


def _as_it_lies(x: Any) -> Any:
    return np.ravel(x, order="K").reshape(x.shape)


def _kernel_on_memory(q: Any, k: Any, v: Any) -> Any:
    """O-012: a kernel that reads the memory of its arguments from the first number to the last."""
    q, k, v = (_as_it_lies(x) for x in (q, k, v))
    return softmax(np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])) @ v


def _kernel_on_copies(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (_as_it_lies(np.ascontiguousarray(x)) for x in (q, k, v))
    return softmax(np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])) @ v


_THIRDS = {"w_qkv": ("in_proj_weight", "(three h d_k) d_model"), "w_o": ("out_proj_weight", "d_model (h d_v)")}

CASES = [
    Case(
        "O-009", "qkv_pack_order", "qkv_pack_order", "https://github.com/awslabs/slapo/pull/46",
        lambda: _ParallelSelfAttention(12, 3).double(), lambda: _ParallelSelfAttentionByHead(12, 3).double(),
        "check", {"heads": HEADS, "layout": "gpt_neox", "causal": True},
    ),
    Case(
        "O-010", "qkv_pack_order", "qkv_pack_order", "https://github.com/NVIDIA/apex/issues/1131",
        lambda: _FusedSequenceFirst(12, 3).double(), lambda: _FusedSequenceFirstThirds(12, 3).double(),
        "check", {"heads": HEADS, "layout": _THIRDS, "call": lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1)},
    ),
    Case(
        "O-011", "noncontiguous_misread", "noncontiguous_misread", "https://github.com/pytorch/pytorch/pull/187506",
        lambda: _kernel_of_unit_stride, lambda: _kernel_of_any_stride, settings={"library": "torch"},
    ),
    Case(
        "O-012", "noncontiguous_misread", "noncontiguous_misread", "https://github.com/pytorch/pytorch/issues/112577",
        lambda: _kernel_on_memory, lambda: _kernel_on_copies, settings={"library": "numpy"},
    ),
]  # fmt: skip
