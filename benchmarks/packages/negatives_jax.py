"""Right implementations in JAX that compute the same otherwise.

JAX is imported where it is used, so that these can be listed without it.
"""

import math
from typing import Any

from attnspec import Policy

from .entry import Entry


def one_at_a_time(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """One query of one head of one sample, mapped over all of them."""
    import jax
    import jax.numpy as jnp

    def one(query: Any, keys: Any, values: Any, keep: Any) -> Any:
        scores = jnp.where(keep, keys @ query / math.sqrt(query.shape[-1]), -jnp.inf)
        return jax.nn.softmax(scores) @ values

    over_queries = jax.vmap(one, in_axes=(0, None, None, 0))
    kept = jnp.broadcast_to(True if keep is None else keep, (*queries.shape[:3], keys.shape[2]))
    return jax.vmap(jax.vmap(over_queries))(queries, keys, values, kept)


def key_after_key(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Key after key, with a running maximum."""
    import jax.numpy as jnp

    kept = jnp.broadcast_to(True if keep is None else keep, (*queries.shape[:3], keys.shape[2]))
    peak = jnp.full(queries.shape[:3], -jnp.inf, queries.dtype)
    total, found = jnp.zeros_like(peak), jnp.zeros((*queries.shape[:3], values.shape[-1]), queries.dtype)
    for j in range(keys.shape[2]):
        score = jnp.where(kept[..., j], jnp.einsum("bhid,bhd->bhi", queries, keys[:, :, j]) / math.sqrt(queries.shape[-1]), -jnp.inf)
        new = jnp.maximum(peak, score)
        safe = jnp.where(jnp.isfinite(new), new, 0.0)
        weight, faded = jnp.exp(score - safe), jnp.exp(peak - safe)
        total = total * faded + weight
        found = found * faded[..., None] + weight[..., None] * values[:, :, None, j]
        peak = new
    return found / jnp.where(total > 0, total, 1.0)[..., None]


def windowed_band(queries: Any, keys: Any, values: Any, *, window: Any = None) -> Any:
    """A window as a band matrix, heads behind the sequence."""
    import jax
    import jax.numpy as jnp

    scores = jnp.einsum("bihd,bjhd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
    if window is not None:
        behind = jnp.arange(scores.shape[2])[:, None] - jnp.arange(scores.shape[3])
        scores = jnp.where((behind >= 0) & (behind < window), scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhij,bjhv->bihv", jax.nn.softmax(scores), values)


def fourth_roots(queries: Any, keys: Any, values: Any, *, scale: Any = None) -> Any:
    """The root of the scale at queries and at keys."""
    import jax
    import jax.numpy as jnp

    root = jnp.sqrt(queries.shape[-1] ** -0.5 if scale is None else scale)
    return jax.nn.softmax(jnp.matmul(queries * root, jnp.swapaxes(keys * root, -1, -2))) @ values


_SETTINGS = {"library": "jax"}

ENTRIES = [
    Entry("jax one_at_a_time", lambda: one_at_a_time, "check_attention", {**_SETTINGS, "policy": Policy(empty_row="nan")}),
    Entry("jax key_after_key", lambda: key_after_key, "check_attention", _SETTINGS),
    Entry(
        "jax windowed_band", lambda: windowed_band, "check_attention", {**_SETTINGS, "order": "bshd", "policy": Policy(empty_row="uniform")}
    ),
    Entry("jax fourth_roots", lambda: fourth_roots, "check_attention", _SETTINGS),
]
