"""Dropout: on where it should be off, off where it should be on, in the wrong place, or wrong on the way back."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from attnspec import Heads

from .case import Case
from .textbook import softmax

_RATE = 0.4


class _VisionAttention(nn.Module):
    """O-101: the fused function is given the rate without asking whether this is training."""

    def __init__(self, *, fault: bool, dim: int = 12, num_heads: int = 3) -> None:
        super().__init__()
        self.fault, self.num_heads = fault, num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = nn.Dropout(_RATE)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Any) -> Any:
        batch, seq, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, seq, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        rate = self.attn_drop.p if self.fault or self.training else 0.0
        x = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return self.proj(x.transpose(1, 2).reshape(batch, seq, dim))


class _SpeechAttention(nn.Module):
    """O-102: the fused branch drops in evaluation, the manual one does not."""

    def __init__(self, *, fault: bool, size: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.fault, self.h = fault, heads
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(size, size) for _ in range(4))
        self.dropout_rate = _RATE
        self.dropout = nn.Dropout(_RATE)

    def forward(self, query: Any, key: Any, value: Any, *, return_weights: bool = False) -> Any:
        q, k, v = (
            linear(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
            for linear, x in ((self.linear_q, query), (self.linear_k, key), (self.linear_v, value))
        )
        if not return_weights:
            rate = self.dropout_rate if self.fault or self.training else 0.0
            found = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate)
            return self.linear_out(found.transpose(1, 2).flatten(2))
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        found = self.dropout(weights) @ v
        return self.linear_out(found.transpose(1, 2).flatten(2)), weights


def _on_the_sphere(*, fault: bool) -> Any:
    """O-103: two branches, one for each kind of scale, and neither asks whether this is training."""

    def attention(queries: Any, keys: Any, values: Any, *, scale: Any = None, training: bool = False) -> Any:
        rate = _RATE if fault or training else 0.0
        if scale is None:
            return functional.scaled_dot_product_attention(queries, keys, values, dropout_p=rate)
        queries = queries * torch.as_tensor(scale, dtype=queries.dtype)
        return functional.scaled_dot_product_attention(queries, keys, values, dropout_p=rate, scale=1.0)

    return attention


def _stream_kernel(queries: Any, keys: Any, values: Any, *, rate: float = 0.0, survivors: Any = None) -> Any:
    scores = np.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
    weights = softmax(np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf))
    if survivors is not None:
        weights = weights * survivors / (1 - rate)
    return np.einsum("bhij,bhjd->bhid", weights, values)


class _StreamAttention:
    """O-104: the wrapper stores the rate, and that is all."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.rate = 0.0

    def __call__(self, queries: Any, keys: Any, values: Any, *, dropout: float = 0.0, survivors: Any = None) -> Any:
        self.rate = dropout
        if self.fault:
            return _stream_kernel(queries, keys, values)
        return _stream_kernel(queries, keys, values, rate=self.rate, survivors=survivors)


class _DroppedSoftmax(torch.autograd.Function):
    """Softmax, dropout and the product with the values, with a way back written by hand."""

    @staticmethod
    def forward(ctx: Any, scores: Any, values: Any, survivors: Any, rate: float, fault: bool) -> Any:  # noqa: FBT001, PLR0917
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights, values, survivors)
        ctx.rate, ctx.fault = rate, fault
        return (weights * survivors / (1 - rate)) @ values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weights, values, survivors = ctx.saved_tensors
        factor = survivors.to(weights.dtype) / (1 - ctx.rate)
        d_values = (weights * factor).transpose(-2, -1) @ grads[0]
        d_weights = grads[0] @ values.transpose(-2, -1) * (survivors * ctx.rate if ctx.fault else factor)
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        return d_scores, d_values, None, None, None


def _fast_self_attention(*, fault: bool) -> Any:
    """O-105: on the way back, what survived is multiplied by the rate."""

    def attention(queries: Any, keys: Any, values: Any, *, dropout: float = 0.0, survivors: Any = None) -> Any:
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
        if survivors is None:
            return scores.softmax(-1) @ values
        return _DroppedSoftmax.apply(scores, values, survivors, dropout, fault)

    return attention


def _dropped_features(*, fault: bool) -> Any:
    """O-106: features of the result are dropped, not weights."""

    def attention(queries: Any, keys: Any, values: Any, *, dropout: float = 0.0, survivors: Any = None) -> Any:
        weights = (queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])).softmax(-1)
        if survivors is None:
            return weights @ values
        if not fault:
            return (weights * survivors / (1 - dropout)) @ values
        found = weights @ values
        feature = torch.arange(found.shape[-1]) % survivors.shape[-1]  # there is a flag for each key: features take them in turn
        return found * survivors[..., feature] / (1 - dropout)

    return attention


_TIMM = {
    "w_qkv": ("qkv.weight", "(three h d_k) d_model"),
    "b_qkv": ("qkv.bias", "(three h d_k)"),
    "w_o": ("proj.weight", "d_model (h d_v)"),
    "b_o": ("proj.bias", "d_model"),
}
_WENET = {
    **{f"w_{role}": (f"linear_{role}.weight", "(h d_k) d_model") for role in "qkv"},
    **{f"b_{role}": (f"linear_{role}.bias", "(h d_k)") for role in "qkv"},
    "w_o": ("linear_out.weight", "d_model (h d_v)"),
    "b_o": ("linear_out.bias", "d_model"),
}

CASES = [
    Case(
        "O-101", "dropout_in_eval", "dropout_mode", "https://github.com/huggingface/pytorch-image-models/pull/1978",
        lambda: _VisionAttention(fault=True).double().eval(), lambda: _VisionAttention(fault=False).double().eval(),
        "check", {"heads": Heads(d_model=12, h=3), "layout": _TIMM},
    ),
    Case(
        "O-102", "dropout_in_eval", "dropout_mode", "https://github.com/wenet-e2e/wenet/issues/2699",
        lambda: _SpeechAttention(fault=True).double().eval(), lambda: _SpeechAttention(fault=False).double().eval(),
        "check", {"heads": Heads(d_model=12, h=2), "layout": _WENET},
    ),
    Case(
        "O-103", "dropout_in_eval", "dropout_mode", "https://github.com/NVIDIA/torch-harmonics/pull/221",
        partial(_on_the_sphere, fault=True), partial(_on_the_sphere, fault=False), settings={"library": "torch"},
    ),
    Case(
        "O-104", "dropout_never_applied", "dropout_mode", "https://github.com/MagellaX/StreamAttn/pull/28",
        partial(_StreamAttention, fault=True), partial(_StreamAttention, fault=False), settings={"causal": True, "library": "numpy"},
    ),
    Case(
        "O-105", "dropout_backward_scale", "dropout_arithmetic", "https://github.com/NVIDIA/apex/pull/816",
        partial(_fast_self_attention, fault=True), partial(_fast_self_attention, fault=False), settings={"library": "torch"},
    ),
    Case(
        "O-106", "dropout_wrong_place", "dropout_arithmetic", "https://github.com/nikhilbarhate99/min-decision-transformer/issues/2",
        partial(_dropped_features, fault=True), partial(_dropped_features, fault=False), settings={"library": "torch"},
    ),
]  # fmt: skip
