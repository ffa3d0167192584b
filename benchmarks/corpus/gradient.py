"""Gradients: lost, or computed on the way back from something else than the way there."""

import math
from functools import partial
from typing import Any

import torch
from torch.autograd import Function

from .case import Case


def _fused_softmax(*, fault: bool) -> Any:
    """O-110: the fused softmax works on plain data, and nothing takes the gradient back."""

    def softmax(scores: Any) -> Any:
        data = scores.detach() if fault else scores
        shares = torch.exp(data - data.amax(-1, keepdim=True))
        return shares / shares.sum(-1, keepdim=True)

    def attention(queries: Any, keys: Any, values: Any) -> Any:
        return softmax(queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])) @ values

    return attention


class _BiasedAttention(Function):
    """O-111: what the way back needs is saved for queries, keys and values alone."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, fault: bool) -> Any:  # noqa: FBT001, PLR0917
        ctx.scale = q.shape[-1] ** -0.5
        scores = q @ k.mT * ctx.scale + bias
        lse = torch.logsumexp(scores, -1, keepdim=True)
        wanted = any(ctx.needs_input_grad[:3] if fault else ctx.needs_input_grad)
        ctx.save_for_backward(q, k, v, bias, lse if wanted else None)
        return torch.exp(scores - lse) @ v

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, bias, lse = ctx.saved_tensors
        p = torch.exp(q @ k.mT * ctx.scale + bias - lse)
        dp = grads[0] @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        return ds @ k * ctx.scale, ds.mT @ q * ctx.scale, p.mT @ grads[0], ds.sum_to_size(bias.shape), None


def _bias_gradient(*, fault: bool) -> Any:
    def attention(queries: Any, keys: Any, values: Any, *, bias: Any = None) -> Any:
        return _BiasedAttention.apply(queries, keys, values, queries.new_zeros(1, 1, 1, 1) if bias is None else bias, fault)

    return attention


class _GroupedAttention(Function):
    """O-112: of the query heads that share a key head, the last one's gradient stays."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, fault: bool) -> Any:  # noqa: FBT001
        group = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1])
        weights = scores.softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.group, ctx.fault = group, fault
        return weights @ v.repeat_interleave(group, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, weights = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for head in range(q.shape[1]):
            shared = head // ctx.group
            p, dy = weights[:, head], grads[0][:, head]
            dp = dy @ v[:, shared].mT
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
            dq[:, head] = ds @ k[:, shared]
            if ctx.fault:
                dk[:, shared], dv[:, shared] = ds.mT @ q[:, head], p.mT @ dy
            else:
                dk[:, shared] += ds.mT @ q[:, head]
                dv[:, shared] += p.mT @ dy
        return dq, dk, dv, None


class _TiledAttention(Function):
    """O-113: with causality, the rows of dQ behind the last tile of keys are never written."""

    TILE = 2

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, causal: bool, fault: bool) -> Any:  # noqa: FBT001, PLR0917
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        weights = scores.softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.rows = k.shape[2] if causal and fault else q.shape[2]
        return weights @ v

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, weights = ctx.saved_tensors
        dp = grads[0] @ v.mT
        ds = weights * (dp - (weights * dp).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        dq = torch.full_like(q, math.nan)  # memory that is not written holds anything
        for first in range(0, ctx.rows, _TiledAttention.TILE):
            tile = slice(first, first + _TiledAttention.TILE)
            dq[:, :, tile] = ds[:, :, tile] @ k
        return dq, ds.mT @ q, weights.mT @ grads[0], None, None


class _ByHand(Function):
    """O-114: the way back through the softmax lacks the sum over the row."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, scale: float, fault: bool) -> Any:  # noqa: FBT001, PLR0917
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * scale, -1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale, ctx.fault = scale, fault
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, p = ctx.saved_tensors
        dv = torch.einsum("bhij,bhid->bhjd", p, grads[0])
        dp = torch.einsum("bhid,bhjd->bhij", grads[0], v)
        ds = ctx.scale * p * (dp if ctx.fault else dp - (p * dp).sum(-1, keepdim=True))
        return torch.einsum("bhij,bhjd->bhid", ds, k), torch.einsum("bhij,bhid->bhjd", ds, q), dv, None, None


class _Recomputed(Function):
    """O-115: the weights are computed again on the way back, with the default scale."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, scale: float, fault: bool) -> Any:  # noqa: FBT001, PLR0917
        ctx.save_for_backward(q, k, v)
        ctx.scale = 1 / math.sqrt(q.shape[-1]) if fault else scale
        return torch.softmax(q @ k.mT * scale, -1) @ v

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v = ctx.saved_tensors
        p = torch.softmax(q @ k.mT * ctx.scale, -1)
        dp = grads[0] @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * ctx.scale
        return ds @ k, ds.mT @ q, p.mT @ grads[0], None, None


def _scaled(function: type[Function], *, fault: bool) -> Any:
    def attention(queries: Any, keys: Any, values: Any, *, scale: Any = None) -> Any:
        return function.apply(queries, keys, values, queries.shape[-1] ** -0.5 if scale is None else scale, fault)

    return attention


class _SavedTransposed(Function):
    """O-116: keys and values are saved with their axes swapped already, and swapped again on the way back."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, fault: bool) -> Any:  # noqa: FBT001
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        ctx.save_for_backward(query, k, v)
        ctx.fault = fault
        return ((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, k, v = ctx.saved_tensors
        q, dy = query.transpose(1, 2), grads[0].transpose(1, 2)
        if ctx.fault:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        p = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        dp = dy @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return (ds @ k).transpose(1, 2), (ds.mT @ q).transpose(1, 2), (p.mT @ dy).transpose(1, 2), None


def _grouped(*, fault: bool) -> Any:
    return lambda queries, keys, values: _GroupedAttention.apply(queries, keys, values, fault)


def _tiled(*, fault: bool) -> Any:
    return lambda queries, keys, values, causal=False: _TiledAttention.apply(queries, keys, values, causal, fault)


def _saved(*, fault: bool) -> Any:
    return lambda query, key, value: _SavedTransposed.apply(query, key, value, fault)


CASES = [
    Case(
        "O-110", "gradient_dropped", "gradient_missing", "https://github.com/huggingface/candle/pull/3724",
        partial(_fused_softmax, fault=True), partial(_fused_softmax, fault=False), settings={"library": "torch"},
    ),
    Case(
        "O-111", "gradient_dropped", "gradient_missing", "https://github.com/pytorch/pytorch/pull/188302",
        partial(_bias_gradient, fault=True), partial(_bias_gradient, fault=False), settings={"library": "torch"},
    ),
    Case(
        "O-112", "gqa_backward_reduce", "gradient_wrong", "https://github.com/marin-community/levanter/pull/449",
        partial(_grouped, fault=True), partial(_grouped, fault=False), settings={"options": ("grouped",), "library": "torch"},
    ),
    Case(
        "O-113", "gradient_wrong", "gradient_wrong", "https://github.com/Dao-AILab/flash-attention/issues/443",
        partial(_tiled, fault=True), partial(_tiled, fault=False), settings={"library": "torch"},
    ),
    Case(
        "O-114", "gradient_wrong", "gradient_wrong", "https://github.com/ooples/AiDotNet.Tensors/issues/49",
        partial(_scaled, _ByHand, fault=True), partial(_scaled, _ByHand, fault=False), settings={"library": "torch"},
    ),
    Case(
        "O-115", "gradient_scale_mismatch", "gradient_wrong", "https://github.com/tenstorrent/tt-metal/issues/53207",
        partial(_scaled, _Recomputed, fault=True), partial(_scaled, _Recomputed, fault=False), settings={"library": "torch"},
    ),
    Case(
        "O-116", "backward_layout", "gradient_wrong", "https://github.com/huggingface/diffusers/pull/14341",
        partial(_saved, fault=True), partial(_saved, fault=False), settings={"order": "bshd", "library": "torch"},
    ),
]  # fmt: skip
