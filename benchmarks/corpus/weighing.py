"""Faults of the softmax: over the wrong axis, of capped scores, with the wrong denominator."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from attnspec import Heads

from .case import Case
from .textbook import softmax

HEADS = Heads(d_model=12, h=3)
TILE = 4


class _DiffusionAttention(nn.Module):
    """O-031: the scores have the heads last, and the softmax runs over the queries."""

    def __init__(self, n_channels: int, n_heads: int, *, dim: int) -> None:
        super().__init__()
        self.n_heads, self.dim, self.scale = n_heads, dim, (n_channels // n_heads) ** -0.5
        self.projection = nn.Linear(n_channels, 3 * n_channels)
        self.output = nn.Linear(n_channels, n_channels)

    def forward(self, x: Any) -> Any:
        batch, seq, _ = x.shape
        q, k, v = torch.chunk(self.projection(x).view(batch, seq, self.n_heads, -1), 3, dim=-1)
        attn = (torch.einsum("bihd,bjhd->bijh", q, k) * self.scale).softmax(dim=self.dim)
        return self.output(torch.einsum("bijh,bjhd->bihd", attn, v).reshape(batch, seq, -1))


def _softmax_of_dim_2(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    """O-032: the axis was counted for arrays without heads."""
    output = torch.matmul(query, key.transpose(-1, -2)) / query.size(-1) ** 0.5
    if mask is not None:
        output = output.masked_fill(~mask, torch.finfo(output.dtype).min)
    return torch.matmul(functional.softmax(output, dim=2), value)


def _softmax_of_last_dim(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    output = torch.matmul(query, key.transpose(-1, -2)) / query.size(-1) ** 0.5
    if mask is not None:
        output = output.masked_fill(~mask, torch.finfo(output.dtype).min)
    weights = functional.softmax(output, dim=-1)
    return torch.matmul(weights if mask is None else weights * mask, value)


def _cap_after_mask(q: Any, k: Any, v: Any, *, attn_mask: Any = None, softcap: float | None = None) -> Any:
    """O-033: -inf is capped like any score."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if attn_mask is not None:
        scores = scores + np.where(attn_mask, 0, -np.inf)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    return softmax(scores) @ v


def _cap_before_mask(q: Any, k: Any, v: Any, *, attn_mask: Any = None, softcap: float | None = None) -> Any:
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if attn_mask is not None:
        scores = scores + np.where(attn_mask, 0, -np.inf)
    return softmax(scores) @ v


def _capping_kernel(q: Any, k: Any, v: Any, scale: float, softcap: float, *, causal: bool) -> Any:
    """Attend; a cap of 0 is none."""
    scores = scale * np.einsum("bqhd,bkhd->bhqk", q, k)
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    if causal:
        scores = np.where(np.tri(q.shape[1], k.shape[1], dtype=bool), scores, -np.inf)
    return np.einsum("bhqk,bkhd->bqhd", softmax(scores), v)


def _cap_switched_off(q: Any, k: Any, v: Any, *, causal: bool = False, softcap: float | None = None) -> Any:  # noqa: ARG001
    """O-034: the kernel is told a cap of 0, whatever was asked for."""
    return _capping_kernel(q, k, v, q.shape[-1] ** -0.5, 0.0, causal=causal)


def _cap_handed_over(q: Any, k: Any, v: Any, *, causal: bool = False, softcap: float | None = None) -> Any:
    return _capping_kernel(q, k, v, q.shape[-1] ** -0.5, softcap or 0.0, causal=causal)


