"""What is known about layers of Flax, Equinox and Keras."""

import sys
from collections.abc import Mapping
from typing import Any

from ..layouts import LAYOUTS
from ..spec.parameters import Heads
from ..spec.policy import Policy
from .libraries import LIBRARIES

_JAX = LIBRARIES["jax"]
_GAINS = {"gain_q": ("query_ln.scale", "d_k"), "gain_k": ("key_ln.scale", "d_k")}


def nnx(layer: Any, /) -> dict[str, Any] | None:
    """Know `flax.nnx.MultiHeadAttention`, which takes its softmax in float32 unless the weights are asked for.

    Args:
        layer: the layer.

    Returns:
        What need not be said about it; None where it has an attention function of its own or another width of the output.
    """
    heads = Heads(d_model=layer.in_features, h=layer.num_heads, h_kv=layer.num_kv_heads, d_k=layer.head_dim, d_key_in=layer.in_kv_features)
    if layer.attention_fn is not sys.modules["flax.nnx"].dot_product_attention or layer.out_features != heads.d_model:
        return None
    return {**_flax(heads, normalised=layer.normalize_qk, softmax_precision="float32"), "call": _call_nnx}


def _flax(heads: Heads, *, normalised: bool, **conventions: Any) -> dict[str, Any]:
    return {
        "heads": heads,
        "layout": {**LAYOUTS["flax"], **(_GAINS if normalised else {})},
        "policy": Policy(**{"empty_row": "uniform", "normalise": "layer" if normalised else None, **conventions}),
        "library": _JAX,
    }


def _call_nnx(layer: Any, *, queries: Any, keys: Any, values: Any, keep: Any, causal: bool, return_weights: bool, training: bool) -> Any:
    if keep is not None and causal:  # it combines the two only where the mask has all queries
        keep = sys.modules["jax"].numpy.broadcast_to(keep, (*keep.shape[:2], queries.shape[1], keep.shape[3]))
    options = {"mask": keep, "is_causal": causal, "decode": False, "deterministic": not training}
    if not return_weights:
        return layer(queries, keys, values, **options)
    nnx = sys.modules["flax.nnx"]
    capture = nnx.capture(lambda each, *sources: each(*sources, sow_weights=True, **options), nnx.Intermediate)
    y, sown = capture(layer, queries, keys, values)
    return y, sown["attention_weights"][0]


def linen(pair: Any, /) -> dict[str, Any] | None:
    """Know `flax.linen.MultiHeadDotProductAttention` with its parameters.

    Args:
        pair: the module and its parameters, with or without `params` around them.

    Returns:
        What need not be said about it; None for the module alone, and where it was given a step of its own.
    """
    if not isinstance(pair, tuple) or not isinstance(pair[1], Mapping):
        return None
    module, parameters = pair[0], _inner(pair[1])
    (d_model, h, d_k), d_key_in, d_value_in = (parameters[name]["kernel"].shape for name in ("query", "key", "value"))
    own = (module.qk_attn_weights_einsum_cls, module.attn_weights_value_einsum_cls, module.qkv_dot_general, module.out_dot_general,
           module.qkv_dot_general_cls, module.out_dot_general_cls)  # fmt: skip
    plain = module.attention_fn is sys.modules["flax.linen"].dot_product_attention and set(own) == {None} and not module.decode
    if not plain or parameters["out"]["kernel"].shape[-1] != d_model:
        return None
    heads = Heads(d_model=d_model, h=h, d_k=d_k, d_key_in=d_key_in[0], d_value_in=d_value_in[0])
    conventions: dict[str, Any] = {"softmax_precision": "input"}
    if module.force_fp32_for_softmax:  # its smallest float64 is minus infinity in float32, so a query without keys depends on the dtype
        conventions = {"softmax_precision": "float32", "empty_row": "any"}
    return {**_flax(heads, normalised=module.normalize_qk, **conventions), "call": _call_linen}


