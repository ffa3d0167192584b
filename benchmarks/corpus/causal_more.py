"""Causality: anchored at the wrong corner behind a cache, lost or forced on one path, transposed."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional

from attnspec import Heads

from .case import Case
from .textbook import softmax


class _FusedDecoder:
    """O-063: the fused kernel, whose causal rule starts at the top left, is called with it for a single token too."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.keys: Any = None
        self.values: Any = None

    def __call__(self, queries: Any, keys: Any, values: Any) -> Any:
        if self.keys is not None:
            keys, values = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)
        self.keys, self.values = keys, values
        new, total = queries.shape[2], keys.shape[2]
        if 1 < new < total:
            mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
            return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=self.fault or new > 1)


def _attend_by_lengths(queries: Any, keys: Any, values: Any, lengths_q: Any, lengths_k: Any) -> Any:
    out = np.zeros((*queries.shape[:3], values.shape[-1]), queries.dtype)
    for sample, (rows, columns) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        scores = np.einsum("ihd,jhd->hij", queries[sample, :rows], keys[sample, :columns]) / math.sqrt(queries.shape[-1])
        scores = np.where(np.tri(rows, columns, columns - rows, dtype=bool), scores, -np.inf)
        out[sample, :rows] = np.einsum("hij,jhd->ihd", softmax(scores), values[sample, :columns])
    return out


