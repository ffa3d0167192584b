"""Numbers that are not finite: rows without keys, NaN that leaks or vanishes, constants that do not fit the format."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from attnspec import Policy

from .case import Case


def _empty_row(*, fault: bool) -> Any:
    """O-078: a row of minus infinities less its largest is NaN."""

    def attention(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
        scores = np.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
        if keep is not None:
            scores = np.where(keep, scores, -np.inf)
        largest = scores.max(axis=-1, keepdims=True)
        if not fault:
            largest = np.maximum(largest, np.finfo(scores.dtype).min)
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - largest)
            total = weights.sum(axis=-1, keepdims=True)
            return np.einsum("bhij,bhjd->bhid", weights, values) / np.where(total == 0, 1, total)

    return attention


def _blockwise(*, fault: bool, block: int = 2) -> Any:
    """O-079: the running maximum starts at the number that masked scores are filled with, and its rows count as not begun."""

    def attention(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
        lowest = torch.finfo(scores.dtype).min
        if keep is not None:
            scores = scores.masked_fill(~keep, lowest)
        start = lowest if fault else -math.inf
        peak = torch.full_like(scores[..., :1], start)
        total, found = torch.zeros_like(peak), torch.zeros_like(queries[..., :1])
        for first in range(0, scores.shape[-1], block):
            tile = scores[..., first : first + block]
            highest = torch.maximum(peak, tile.amax(-1, keepdim=True)).detach()
            begun = highest > start
            shares = torch.exp(tile - highest) * begun
            rescale = torch.exp(peak - highest) * begun
            total = total * rescale + shares.sum(-1, keepdim=True)
            found = found * rescale + shares @ values[..., first : first + block, :]
            peak = highest
        return found / total

    return attention


def _cleaned_after_softmax(*, fault: bool) -> Any:
    """O-080: NaN is cleaned out of the weights, but stays in the gradients."""

    def attention(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
        scores = torch.matmul(queries, keys.transpose(-2, -1)) / math.sqrt(queries.shape[-1])
        if keep is None:
            return scores.softmax(-1) @ values
        scores = scores + torch.zeros_like(scores).masked_fill(~keep, -math.inf)
        if fault:
            weights = scores.softmax(-1)
            return torch.where(torch.isnan(weights), 0.0, weights) @ values
        empty = ~keep.any(-1, keepdim=True)
        return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ values

    return attention


def _masked_content(*, fault: bool) -> Any:
    """O-081: what is masked is multiplied by zero."""

    def attention(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
        scores = np.matmul(queries, keys.swapaxes(-1, -2)) / math.sqrt(queries.shape[-1])
        keep = np.ones_like(scores, bool) if keep is None else np.broadcast_to(keep, scores.shape)
        scores = scores + np.where(keep, 0, -np.inf) if fault else np.where(keep, scores, -np.inf)
        largest = scores.max(-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
        total = weights.sum(-1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
        if fault:
            return weights @ values
        return np.where(keep[..., None], weights[..., None] * values[:, :, None], 0).sum(-2)

    return attention


def _guarded(*, fault: bool) -> Any:
    """O-082: the guard for rows without keys catches whatever is NaN."""

    def attention(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
        scores = queries @ np.moveaxis(keys, -1, -2) / math.sqrt(queries.shape[-1])
        keep = np.ones_like(scores, bool) if keep is None else np.broadcast_to(keep, scores.shape)
        scores = np.where(keep, scores, -np.inf)
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        weights = np.where(np.isnan(weights) if fault else ~keep.any(-1, keepdims=True), 0.0, weights)
        return np.where(keep[..., None], weights[..., None] * values[:, :, None], 0).sum(-2)

    return attention


def _lowest_plus_score(*, fault: bool) -> Any:
    """O-083: the lowest number plus a negative score is minus infinity, in float16 from -16 on."""

    def attention(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
        scores = np.matmul(queries, keys.swapaxes(-1, -2)) * np.asarray(queries.shape[-1] ** -0.5, queries.dtype)
        if keep is not None:
            lowest = np.finfo(scores.dtype).min
            scores = scores + np.where(keep, 0, lowest) if fault else np.where(keep, scores, lowest)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.matmul(weights / weights.sum(axis=-1, keepdims=True), values)

    return attention


def _large_constant(*, fault: bool) -> Any:
    """O-084: the constant of the mask is beyond float16."""

    def attention(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
        scores = torch.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
        if keep is not None:
            scores = scores.masked_fill(~keep, -1e9 if fault else torch.finfo(scores.dtype).min)
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), values)

    return attention


CASES = [
    Case(
        "O-078", "fully_masked_row", "fully_masked_row", "https://github.com/pytorch/pytorch/issues/103749",
        partial(_empty_row, fault=True), partial(_empty_row, fault=False), settings={"library": "numpy"},
    ),
    Case(
        "O-079", "fully_masked_row", "fully_masked_row", "https://github.com/pytorch/pytorch/issues/109517",
        partial(_blockwise, fault=True), partial(_blockwise, fault=False),
        settings={"policy": Policy(empty_row="uniform"), "library": "torch"},
    ),
    Case(
        "O-080", "fully_masked_row", "fully_masked_row", "https://github.com/Xilinx/brevitas/pull/1591",
        partial(_cleaned_after_softmax, fault=True), partial(_cleaned_after_softmax, fault=False), settings={"library": "torch"},
    ),
    Case(
        "O-081", "masked_nonfinite_leak", "nonfinite_propagation", "https://github.com/pytorch/pytorch/issues/101967",
        partial(_masked_content, fault=True), partial(_masked_content, fault=False),
        settings={"library": "numpy", "strict": ("dropped_nan",)},
    ),
    Case(
        "O-082", "nan_swallowed", "nonfinite_propagation", "https://github.com/pytorch/pytorch/issues/141128",
        partial(_guarded, fault=True), partial(_guarded, fault=False), settings={"library": "numpy", "strict": ("visible_nan",)},
    ),
    Case(
        "O-083", "half_overflow", "precision_range", "https://github.com/huggingface/transformers/pull/17306",
        partial(_lowest_plus_score, fault=True), partial(_lowest_plus_score, fault=False),
        settings={"policy": Policy(empty_row="uniform"), "library": "numpy"},
    ),
    Case(
        "O-084", "half_overflow", "precision_range", "https://github.com/ahrefs/ocannl/issues/548",
        partial(_large_constant, fault=True), partial(_large_constant, fault=False),
        settings={"policy": Policy(empty_row="uniform"), "library": "torch"},
    ),
]  # fmt: skip
