"""Caches: slots that are empty, missing or shifted, and caches of the wrong make."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .case import Case
from .textbook import softmax

_CAPACITY = 64


class _StaticCache:
    """O-095: the cache is handed out whole, and a single token sees the slots that are still empty."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.filled = 0
        self.keys: Any = None
        self.values: Any = None

    def update(self, keys: Any, values: Any) -> tuple[Any, Any]:
        if self.keys is None:
            self.keys, self.values = (new.new_zeros(*new.shape[:2], _CAPACITY, new.shape[3]) for new in (keys, values))
        end = self.filled + keys.shape[2]
        self.keys[:, :, self.filled : end], self.values[:, :, self.filled : end] = keys, values
        self.filled = end
        return (self.keys, self.values) if self.fault else (self.keys[:, :, :end], self.values[:, :, :end])

    def __call__(self, queries: Any, keys: Any, values: Any) -> Any:
        past, new = self.filled, queries.shape[2]
        keys, values = self.update(keys, values)
        mask = torch.ones(new, keys.shape[2], dtype=torch.bool).tril(past) if new > 1 else None
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


class _CountedCache:
    """O-096: the keys are counted before the new ones are written."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.length = 0
        self.buffers: tuple[Any, Any] | None = None

    def __call__(self, queries: Any, keys: Any, values: Any) -> Any:
        if self.buffers is None:
            self.buffers = tuple(np.zeros((*new.shape[:2], _CAPACITY, new.shape[3]), new.dtype) for new in (keys, values))
        start, self.length = self.length, self.length + keys.shape[2]
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            buffer[:, :, start : self.length] = new
        nonpad = start if self.fault else self.length
        slots = np.arange(_CAPACITY)
        keep = (slots < nonpad) & (slots <= start + np.arange(queries.shape[2])[:, None])
        scores = queries @ self.buffers[0].swapaxes(-1, -2) / math.sqrt(queries.shape[-1])
        return softmax(np.where(keep, scores, -np.inf)) @ self.buffers[1]


class _SlotTable:
    """O-097: keys are written to the slots from 0 on, and read from 1 on."""

    def __init__(self, *, fault: bool) -> None:
        self.first_read = 1 if fault else 0
        self.count = 0
        self.pool: dict[str, Any] = {}

    def __call__(self, queries: Any, keys: Any, values: Any) -> Any:
        write = np.arange(self.count, self.count + keys.shape[1])
        self.count += keys.shape[1]
        read = np.arange(self.first_read, self.first_read + self.count)
        for name, new in (("keys", keys), ("values", values)):
            pool = self.pool.setdefault(name, np.zeros((len(new), _CAPACITY, *new.shape[2:]), new.dtype))
            pool[:, write] = new
        keys, values = self.pool["keys"][:, read], self.pool["values"][:, read]
        scores = np.einsum("bihd,bjhd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
        keep = np.arange(self.count) <= write[:, None]
        return np.einsum("bhij,bjhd->bihd", softmax(np.where(keep, scores, -np.inf)), values)


class _AllocatedCache:
    """O-098: the cache is as wide as all heads together."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.index = 0
        self.cached: list[Any] | None = None

    def _allocate(self, new: Any) -> Any:
        batch, heads, _, width = new.shape
        return jnp.zeros((batch, heads, _CAPACITY, heads * width if self.fault else width), new.dtype)

    def __call__(self, queries: Any, keys: Any, values: Any) -> Any:
        if self.cached is None:
            self.cached = [self._allocate(keys), self._allocate(values)]
        self.cached = [
            jax.lax.dynamic_update_slice(old, new, (0, 0, self.index, 0)) for old, new in zip(self.cached, (keys, values), strict=True)
        ]
        keep = jnp.arange(_CAPACITY) <= self.index + jnp.arange(queries.shape[2])[:, None]
        self.index += queries.shape[2]
        scores = jnp.einsum("bhid,bhjd->bhij", queries, self.cached[0]) / math.sqrt(queries.shape[-1])
        return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(jnp.where(keep, scores, -jnp.inf), axis=-1), self.cached[1])