def _inner(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("params", parameters)


def _call_linen(pair: Any, *, queries: Any, keys: Any, values: Any, keep: Any, return_weights: bool, training: bool) -> Any:
    module, parameters = pair
    jax = sys.modules["jax"]
    options = {"mask": keep, "deterministic": not training, "rngs": {"dropout": jax.random.key(0)}, "sow_weights": return_weights}
    y, sown = module.apply({"params": _inner(parameters)}, queries, keys, values, mutable=["intermediates"], **options)
    return (y, sown["intermediates"]["attention_weights"][0]) if return_weights else y


def equinox(layer: Any, /) -> dict[str, Any] | None:
    """Know `equinox.nn.MultiheadAttention`, which knows no batch.

    Args:
        layer: the layer.

    Returns:
        What need not be said about it; None where its output has another width.
    """
    if layer.output_size != layer.query_size:
        return None
    heads = Heads(
        d_model=layer.query_size, h=layer.num_heads, d_k=layer.qk_size, d_v=layer.vo_size, d_key_in=layer.key_size,
        d_value_in=layer.value_size,
    )  # fmt: skip
    axes = ("batch h seq_q seq_k", "batch seq_q seq_k")
    return {"heads": heads, "layout": "equinox", "policy": Policy(empty_row="uniform"), "mask_axes": axes, "library": _JAX,
            "call": _call_equinox}  # fmt: skip


def _call_equinox(layer: Any, *, queries: Any, keys: Any, values: Any, keep: Any) -> Any:
    jax = sys.modules["jax"]
    batch, seq_q, seq_k = len(queries), queries.shape[1], keys.shape[1]
    random = jax.random.split(jax.random.key(0), batch)
    if keep is None:
        return jax.vmap(lambda x, k, v, key: layer(x, k, v, key=key))(queries, keys, values, random)
    shape = (batch, layer.num_heads, seq_q, seq_k) if keep.ndim == 4 else (batch, seq_q, seq_k)  # for each head
    keep = jax.numpy.broadcast_to(keep, shape)
    return jax.vmap(lambda x, k, v, mask, key: layer(x, k, v, mask, key=key))(queries, keys, values, keep, random)


def keras(layer: Any, /) -> dict[str, Any] | None:
    """Know `keras.layers.MultiHeadAttention`, once it is built; it gives a query without keys zeros or the mean, by its path.

    Args:
        layer: the layer.

    Returns:
        What need not be said about it; None before it is built, and where it has a gate, other axes or another width of the output.
    """
    library = LIBRARIES.get(sys.modules["keras"].config.backend())
    if not layer.built or library is None:
        return None
    shapes = {name: getattr(layer, f"{name}_dense").kernel.shape for name in ("query", "key", "value", "output")}
    settings, (d_model, h, d_k) = layer.get_config(), shapes["query"]
    if settings.get("use_gate") or tuple(layer.attention_axes) != (1,) or shapes["output"][2:] != (d_model,):
        return None
    heads = Heads(d_model=d_model, h=h, d_k=d_k, d_v=shapes["value"][2], d_key_in=shapes["key"][0], d_value_in=shapes["value"][0])
    side = None if settings.get("sliding_window") is None else settings["sliding_window"] - 1
    policy = Policy(empty_row="any", window=(side, side), softmax_precision="float32", product_precision="float32")
    axes = ("batch seq_q seq_k",)
    return {"heads": heads, "layout": "keras", "policy": policy, "mask_axes": axes, "library": library, "call": _call_keras}


def _call_keras(
    layer: Any, *, queries: Any, keys: Any, values: Any, keep: Any, padding: Any, causal: bool, return_weights: bool, training: bool
) -> Any:
    return layer(
        queries, values, keys, key_mask=padding, attention_mask=keep, use_causal_mask=causal, return_attention_scores=return_weights,
        training=training,
    )  # fmt: skip
