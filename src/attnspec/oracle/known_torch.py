"""What is known about layers of PyTorch."""

import sys
from typing import Any

from ..layouts import LAYOUTS
from ..spec.parameters import Heads
from ..spec.policy import Policy


def multihead(layer: Any, /) -> dict[str, Any]:
    """Know `torch.nn.MultiheadAttention`, which gives a query without keys NaN or zeros, by the path that it takes.

    Args:
        layer: the layer.

    Returns:
        What need not be said about it.
    """
    return {
        "heads": Heads(d_model=layer.embed_dim, h=layer.num_heads, d_key_in=layer.kdim, d_value_in=layer.vdim),
        "layout": "torch" if layer.in_proj_weight is not None else "torch_separate",
        "mask": "drop",
        "mask_axes": ("batch h seq_q seq_k", "seq_q seq_k"),
        "policy": Policy(empty_row="any"),
        "call": _call_multihead,
    }


def dropin(layer: Any, /) -> dict[str, Any]:
    """Know the layer of this package that stands in its place, which gives a query without keys zeros.

    Args:
        layer: the layer.

    Returns:
        What need not be said about it.
    """
    return {**multihead(layer), "policy": Policy()}


def _call_multihead(
    layer: Any, *, queries: Any, keys: Any, values: Any, keep: Any, padding: Any, bias: Any, causal: bool, return_weights: bool
) -> Any:
    """Call the layer; `keep` and `padding` are True where they drop."""
    torch: Any = sys.modules["torch"]
    batch, seq_q, seq_k = len(queries), queries.shape[1], keys.shape[1]
    drop = keep
    if causal:
        future = torch.ones(seq_q, seq_k, dtype=torch.bool).triu(1)
        drop = future if keep is None else keep | future
    mask = drop if bias is None else _added(bias, drop)
    if mask is not None and mask.ndim > 2:  # not for all heads
        mask = mask.expand(batch, layer.num_heads, seq_q, seq_k).flatten(0, 1)
    if bias is not None and padding is not None:
        padding = _added(torch.zeros_like(padding, dtype=bias.dtype), padding)
    inputs = {id(x): x if layer.batch_first else x.transpose(0, 1) for x in (queries, keys, values)}  # what is the same stays the same
    y, weights = layer(
        *(inputs[id(x)] for x in (queries, keys, values)), key_padding_mask=padding, attn_mask=mask, need_weights=return_weights,
        average_attn_weights=False, is_causal=causal and keep is None and bias is None,
    )  # fmt: skip
    y = y if layer.batch_first else y.transpose(0, 1)
    return (y, weights) if return_weights else y


def _added(bias: Any, drop: Any) -> Any:
    return bias if drop is None else bias.masked_fill(drop, float("-inf"))


def timm(layer: Any, /) -> dict[str, Any] | None:
    """Know the `Attention` of timm, which sees only one sequence.

    Args:
        layer: the layer.

    Returns:
        What need not be said about it; None where it normalises or gates.
    """
    plain = all(type(part).__name__ == "Identity" for part in (layer.q_norm, layer.k_norm, layer.norm)) and layer.gate is None
    heads = Heads(d_model=layer.qkv.in_features, h=layer.num_heads, d_k=layer.head_dim)
    if not plain or layer.proj.out_features != heads.d_model:
        return None
    tokens = {"sources": 1, "tokens": ("self",)}
    return {"heads": heads, "layout": "timm", "policy": Policy(scale=layer.scale, empty_row="any"), **tokens, "call": _call_timm}


def _call_timm(layer: Any, *, x: Any, keep: Any, causal: bool) -> Any:
    if keep is None:
        return layer(x, is_causal=causal)
    keep = keep.expand(len(x), layer.num_heads, x.shape[1], x.shape[1])
    return layer(x, attn_mask=keep.tril() if causal else keep)  # a mask and is_causal exclude each other


def x_transformers(layer: Any, /) -> dict[str, Any] | None:
    """Know the `Attention` of x-transformers, which gives query head i the key/value head i % h_kv.

    Args:
        layer: the layer.

    Returns:
        What need not be said about it; None where it was told to do more than attention, of which it knows a hundred ways.
    """
    heads = Heads(
        d_model=layer.to_q.in_features, h=layer.heads, h_kv=layer.kv_heads, d_k=layer.to_q.out_features // layer.heads,
        d_v=layer.to_v.out_features // layer.kv_heads, d_key_in=layer.to_k.in_features,
    )  # fmt: skip
    plain = type(layer)(
        heads.d_model, dim_head=heads.d_k, value_dim_head=heads.d_v, heads=heads.h, kv_heads=heads.h_kv, dim_context=heads.d_key_in,
        causal=layer.causal, flash=layer.attend.flash, dropout=layer.attend.dropout, project_out="to_out.weight" in layer.state_dict(),
        max_attend_past=layer.max_attend_past,
    ).train(layer.training)  # fmt: skip
    if _settings(layer) != _settings(plain):
        return None
    layout = LAYOUTS["x_transformers"]
    if "to_out.weight" not in layer.state_dict():
        layout = {held: layout[held] for held in ("w_q", "w_k", "w_v")}
    policy = Policy(
        grouping="strided", causal_anchor="bottom_right", empty_row="any" if layer.causal else "zero", window=(layer.max_attend_past, None),
        softmax_precision=None if layer.attend.flash else "float32",
    )  # fmt: skip
    found = {"heads": heads, "layout": layout, "policy": policy, "causal": layer.causal, "sources": 2, "call": _call_x_transformers}
    return {**found, "tokens": ("wide", "square", "one query", "self")} if layer.causal else found


def _settings(layer: Any) -> Any:
    """All that distinguishes one such layer from another: its settings, and the shapes of its tensors."""
    kinds = (bool, int, float, str, tuple, type(None))
    settings = [{name: value for name, value in vars(part).items() if isinstance(value, kinds)} for part in (layer, layer.attend)]
    return settings, {name: tensor.shape for name, tensor in layer.state_dict().items()}, repr(layer), repr(layer.attend.attn_fn)


def _call_x_transformers(layer: Any, *, queries: Any, keys: Any, keep: Any, padding: Any, bias: Any) -> Any:
    return layer(queries, keys, context_mask=padding, attn_mask=keep, attn_bias=bias)