class _BeamCache:
    """O-099: sequences are not picked anew as long as there are as many as before."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.state: tuple[Any, Any] | None = None

    def reorder(self, indices: Any) -> None:
        """Pick the sequences that go on."""
        if self.state is None or (self.fault and len(indices) == len(self.state[0])):
            return
        self.state = self.state[0].index_select(0, indices), self.state[1].index_select(0, indices)

    def __call__(self, queries: Any, keys: Any, values: Any) -> Any:
        if self.state is not None:
            keys, values = torch.cat((self.state[0], keys), 2), torch.cat((self.state[1], values), 2)
        self.state = keys, values
        scores = torch.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + keys.shape[2] - queries.shape[2])
        return scores.masked_fill(future, -math.inf).softmax(-1) @ values


class _EvictingCache:
    """O-100: padding is evicted, and the causal rule takes what is left for the last tokens in a row."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.seen = 0
        self.kept: list[tuple[Any, Any, Any]] = []

    def __call__(self, queries: Any, keys: Any, values: Any, *, padding: Any = None) -> Any:
        batch, _, new, _ = queries.shape
        real = np.ones((batch, self.seen + new), bool) if padding is None else np.asarray(padding)
        if not self.kept:
            self.kept = [(keys[b, :, :0], values[b, :, :0], np.arange(0)) for b in range(batch)]
        places = self.seen + np.arange(new)
        self.seen += new
        found = []
        for b in range(batch):
            stay = real[b, places]
            rows = (keys[b, :, stay].swapaxes(0, 1), values[b, :, stay].swapaxes(0, 1), places[stay])
            old_k, old_v, old_places = self.kept[b]
            k, v, at = np.concatenate((old_k, rows[0]), 1), np.concatenate((old_v, rows[1]), 1), np.concatenate((old_places, rows[2]))
            self.kept[b] = k, v, at
            keep = np.tri(new, len(at), len(at) - new, dtype=bool) if self.fault else at <= places[:, None]
            found.append(self._attend(queries[b], k, v, keep))
        return np.stack(found)

    def _attend(self, queries: Any, keys: Any, values: Any, keep: Any) -> Any:
        if not keep.shape[1]:
            return np.zeros((*queries.shape[:2], values.shape[-1]), queries.dtype)
        scores = np.einsum("hid,hjd->hij", queries, keys) / math.sqrt(queries.shape[-1])
        return softmax(np.where(keep, scores, -np.inf)) @ values


CASES = [
    Case(
        "O-095", "cache_unfilled_attended", "cache_extent", "https://github.com/huggingface/transformers/pull/30414",
        lambda: partial(_StaticCache, fault=True), lambda: partial(_StaticCache, fault=False),
        "check_cache", {"library": "torch"},
    ),
    Case(
        "O-096", "cache_length_before_write", "cache_extent", "https://github.com/onnxruntime/mobius/pull/365",
        lambda: partial(_CountedCache, fault=True), lambda: partial(_CountedCache, fault=False),
        "check_cache", {"library": "numpy"},
    ),
    Case(
        "O-097", "cache_index_shift", "cache_extent", "https://github.com/sgl-project/sglang/issues/8675",
        lambda: partial(_SlotTable, fault=True), lambda: partial(_SlotTable, fault=False),
        "check_cache", {"order": "bshd", "library": "numpy"},
    ),
    Case(
        "O-098", "cache_shape", "cache_structure", "https://github.com/google/flax/pull/3576",
        lambda: partial(_AllocatedCache, fault=True), lambda: partial(_AllocatedCache, fault=False),
        "check_cache", {"library": "jax"},
    ),
    Case(
        "O-099", "cache_reorder", "cache_structure", "https://github.com/facebookresearch/fairseq2/issues/307",
        lambda: partial(_BeamCache, fault=True), lambda: partial(_BeamCache, fault=False),
        "check_cache", {"library": "torch"},
    ),
    Case(
        "O-100", "cache_evict_mask", "cache_structure", "https://github.com/rajveer43/VeloxQuant-MLX/pull/392",
        lambda: partial(_EvictingCache, fault=True), lambda: partial(_EvictingCache, fault=False),
        "check_cache", {"library": "numpy"},
    ),
]  # fmt: skip
