"""Ragged batches: packed samples that see each other, rows and blocks that are lost."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from .case import Case
from .textbook import masked_softmax, softmax

_BLOCK = 4
_COMPILED_LENGTH = 64


def _packed_samples(*, fault: bool) -> Any:
    """O-119: samples are kept apart only where no mask is passed, be it one of ones."""

    def attention(queries: Any, keys: Any, values: Any, *, padding: Any = None, documents: Any = None) -> Any:
        keep = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).tril()
        if padding is not None:
            keep = keep & padding[:, None, None, :]
        if documents is not None and not (fault and padding is not None):
            keep = keep & (documents[:, None, :, None] == documents[:, None, None, :])
        scores = torch.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
        return torch.einsum("bhij,bhjd->bhid", masked_softmax(scores, keep), values)

    return attention


def _flat(x: Any) -> Any:
    """Put the tokens of all samples one behind the other."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _unpadded(*, fault: bool) -> Any:
    """O-120: in cross-attention, queries are picked by the mask of the keys."""

    def attention(queries: Any, keys: Any, values: Any, *, padding: Any = None) -> Any:
        (batch, heads, seq_q, width), seq_k = queries.shape, keys.shape[2]
        real_k = np.ones((batch, seq_k), bool) if padding is None else padding
        real_q = real_k[:, -seq_q:] if fault and seq_q != seq_k else np.ones((batch, seq_q), bool)
        q, at = _flat(queries), np.flatnonzero(real_q)
        k, v = _flat(keys)[np.flatnonzero(real_k)], _flat(values)[np.flatnonzero(real_k)]
        ends_q, ends_k = real_q.sum(1).cumsum(), real_k.sum(1).cumsum()
        found = np.zeros((batch * seq_q, heads, values.shape[-1]), queries.dtype)
        for rows, columns in zip(np.split(at, ends_q[:-1]), np.split(np.arange(len(k)), ends_k[:-1]), strict=True):
            if len(rows) and len(columns):
                scores = np.einsum("ihd,jhd->hij", q[rows], k[columns]) / math.sqrt(width)
                found[rows] = np.einsum("hij,jhd->ihd", softmax(scores), v[columns])
        return found.reshape(batch, seq_q, heads, -1).swapaxes(1, 2)

    return attention


def _block_sparse(*, fault: bool) -> Any:
    """O-121: the kernel was compiled for another number of keys, and looks for a sample's blocks behind the end of the list."""

    def attention(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
        batch, _, seq_q, width = queries.shape
        seq_k = keys.shape[2]
        kept = np.ones((batch, seq_q, seq_k), bool) if keep is None else np.broadcast_to(keep, (batch, seq_q, seq_k))
        blocks = -(-seq_k // _BLOCK)
        listed = np.pad(kept, ((0, 0), (0, 0), (0, blocks * _BLOCK - seq_k))).reshape(batch, seq_q, blocks, _BLOCK).any(-1).ravel()
        per_sample = seq_q * (_COMPILED_LENGTH // _BLOCK if fault else blocks)
        scores = queries @ keys.swapaxes(-1, -2) / math.sqrt(width)
        visible = np.zeros_like(kept)
        for sample in range(batch):
            here = listed[sample * per_sample :][: seq_q * blocks]
            if len(here):
                visible[sample] = kept[sample] & here.reshape(seq_q, blocks).repeat(_BLOCK, axis=1)[:, :seq_k]
        return softmax(np.where(visible[:, None], scores, -np.inf)) @ values

    return attention


CASES = [
    Case(
        "O-119", "packed_cross_attention", "ragged_packing", "https://github.com/huggingface/transformers/pull/46634",
        partial(_packed_samples, fault=True), partial(_packed_samples, fault=False), settings={"causal": True, "library": "torch"},
    ),
    Case(
        "O-120", "ragged_unpad_mismatch", "ragged_packing", "https://github.com/vllm-project/vllm-omni/issues/5865",
        partial(_unpadded, fault=True), partial(_unpadded, fault=False), settings={"library": "numpy"},
    ),
    Case(
        "O-121", "block_mask_length", "ragged_packing", "https://github.com/pytorch/pytorch/issues/139462",
        partial(_block_sparse, fault=True), partial(_block_sparse, fault=False),
        settings={"mask_axes": "batch seq_q seq_k", "library": "numpy"},
    ),
]  # fmt: skip
