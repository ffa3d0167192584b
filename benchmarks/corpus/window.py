"""Windows: one key too many, or the wrong keys."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from attnspec import Policy

from .case import Case
from .textbook import softmax

_WINDOW = 3


def _two_branches(*, fault: bool) -> Any:
    """O-074: the kernel counts the keys besides the query's own, and is given the window as it is."""

    def manual(scores: Any, window: Any) -> Any:
        distance = np.arange(scores.shape[-2])[:, None] - np.arange(scores.shape[-1])
        return softmax(np.where((distance >= 0) & (distance < window), scores, -np.inf))

    def kernel(scores: Any, left: Any) -> Any:
        rows, columns = np.ogrid[: scores.shape[-2], : scores.shape[-1]]
        return softmax(np.where((columns <= rows) & (columns >= rows - left), scores, -np.inf))

    def attention(queries: Any, keys: Any, values: Any, *, window: Any = None, return_weights: bool = False) -> Any:
        scores = queries @ keys.swapaxes(-1, -2) / math.sqrt(queries.shape[-1])
        if window is None:
            weights = softmax(scores)
        elif return_weights:
            weights = manual(scores, window)
        else:
            weights = kernel(scores, window if fault else window - 1)
        return (weights @ values, weights) if return_weights else weights @ values

    return attention


class _RotatingCache:
    """O-075: the mask for a prompt admits one key more than the cache keeps for the tokens after it."""

    def __init__(self, *, fault: bool, window: int = _WINDOW) -> None:
        self.width = window + 1 if fault else window
        self.window = window
        self.kept: Any = None

    def __call__(self, queries: Any, keys: Any, values: Any) -> Any:
        if self.kept is not None:
            keys, values = (np.concatenate(pair, axis=2) for pair in zip(self.kept, (keys, values), strict=True))
        self.kept = keys[:, :, -self.window :], values[:, :, -self.window :]
        new, total = queries.shape[2], keys.shape[2]
        if new == 1:
            keys, values = self.kept
            keep = np.ones((1, keys.shape[2]), bool)
        else:
            distance = np.arange(total - new, total)[:, None] - np.arange(total)
            keep = (distance >= 0) & (distance < self.width)
        scores = np.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
        return np.einsum("bhij,bhjd->bhid", softmax(np.where(keep, scores, -np.inf)), values)


def _sliding_mask(*, fault: bool) -> Any:
    """O-076: the limit on the left stands on the right, where causality has cut already."""

    def attention(queries: Any, keys: Any, values: Any, *, window: Any = None, causal: bool = False) -> Any:
        rows, columns = queries.shape[2], keys.shape[2]
        mask = torch.ones(rows, columns, dtype=torch.bool)
        past = columns - rows
        if causal or window is not None:
            mask = mask.tril(past)
        if window is not None:
            mask = mask.tril(past + window) if fault else mask.triu(past - window + 1)
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

    return attention


def _clamped_window(*, fault: bool) -> Any:
    """O-077: a right side without limit becomes as wide as there are keys, which is too little for the first of many queries."""

    def attention(queries: Any, keys: Any, values: Any, *, window_size: tuple[int, int] = (-1, -1)) -> Any:
        seq_q, seq_k = queries.shape[1], keys.shape[1]
        scores = np.einsum("bihd,bjhd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
        keep = np.ones((seq_q, seq_k), bool)
        if window_size != (-1, -1):
            widest = seq_k if fault else seq_q + seq_k
            left, right = (widest if side < 0 else min(side, widest) for side in window_size)
            ahead = np.arange(seq_k) - (np.arange(seq_q)[:, None] + seq_k - seq_q)
            keep = (ahead >= -left) & (ahead <= right)
        return np.einsum("bhij,bjhd->bihd", softmax(np.where(keep, scores, -np.inf)), values)

    return attention


CASES = [
    Case(
        "O-074", "window_off_by_one", "window_off_by_one", "https://github.com/huggingface/transformers/issues/39408",
        partial(_two_branches, fault=True), partial(_two_branches, fault=False), settings={"library": "numpy"},
    ),
    Case(
        "O-075", "window_off_by_one", "window_off_by_one", "https://github.com/ml-explore/mlx-lm/pull/390",
        lambda: partial(_RotatingCache, fault=True), lambda: partial(_RotatingCache, fault=False),
        "check_cache", {"policy": Policy(window=(_WINDOW - 1, 0)), "library": "numpy"},
    ),
    Case(
        "O-076", "window_wrong_region", "window_wrong_region", "https://github.com/huggingface/transformers/pull/41228",
        partial(_sliding_mask, fault=True), partial(_sliding_mask, fault=False),
        settings={"policy": Policy(causal_anchor="bottom_right"), "library": "torch"},
    ),
    Case(
        "O-077", "window_wrong_region", "window_wrong_region", "https://github.com/Dao-AILab/flash-attention/issues/895",
        partial(_clamped_window, fault=True), partial(_clamped_window, fault=False),
        settings={
            "order": "bshd", "policy": Policy(causal_anchor="bottom_right"), "library": "numpy",
            "call": lambda f, q, k, v, window_left: f(q, k, v, window_size=(-1 if window_left is None else window_left, -1)),
        },
    ),
]  # fmt: skip
