"""Addresses: offsets that wrap around, here at a modulus small enough to meet it in a test."""

import math
from functools import partial
from typing import Any

import numpy as np

from .case import Case
from .textbook import softmax

_MODULUS = 12  # stands for 2**32: offsets beyond it wrap around
_SIGNED = 32  # stands for 2**32 in a signed number: from half of it on it is negative


def _biased_rows(*, fault: bool) -> Any:
    """O-117: the offset of a row of the bias wraps around."""

    def attention(queries: Any, keys: Any, values: Any, *, bias: Any = None) -> Any:
        scores = np.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
        if bias is not None:
            seq_q, seq_k = bias.shape[-2:]
            flat = bias.reshape(*bias.shape[:2], -1)
            starts = np.arange(seq_q) * seq_k
            if fault:
                starts %= _MODULUS
            scores = scores + flat[..., starts[:, None] + np.arange(seq_k)]
        return np.einsum("bhij,bhjd->bhid", softmax(scores), values)

    return attention


def _strided_mask(*, fault: bool) -> Any:
    """O-118: the distance of two samples' masks is held in a signed number, and becomes negative."""

    def attention(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
        batch, _, seq_q, _ = queries.shape
        seq_k = keys.shape[2]
        scores = queries @ keys.swapaxes(-1, -2) / math.sqrt(queries.shape[-1])
        if keep is not None:
            memory = np.broadcast_to(keep, (batch, seq_q, seq_k)).ravel()
            stride = seq_q * seq_k
            if fault:
                stride = (stride + _SIGNED // 2) % _SIGNED - _SIGNED // 2
            places = np.arange(batch)[:, None, None] * stride + np.arange(seq_q)[:, None] * seq_k + np.arange(seq_k)
            kept = memory.take(places, mode="wrap")[:, None]  # what lies before the mask in memory is as good as anything
            scores = np.where(kept, scores, -np.inf)
        return softmax(scores) @ values

    return attention


CASES = [
    Case(
        "O-117", "index_overflow", "index_overflow", "https://github.com/pytorch/pytorch/issues/187227",
        partial(_biased_rows, fault=True), partial(_biased_rows, fault=False), settings={"library": "numpy"},
    ),
    Case(
        "O-118", "index_overflow", "index_overflow", "https://github.com/ggml-org/llama.cpp/issues/24912",
        partial(_strided_mask, fault=True), partial(_strided_mask, fault=False),
        settings={"mask_axes": "batch seq_q seq_k", "library": "numpy"},
    ),
]  # fmt: skip