class _LengthsDecoder:
    """O-064: the lengths of the keys are taken from the new tokens."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.past: Any = None

    def __call__(self, queries: Any, keys: Any, values: Any) -> Any:
        if self.past is not None:
            keys, values = (np.concatenate(pair, axis=1) for pair in zip(self.past, (keys, values), strict=True))
        self.past = keys, values
        batch, new = queries.shape[:2]
        lengths_q = np.full(batch, new)
        lengths_k = lengths_q if self.fault else np.full(batch, keys.shape[1])
        return _attend_by_lengths(queries, keys, values, lengths_q, lengths_k)


def _flash_causal(*, fault: bool) -> Any:
    """O-065: the last query stands beside the last key, so that the first ones see nothing where queries outnumber keys."""

    def attention(queries: Any, keys: Any, values: Any, *, causal: bool = False) -> Any:
        scores = queries @ np.swapaxes(keys, -1, -2) / np.sqrt(queries.shape[-1])
        rows, columns = scores.shape[-2:]
        if causal:
            scores = np.where(np.tri(rows, columns, columns - rows if fault else 0, dtype=bool), scores, -np.inf)
        return softmax(scores) @ values

    return attention


def _attend_with_past(q: Any, k: Any, v: Any, past_key: Any, past_value: Any, *, fault: bool) -> Any:
    """O-066: the triangle over past and new keys does not leave the past visible."""
    present_key, present_value = np.concatenate((past_key, k), axis=2), np.concatenate((past_value, v), axis=2)
    past, new, total = past_key.shape[2], q.shape[2], present_key.shape[2]
    bias = np.where(np.tril(np.ones((new, total)), k=0 if fault else past) == 0, -np.inf, 0.0)
    scores = q @ present_key.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1]) + bias
    return softmax(scores) @ present_value, present_key, present_value


def _make_decoder_with_past(*, fault: bool) -> Any:
    past: list[Any] = []

    def step(q: Any, k: Any, v: Any) -> Any:
        past_key, past_value = past or (k[:, :, :0], v[:, :, :0])
        y, *past[:] = _attend_with_past(q, k, v, past_key, past_value, fault=fault)
        return y

    return step


def _need_weights(*, fault: bool) -> Any:
    """O-067: the branch that returns the weights knows only of `attn_mask`."""

    def attention(query: Any, key: Any, value: Any, *, attn_mask: Any = None, is_causal: bool = False, need_weights: bool = False) -> Any:
        if not need_weights:
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        if is_causal and not fault:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        weights = scores.softmax(dim=-1)
        return weights @ value, weights

    return attention


def _causal_inside_mask(*, fault: bool) -> Any:
    """O-068: causality is applied only where there is a mask to combine it with."""

    def attention(queries: Any, keys: Any, values: Any, *, keep: Any = None, causal: bool = False) -> Any:
        scores = jnp.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
        kept = jnp.ones(scores.shape, bool)
        if keep is not None:
            kept &= keep
        if causal and not (fault and keep is None):
            kept &= jnp.tri(*scores.shape[-2:], dtype=bool)
        scores = jnp.where(kept, scores, jnp.finfo(scores.dtype).min)
        weights = jnp.where(kept, jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
        total = weights.sum(-1, keepdims=True)
        return jnp.einsum("bhij,bhjd->bhid", weights / jnp.where(total == 0, 1, total), values)

    return attention


@dataclass(frozen=True)
class _AttentionMask:
    rows: int
    columns: int
    is_causal: bool = False

    def crop(self, rows: int, columns: int, *, fault: bool) -> "_AttentionMask":
        """O-069: what is cropped forgets that it is causal."""
        return _AttentionMask(rows, columns) if fault else replace(self, rows=rows, columns=columns)


def _cropped_mask(*, fault: bool) -> Any:
    def attention(queries: Any, keys: Any, values: Any, *, causal: bool = False) -> Any:
        rows, columns = queries.shape[2], keys.shape[2]
        mask = _AttentionMask(max(rows, columns), max(rows, columns), is_causal=causal)
        if (mask.rows, mask.columns) != (rows, columns):
            mask = mask.crop(rows, columns, fault=fault)
        scores = torch.einsum("bhid,bhjd->bhij", queries, keys) * queries.shape[-1] ** -0.5
        if mask.is_causal:
            scores = scores + torch.full_like(scores[0, 0], -math.inf).triu(1)
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), values)

    return attention


class _CausalSelfAttention(torch.nn.Module):
    """O-070: trained to predict the next token, and sees it."""

    def __init__(self, *, fault: bool, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.fault, self.heads = fault, heads
        self.c_attn = torch.nn.Linear(width, 3 * width)
        self.c_proj = torch.nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        batch, seq, width = x.shape
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.c_attn(x).split(width, dim=2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        if not self.fault:
            scores = scores.masked_fill(torch.ones(seq, seq, dtype=torch.bool).triu(1), -math.inf)
        y = functional.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(batch, seq, width))


def _padding_forces_causal(*, fault: bool) -> Any:
    """O-071: a mask made of padding always gets the triangle too."""

    def attention(queries: Any, keys: Any, values: Any, *, padding: Any = None, causal: bool = False) -> Any:
        triangle = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).tril()
        mask = triangle if causal else None
        if padding is not None:
            mask = padding[:, None, None, :].expand(-1, 1, *triangle.shape)
            if causal or fault:
                mask = mask & triangle
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

    return attention


class _KVCache:
    def __init__(self) -> None:
        self.kv: tuple[Any, Any] | None = None

    def update(self, k: Any, v: Any) -> tuple[Any, Any]:
        """Append new tokens and return all."""
        self.kv = (k, v) if self.kv is None else (torch.cat([self.kv[0], k], dim=2), torch.cat([self.kv[1], v], dim=2))
        return self.kv


def _attend_with_cache(q: Any, k: Any, v: Any, kv_cache: _KVCache | None = None, *, fault: bool) -> Any:
    """O-072: with a cache attached, no mask."""
    new = k.shape[2]
    if kv_cache is not None:
        k, v = kv_cache.update(k, v)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if kv_cache is None or not fault:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - new), -math.inf)
    return scores.softmax(-1) @ v


def _generate(*, fault: bool) -> Any:
    cache = _KVCache()
    return lambda q, k, v: _attend_with_cache(q, k, v, cache, fault=fault)


class _LookAheadAttention(torch.nn.Module):
    """O-073: the mask against looking ahead lets a token look ahead alone."""

    def __init__(self, *, fault: bool, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.fault, self.heads = fault, heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (torch.nn.Linear(width, width) for _ in range(4))

    def _mask(self, x: Any) -> Any:
        size = x.shape[1]
        mask = torch.triu(torch.ones(size, size)) == 1
        if not self.fault:
            mask = mask.transpose(0, 1)
        return mask.to(x.dtype).masked_fill(mask == 0, -math.inf).masked_fill(mask == 1, 0.0)

    def forward(self, x: Any) -> Any:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1]) + self._mask(x)
        return self.out_proj(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2))


_GPT2 = {
    "w_qkv": ("c_attn.weight", "(three h d_k) d_model"),
    "b_qkv": ("c_attn.bias", "(three h d_k)"),
    "w_o": ("c_proj.weight", "d_model (h d_v)"),
    "b_o": ("c_proj.bias", "d_model"),
}
_SEPARATE = {
    **{f"w_{role}": (f"{role}_proj.weight", "(h d_k) d_model") for role in "qkv"},
    **{f"b_{role}": (f"{role}_proj.bias", "(h d_k)") for role in "qkv"},
    "w_o": ("out_proj.weight", "d_model (h d_v)"),
    "b_o": ("out_proj.bias", "d_model"),
}

CASES = [
    Case(
        "O-063", "causal_alignment", "causal_alignment", "https://github.com/EleutherAI/gpt-neox/pull/1178",
        lambda: partial(_FusedDecoder, fault=True), lambda: partial(_FusedDecoder, fault=False), "check_cache", {"library": "torch"},
    ),
    Case(
        "O-064", "causal_alignment", "causal_alignment", "https://github.com/NVIDIA/TransformerEngine/pull/399",
        lambda: partial(_LengthsDecoder, fault=True), lambda: partial(_LengthsDecoder, fault=False),
        "check_cache", {"order": "bshd", "library": "numpy"},
    ),
    Case(
        "O-065", "causal_alignment", "causal_alignment", "https://github.com/Dao-AILab/flash-attention/issues/1778",
        partial(_flash_causal, fault=True), partial(_flash_causal, fault=False), settings={"library": "numpy"},
    ),
    Case(
        "O-066", "causal_alignment", "causal_alignment", "https://github.com/onnx/onnx/pull/7297",
        lambda: partial(_make_decoder_with_past, fault=True), lambda: partial(_make_decoder_with_past, fault=False),
        "check_cache", {"library": "numpy"},
    ),
    Case(
        "O-067", "causal_flag_dropped", "causal_dropped_or_forced", "https://github.com/pytorch/pytorch/issues/99282",
        partial(_need_weights, fault=True), partial(_need_weights, fault=False),
        settings={
            "library": "torch",
            "call": lambda f, q, k, v, causal, return_weights: f(q, k, v, is_causal=causal, need_weights=return_weights),
        },
    ),
    Case(
        "O-068", "causal_flag_dropped", "causal_dropped_or_forced", "https://github.com/facebookresearch/xformers/issues/103",
        partial(_causal_inside_mask, fault=True), partial(_causal_inside_mask, fault=False), settings={"library": "jax"},
    ),
    Case(
        "O-069", "causal_flag_dropped", "causal_dropped_or_forced", "https://github.com/facebookresearch/fairseq2/pull/59",
        partial(_cropped_mask, fault=True), partial(_cropped_mask, fault=False), settings={"library": "torch"},
    ),
    Case(
        "O-070", "causal_flag_dropped", "causal_dropped_or_forced", "https://github.com/paiml/entrenar/issues/310",
        lambda: _CausalSelfAttention(fault=True).double(), lambda: _CausalSelfAttention(fault=False).double(),
        "check", {"heads": Heads(d_model=12, h=3), "layout": _GPT2, "causal": True},
    ),
    Case(
        "O-071", "causal_forced", "causal_dropped_or_forced", "https://github.com/huggingface/transformers/issues/36150",
        partial(_padding_forces_causal, fault=True), partial(_padding_forces_causal, fault=False), settings={"library": "torch"},
    ),
    Case(
        "O-072", "causal_skipped_prefill", "causal_dropped_or_forced", "https://github.com/Mikyx-1/TinyLLM/pull/18",
        lambda: partial(_generate, fault=True), lambda: partial(_generate, fault=False), "check_cache", {"library": "torch"},
    ),
    Case(
        "O-073", "causal_transposed", "causal_geometry", "https://github.com/pytorch/pytorch/issues/29546",
        lambda: _LookAheadAttention(fault=True).double(), lambda: _LookAheadAttention(fault=False).double(),
        "check", {"heads": Heads(d_model=8, h=2), "layout": _SEPARATE, "causal": True},
    ),
]  # fmt: skip
