"""Heads: a mask of another module's heads, and heads that are gone but still counted."""

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from attnspec import Heads

from .case import Case


def _cross_attention(*, fault: bool) -> Any:
    """O-122: cross-attention takes the head mask of the encoder."""

    def attention(queries: Any, keys: Any, values: Any, *, head_mask: Any = None, cross_attn_head_mask: Any = None) -> Any:
        weights = (queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])).softmax(-1)
        mask = head_mask if fault else cross_attn_head_mask
        if mask is not None:
            weights = weights * mask[None, :, None, None]
        return weights @ values

    return attention


class _PrunedAttention(nn.Module):
    """O-123: pruning takes the heads' weights away and leaves their number; the rest is cut at the wrong places."""

    def __init__(self, *, fault: bool, hidden: int = 18, heads: int = 3) -> None:
        super().__init__()
        self.fault, self.num_heads, self.head_size = fault, heads, hidden // heads
        self.query, self.key, self.value, self.dense = (nn.Linear(hidden, hidden) for _ in range(4))

    def prune_heads(self, gone: list[int]) -> "_PrunedAttention":
        """Take heads away."""
        stay = torch.arange(self.num_heads * self.head_size).view(self.num_heads, -1)
        stay = stay[[head for head in range(self.num_heads) if head not in gone]].flatten()
        for linear in (self.query, self.key, self.value):
            linear.weight, linear.bias = nn.Parameter(linear.weight[stay].detach()), nn.Parameter(linear.bias[stay].detach())
        self.dense.weight = nn.Parameter(self.dense.weight[:, stay].detach())
        if not self.fault:
            self.num_heads -= len(gone)
        return self

    def forward(self, x: Any) -> Any:
        q, k, v = (linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.dense(y.transpose(1, 2).flatten(2))


_BERT = {
    **{f"w_{role[0]}": (f"{role}.weight", "(h d_k) d_model") for role in ("query", "key", "value")},
    **{f"b_{role[0]}": (f"{role}.bias", "(h d_k)") for role in ("query", "key", "value")},
    "w_o": ("dense.weight", "d_model (h d_v)"),
    "b_o": ("dense.bias", "d_model"),
}

CASES = [
    Case(
        "O-122", "head_mask_wrong_stream", "head_mask_prune", "https://github.com/huggingface/transformers/issues/10540",
        partial(_cross_attention, fault=True), partial(_cross_attention, fault=False),
        settings={
            "call": lambda f, q, k, v, gates: f(
                q, k, v, head_mask=None if gates is None else gates.flip(0), cross_attn_head_mask=gates
            ),
            "library": "torch",
        },
    ),
    Case(
        "O-123", "head_prune_stale", "head_mask_prune", "https://github.com/intel/neural-compressor/issues/525",
        lambda: _PrunedAttention(fault=True).double().prune_heads([0]), lambda: _PrunedAttention(fault=False).double().prune_heads([0]),
        "check", {"heads": Heads(d_model=18, h=2, d_k=6), "layout": _BERT},
    ),
]  # fmt: skip
