"""Faults of masks, continued: lost on one path, taken from another stream, or not combined."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from attnspec import Heads

from .case import Case
from .textbook import masked_softmax, softmax

BLOCK, PREFIX = 2, 2


def _band(seq_q: int, seq_k: int, window: int | None) -> Any:
    """Keep the last keys up to the query."""
    behind = torch.arange(seq_q)[:, None] - torch.arange(seq_k)
    return (behind >= 0) & (behind < (seq_k + seq_q if window is None else window))


def _window_after_return(q: Any, k: Any, v: Any, *, sliding_window: int | None = None, return_weights: bool = False) -> Any:
    """O-048: the fused branch has returned before the window is looked at."""
    if not return_weights:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = _band(q.shape[2], k.shape[2], sliding_window)
    weights = masked_softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, mask)
    return weights @ v, weights


def _window_before_return(q: Any, k: Any, v: Any, *, sliding_window: int | None = None, return_weights: bool = False) -> Any:
    mask = _band(q.shape[2], k.shape[2], sliding_window)
    if not return_weights:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    weights = masked_softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, mask)
    return weights @ v, weights


def _unpadded(q: Any, k: Any, v: Any, padding: Any) -> Any:
    """Attend sample by sample, to the keys that are real."""
    samples = zip(q, k, v, padding, strict=True)
    return torch.stack([functional.scaled_dot_product_attention(a, b[:, real], c[:, real]) for a, b, c, real in samples])


def _padded_unmasked(q: Any, k: Any, v: Any, *, padding: Any = None, output_attentions: bool = False) -> Any:
    """O-049: only the path without padding is right; the other forgets the mask, and gives the weights."""
    if padding is not None and not output_attentions:
        return _unpadded(q, k, v, padding)
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return weights @ v, weights


def _padded_masked(q: Any, k: Any, v: Any, *, padding: Any = None, output_attentions: bool = False) -> Any:
    if padding is not None and not output_attentions:
        return _unpadded(q, k, v, padding)
    weights = masked_softmax(q @ k.mT * q.shape[-1] ** -0.5, None if padding is None else padding[:, None, None, :])
    return weights @ v, weights


def _drop_keys_late(q: Any, k: Any, v: Any, *, mask: Any = None, padding: Any = None) -> Any:
    """O-050: keys are dropped from the mask when the attention has been computed with the one before."""
    mask = np.ones((1, 1, 1, k.shape[2]), bool) if mask is None else mask
    scores = np.where(mask, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]), -np.inf)
    if padding is not None:
        mask = mask & padding[:, None, None, :]
    return softmax(scores) @ v


def _drop_keys_first(q: Any, k: Any, v: Any, *, mask: Any = None, padding: Any = None) -> Any:
    mask = np.ones((1, 1, 1, k.shape[2]), bool) if mask is None else mask
    if padding is not None:
        mask = mask & padding[:, None, None, :]
    scores = np.where(mask, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]), -np.inf)
    return softmax(scores) @ v


@dataclass(frozen=True)
class _BlockMask:
    """O-051: which blocks of keys are looked at, and which keys in them; rows of it lose the second."""

    blocks: Any
    inside: Any

    def rows(self, start: int) -> "_BlockMask":
        return _BlockMask(self.blocks[..., start // BLOCK, :], np.bool_(True))  # noqa: FBT003

    def keys(self, block: int) -> Any:
        kept = self.inside[..., block * BLOCK : (block + 1) * BLOCK] if self.inside.ndim else self.inside
        return self.blocks[..., block, None, None] & kept


@dataclass(frozen=True)
class _SlicedBlockMask(_BlockMask):
    def rows(self, start: int) -> "_BlockMask":
        return replace(self, blocks=self.blocks[..., start // BLOCK, :], inside=self.inside[..., start : start + BLOCK, :])


def _make_blocked(mask_type: type[_BlockMask]) -> Any:
    def attention(q: Any, k: Any, v: Any, *, keep: Any = None) -> Any:
        seq_q, seq_k = q.shape[2], k.shape[2]
        kept = np.broadcast_to(True if keep is None else keep, (*q.shape[:3], seq_k))
        filled = np.pad(kept, [(0, 0), (0, 0), (0, -seq_q % BLOCK), (0, -seq_k % BLOCK)])
        tiles = filled.reshape(*q.shape[:2], -(-seq_q // BLOCK), BLOCK, -(-seq_k // BLOCK), BLOCK)
        mask, rows = mask_type(tiles.any((3, 5)), kept), []
        for start in range(0, seq_q, BLOCK):
            part, queries = mask.rows(start), q[:, :, start : start + BLOCK]
            scores = queries @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
            for block in range(-(-seq_k // BLOCK)):
                span = slice(block * BLOCK, (block + 1) * BLOCK)
                scores[..., span] = np.where(part.keys(block), scores[..., span], -np.inf)
            rows.append(softmax(scores) @ v)
        return np.concatenate(rows, axis=2)

    return attention


class _CrossBlock(nn.Module):
    """O-052: the encoder is looked at with the mask of the decoder's own tokens."""

    def __init__(self, query_dim: int, cross_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = nn.Linear(query_dim, query_dim), nn.Linear(cross_dim, query_dim), nn.Linear(cross_dim, query_dim)
        self.to_out = nn.Linear(query_dim, query_dim)

    def choose(self, attention_mask: Any, encoder_attention_mask: Any) -> Any:
        del encoder_attention_mask
        return attention_mask

    def forward(self, hidden: Any, keys: Any, values: Any, attention_mask: Any, encoder_attention_mask: Any) -> Any:
        q, k, v = self.to_q(hidden), self.to_k(keys), self.to_v(values)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask = self.choose(attention_mask, encoder_attention_mask)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None, :])
        return self.to_out(found.transpose(1, 2).flatten(2))


