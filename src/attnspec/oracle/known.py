"""What need not be said about a layer whose class is known; no framework is imported for that."""

from collections.abc import Callable, Mapping
from functools import reduce
from operator import and_
from typing import Any

from ..spec.positions import Positions
from ..spec.rules import Mask
from . import known_jax, known_torch

Known = dict[str, Any]


def known(target: Any, /) -> Known | None:
    """Look up what is known about a layer.

    Args:
        target: the layer; or a module of Flax Linen and its parameters, as a pair.

    Returns:
        `heads`, `call`, `mask`, `mask_axes`, `layout`, `causal`, `policy`, `sources`, `tokens` and `library`, as far as they
        are not what they would be by default; None for a class that is not known, or one that was set up to compute
        something for which the specification has no word.
    """
    layer = target[0] if isinstance(target, tuple) and len(target) == 2 else target  # a pair
    find = _CLASSES.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
    if find is None or (layer is not target and find is not known_jax.linen):
        return None
    try:
        return find(target)
    except (AttributeError, TypeError, KeyError):  # another version, which is set up otherwise
        return None


def _own(layer: Any) -> Known:
    """A layer of this package."""
    axes = {
        "w_q": "h d_model d_k",
        "w_k": "h_kv d_key_in d_k",
        "w_v": "h_kv d_value_in d_v",
        "w_o": "(h d_v) d_model",
        "b_q": "h d_k",
        "b_k": "h_kv d_k",
        "b_v": "h_kv d_v",
        "b_o": "d_model",
        "sinks": "h",
        "gates": "h",
        "extra_k": "h_kv extra d_k",
        "extra_v": "h_kv extra d_v",
        **{name: f"{'1' if getattr(layer, name) is not None and len(getattr(layer, name)) == 1 else h} d_k" for name, h in _GAINS},
    }
    layout = {name: (name, pattern) for name, pattern in axes.items() if getattr(layer, name) is not None}
    return {"heads": layer.heads, "policy": layer.policy, "layout": layout, "call": _call_own}


_GAINS = (("gain_q", "h"), ("gain_k", "h_kv"))


def _call_own(
    layer: Any, *, queries: Any, keys: Any, values: Any, keep: Any, padding: Any, lengths: Any, documents: Any, bias: Any, causal: bool,
    offset: int | None, positions: Any, return_weights: bool,
) -> Any:  # fmt: skip
    rules = [
        *([] if keep is None else [Mask.keep(keep)]),
        *([] if padding is None else [Mask.keep(padding, "batch seq_k")]),
        *([] if lengths is None else [Mask.lengths(lengths)]),
        *([] if documents is None else [Mask.documents(documents)]),
    ]
    return layer(
        queries, context=keys, context_v=values, keep=reduce(and_, rules) if rules else None, bias=bias, causal=causal, offset=offset,
        positions=None if positions is None else Positions(positions, positions), need="weights" if return_weights else None,
    )  # fmt: skip


_CLASSES: Mapping[str, Callable[[Any], Known | None]] = {
    "attnspec.layers.numpy_layer.MultiHeadAttention": _own,
    "attnspec.layers.torch_layer.MultiHeadAttention": _own,
    "attnspec.layers.torch_dropin.MultiheadAttention": known_torch.dropin,
    "torch.nn.modules.activation.MultiheadAttention": known_torch.multihead,
    "timm.layers.attention.Attention": known_torch.timm,
    "x_transformers.x_transformers.Attention": known_torch.x_transformers,
    "keras.src.layers.attention.multi_head_attention.MultiHeadAttention": known_jax.keras,
    "equinox.nn._attention.MultiheadAttention": known_jax.equinox,
    "flax.nnx.nn.attention.MultiHeadAttention": known_jax.nnx,
    "flax.linen.attention.MultiHeadDotProductAttention": known_jax.linen,
    "flax.linen.attention.MultiHeadAttention": known_jax.linen,
}
