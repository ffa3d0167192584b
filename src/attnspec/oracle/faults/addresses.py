"""Faults where addresses wrap."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..problem import Array
from .fault import Fault, asks


def overflow_faults() -> Iterator[Fault]:
    """Addresses that wrap."""
    for rule in ("bias", "keep"):
        for modulus in range(2, 48):
            yield Fault(
                "index_overflow", f"the addresses of {'the bias' if rule == 'bias' else 'the mask'} wrap after {modulus} elements",
                change=lambda p, r=rule, m=modulus: p.change(**{r: _wrapped(p.options[r], m)}), applies=asks(rule), rank=5,
            )  # fmt: skip
    for name in ("keys", "values"):
        for modulus in range(2, 24):
            yield Fault(
                "index_overflow", f"the addresses of {name} wrap after {modulus} tokens",
                change=lambda p, n=name, m=modulus: replace(p, **{n: _tokens(getattr(p, n), m)}), rank=5,
                applies=lambda p, m=modulus: p.sizes["seq_k"] > m and p.keys is not p.queries,
            )  # fmt: skip


def _wrapped(array: Array, modulus: int) -> Array:
    seq = array.shape[-1]
    flat = array.reshape(*array.shape[:-2], -1)
    starts = np.arange(array.shape[-2]) * seq % modulus
    index = np.minimum(starts[:, None] + np.arange(seq), flat.shape[-1] - 1)
    return flat[..., index]


def _tokens(array: Array, modulus: int) -> Array:
    return np.take(array, np.arange(array.shape[-2]) % modulus, axis=-2)