class _CrossBlockOfEncoder(_CrossBlock):
    def choose(self, attention_mask: Any, encoder_attention_mask: Any) -> Any:
        del attention_mask
        return encoder_attention_mask


def _call_cross_block(layer: Any, queries: Any, keys: Any, values: Any, padding: Any) -> Any:
    return layer(queries, keys, values, queries.new_ones(queries.shape[:2], dtype=torch.bool), padding)


def _attend(q: Any, k: Any, v: Any, keep: Any) -> Any:
    return softmax(np.where(keep, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]), -np.inf)) @ v


def _prefix_last(q: Any, k: Any, v: Any, *, keep: Any = None, padding: Any = None) -> Any:
    """O-053: padding is blocked first, then the prefix gets what it may see."""
    visible = np.broadcast_to(True if keep is None else keep, (*q.shape[:3], k.shape[2]))
    mask = visible.copy()
    if padding is not None:
        mask &= padding[:, None, None, :]
    mask[..., :PREFIX] = visible[..., :PREFIX]
    return _attend(q, k, v, mask)


def _padding_last(q: Any, k: Any, v: Any, *, keep: Any = None, padding: Any = None) -> Any:
    visible = np.broadcast_to(True if keep is None else keep, (*q.shape[:3], k.shape[2]))
    mask = visible.copy()
    mask[..., :PREFIX] = visible[..., :PREFIX]
    if padding is not None:
        mask &= padding[:, None, None, :]
    return _attend(q, k, v, mask)


def _flag_overrides(query: Any, key: Any, value: Any, attn_mask: Any = None, *, is_causal: bool = False) -> Any:
    """O-054: a mask and the flag are accepted together, and one of them is lost."""
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    return masked_softmax(query @ key.mT * query.size(-1) ** -0.5, attn_mask) @ value


def _flag_and_mask(query: Any, key: Any, value: Any, attn_mask: Any = None, *, is_causal: bool = False) -> Any:
    if is_causal:
        triangle = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
        attn_mask = triangle if attn_mask is None else attn_mask & triangle
    return masked_softmax(query @ key.mT * query.size(-1) ** -0.5, attn_mask) @ value


_CROSS = {
    "w_q": ("to_q.weight", "(h d_k) d_model"), "b_q": ("to_q.bias", "(h d_k)"),
    "w_k": ("to_k.weight", "(h_kv d_k) d_key_in"), "b_k": ("to_k.bias", "(h_kv d_k)"),
    "w_v": ("to_v.weight", "(h_kv d_v) d_value_in"), "b_v": ("to_v.bias", "(h_kv d_v)"),
    "w_o": ("to_out.weight", "d_model (h d_v)"), "b_o": ("to_out.bias", "d_model"),
}  # fmt: skip

CASES = [
    Case(
        "O-048", "mask_ignored_on_path", "mask_not_applied", "https://github.com/keras-team/keras-hub/issues/2186",
        lambda: _window_after_return, lambda: _window_before_return, settings={"causal": True, "library": "torch"},
    ),
    Case(
        "O-049", "mask_ignored_on_path", "mask_not_applied", "https://github.com/AnswerDotAI/ModernBERT/pull/40",
        lambda: _padded_unmasked, lambda: _padded_masked, settings={"library": "torch"},
    ),
    Case(
        "O-050", "mask_ignored_on_path", "mask_not_applied", "https://github.com/lucidrains/audiolm-pytorch/pull/69",
        lambda: _drop_keys_late, lambda: _drop_keys_first, settings={"library": "numpy"},
    ),
    Case(
        "O-051", "mask_ignored_on_path", "mask_not_applied", "https://github.com/pytorch/pytorch/issues/163314",
        lambda: _make_blocked(_BlockMask), lambda: _make_blocked(_SlicedBlockMask), settings={"library": "numpy"},
    ),
    Case(
        "O-052", "mask_wrong_stream", "mask_not_applied", "https://github.com/huggingface/diffusers/pull/2656",
        lambda: _CrossBlock(12, 10, 3).double(), lambda: _CrossBlockOfEncoder(12, 10, 3).double(),
        "check", {"heads": Heads(d_model=12, h=3, d_key_in=10), "layout": _CROSS, "call": _call_cross_block},
    ),
    Case(
        "O-053", "mask_merge_order", "mask_combination", "https://github.com/huggingface/transformers/issues/35855",
        lambda: _prefix_last, lambda: _padding_last, settings={"library": "numpy"},
    ),
    Case(
        "O-054", "mask_merge_order", "mask_combination", "https://github.com/pytorch/pytorch/pull/187966",
        lambda: _flag_overrides, lambda: _flag_and_mask, settings={"library": "torch"},
    ),
]  # fmt: skip
