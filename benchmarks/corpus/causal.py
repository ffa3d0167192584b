"""Faults of causality: the triangle starts at the wrong corner."""

from typing import Any

import numpy as np

from attnspec import Policy

from .case import Case
from .textbook import softmax

CAPACITY = 64


def _triangle_from_the_top(q: Any, k: Any, v: Any, *, is_causal: bool = False) -> Any:
    """O-061: the first query stands beside the first key, even where queries are the last tokens."""
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if is_causal:
        scores = np.where(np.tri(q.shape[2], k.shape[2], dtype=bool), scores, -np.inf)
    return np.einsum("bhqk,bhkd->bhqd", softmax(scores), v)


def _triangle_from_the_bottom(q: Any, k: Any, v: Any, *, is_causal: bool = False) -> Any:
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if is_causal:
        scores = np.where(np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool), scores, -np.inf)
    return np.einsum("bhqk,bhkd->bhqd", softmax(scores), v)


class _SlotDecoder:
    """O-062: the slots that are filled are intersected with a triangle over all slots."""

    def __init__(self) -> None:
        self.keys = self.values = None
        self.index = 0

    def visible(self, new: int) -> Any:
        filled = np.arange(CAPACITY) <= self.index + np.arange(new)[:, None]
        return filled & np.tri(new, CAPACITY, dtype=bool)

    def __call__(self, queries: Any, keys: Any, values: Any) -> Any:
        if self.keys is None:
            self.keys = np.zeros((*keys.shape[:2], CAPACITY, keys.shape[3]), keys.dtype)
            self.values = np.zeros((*values.shape[:2], CAPACITY, values.shape[3]), values.dtype)
        new = queries.shape[2]
        self.keys[:, :, self.index : self.index + new] = keys
        self.values[:, :, self.index : self.index + new] = values
        scores = queries @ self.keys.swapaxes(2, 3) / np.sqrt(queries.shape[-1])
        weights = softmax(np.where(self.visible(new), scores, -np.inf))
        self.index += new
        return weights @ self.values


class _SlotDecoderOfFilled(_SlotDecoder):
    def visible(self, new: int) -> Any:
        return np.arange(CAPACITY) <= self.index + np.arange(new)[:, None]


CASES = [
    Case(
        "O-061", "causal_alignment", "causal_alignment", "https://github.com/pytorch/pytorch/issues/103082",
        lambda: _triangle_from_the_top, lambda: _triangle_from_the_bottom,
        settings={"policy": Policy(causal_anchor="bottom_right"), "library": "numpy"},
    ),
    Case(
        "O-062", "causal_alignment", "causal_alignment", "https://github.com/google/flax/issues/5591",
        lambda: _SlotDecoder, lambda: _SlotDecoderOfFilled, "check_cache", {"library": "numpy"},
    ),
]  # fmt: skip