def _sink_in_each_score(q: Any, k: Any, v: Any, *, sinks: Any = None) -> Any:
    """O-035: the sink goes into every score, by a hook that sees one score at a time."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if sinks is not None:
        scores = torch.logaddexp(scores, sinks.view(1, -1, 1, 1))
    return scores.softmax(-1) @ v


def _sink_beside_scores(q: Any, k: Any, v: Any, *, sinks: Any = None) -> Any:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1] @ v


def _make_split(log_sum: Any) -> Any:
    """O-036: keys come in two splits; `log_sum` gives the weight of a split, by its maximum, its sum and the scale."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        scale, half = q.shape[-1] ** -0.5, (k.shape[2] + 1) // 2
        outputs, logs = [], []
        for part in (slice(0, half), slice(half, None)):
            scores = scale * (q @ k[:, :, part].swapaxes(2, 3))
            if scores.shape[-1] == 0:
                continue
            peak = scores.max(-1, keepdims=True)
            weights = np.exp(scores - peak)
            total = weights.sum(-1, keepdims=True)
            outputs.append(weights @ v[:, :, part] / total)
            logs.append(log_sum(peak, total, scale))
        whole = np.logaddexp.reduce(logs, axis=0)
        return sum(np.exp(log - whole) * output for log, output in zip(logs, outputs, strict=True))

    return attention


def _make_tiled(tail: float) -> Any:
    """O-037: keys come in tiles, the last one filled up with zeros; `tail` is the score of what was filled up."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        seq, fill = k.shape[2], [(0, 0), (0, 0), (0, -k.shape[2] % TILE), (0, 0)]
        k, v = np.pad(k, fill), np.pad(v, fill)
        peak, total, output = -np.inf, 0.0, 0.0
        for start in range(0, k.shape[2], TILE):
            tile = slice(start, start + TILE)
            scores = q @ k[:, :, tile].swapaxes(2, 3) / np.sqrt(q.shape[-1])
            scores = np.where(np.arange(start, start + TILE) < seq, scores, tail)
            higher = np.maximum(peak, scores.max(-1, keepdims=True))
            weights, shrink = np.exp(scores - higher), np.exp(peak - higher)
            total, output = total * shrink + weights.sum(-1, keepdims=True), output * shrink + weights @ v[:, :, tile]
            peak = higher
        return output / total

    return attention


_DIFFUSION = {
    "w_qkv": ("projection.weight", "(h three d_k) d_model"),
    "b_qkv": ("projection.bias", "(h three d_k)"),
    "w_o": ("output.weight", "d_model (h d_v)"),
    "b_o": ("output.bias", "d_model"),
}

CASES = [
    Case(
        "O-031", "softmax_wrong_axis", "softmax_wrong_axis",
        "https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/146",
        lambda: _DiffusionAttention(12, 3, dim=1).double(), lambda: _DiffusionAttention(12, 3, dim=2).double(),
        "check", {"heads": HEADS, "layout": _DIFFUSION},
    ),
    Case(
        "O-032", "softmax_wrong_axis", "softmax_wrong_axis", "https://github.com/FudanNLP/fastNLP/issues/254",
        lambda: _softmax_of_dim_2, lambda: _softmax_of_last_dim, settings={"library": "torch"},
    ),
    Case(
        "O-033", "softcap_after_mask", "softcap_order_or_missing", "https://github.com/onnx/onnx/issues/7865",
        lambda: _cap_after_mask, lambda: _cap_before_mask, settings={"library": "numpy"},
    ),
    Case(
        "O-034", "softcap_ignored", "softcap_order_or_missing", "https://github.com/vllm-project/vllm-metal/issues/665",
        lambda: _cap_switched_off, lambda: _cap_handed_over, settings={"order": "bshd", "library": "numpy"},
    ),
    Case(
        "O-035", "sink_denominator", "softmax_denominator", "https://github.com/huggingface/transformers/pull/41083",
        lambda: _sink_in_each_score, lambda: _sink_beside_scores, settings={"library": "torch"},
    ),
    Case(
        "O-036", "partial_softmax_merge", "softmax_denominator", "https://github.com/HKUSTDial/flash-sparse-attention/pull/106",
        lambda: _make_split(lambda peak, total, scale: peak * scale + np.log(total)),
        lambda: _make_split(lambda peak, total, _: peak + np.log(total)), settings={"library": "numpy"},
    ),
    Case(
        "O-037", "tile_tail_unmasked", "softmax_denominator", "https://github.com/pytorch/pytorch/issues/196678",
        lambda: _make_tiled(0.0), lambda: _make_tiled(-np.inf), settings={"library": "numpy"},
    ),
]  # fmt: skip
