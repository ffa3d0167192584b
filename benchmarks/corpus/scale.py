"""Faults of the scale: of the wrong size, missing, doubled, ignored or in the wrong place."""

from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import nn
from torch.nn import functional

from attnspec import Heads, Policy

from .case import Case
from .textbook import masked_softmax, softmax

HEADS = Heads(d_model=12, h=3)
ALIGNMENT = 8


class _PatchAttention(nn.Module):
    """O-022: the scale is that of the model's width."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, self.make_scale(dim, heads)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def make_scale(self, dim: int, heads: int) -> float:
        del heads
        return dim**-0.5

    def forward(self, x: Any) -> Any:
        q, k, v = (rearrange(part, "b n (h d) -> b h n d", h=self.heads) for part in self.to_qkv(x).chunk(3, dim=-1))
        attn = (torch.einsum("bhid,bhjd->bhij", q, k) * self.scale).softmax(dim=-1)
        return self.to_out(rearrange(torch.einsum("bhij,bhjd->bhid", attn, v), "b h n d -> b n (h d)"))


class _PatchAttentionOfHead(_PatchAttention):
    def make_scale(self, dim: int, heads: int) -> float:
        return (dim // heads) ** -0.5


class _SetAttention(nn.Module):
    """O-023: the scale is that of all heads' values together."""

    def __init__(self, dim_q: int, dim_k: int, dim_v: int, num_heads: int) -> None:
        super().__init__()
        self.dim_v, self.num_heads = dim_v, num_heads
        self.fc_q, self.fc_k, self.fc_v = nn.Linear(dim_q, dim_v), nn.Linear(dim_k, dim_v), nn.Linear(dim_k, dim_v)
        self.fc_o = nn.Linear(dim_v, dim_q)

    def width(self) -> int:
        return self.dim_v

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        q, k, v = self.fc_q(query), self.fc_k(key), self.fc_v(value)
        q, k, v = (torch.cat(x.split(self.dim_v // self.num_heads, 2), 0) for x in (q, k, v))
        found = (q.bmm(k.transpose(1, 2)) / self.width() ** 0.5).softmax(2).bmm(v)
        return self.fc_o(torch.cat(found.split(query.size(0), 0), 2))


class _SetAttentionOfHead(_SetAttention):
    def width(self) -> int:
        return self.dim_v // self.num_heads


def _padded(x: Any) -> Any:
    return np.pad(x, [(0, 0)] * 3 + [(0, -x.shape[-1] % ALIGNMENT)])


def _aligned(q: Any, k: Any, v: Any) -> Any:
    """O-024: the scale is that of the padded heads."""
    q, k, padded_v = _padded(q), _padded(k), _padded(v)
    weights = softmax(q.shape[-1] ** -0.5 * (q @ k.swapaxes(2, 3)))
    return (weights @ padded_v)[..., : v.shape[-1]]


def _aligned_with_own_scale(q: Any, k: Any, v: Any) -> Any:
    scale = q.shape[-1] ** -0.5
    q, k, padded_v = _padded(q), _padded(k), _padded(v)
    weights = softmax(scale * (q @ k.swapaxes(2, 3)))
    return (weights @ padded_v)[..., : v.shape[-1]]


def _kernel(q: Any, k: Any, v: Any, keep: Any = None, scale: float = 1.0) -> Any:
    scores = scale * np.einsum("bhqd,bhkd->bhqk", q, k)
    return softmax(scores if keep is None else np.where(keep, scores, -np.inf)) @ v


def _fallback_unscaled(q: Any, k: Any, v: Any, *, padding: Any = None) -> Any:
    """O-025: where samples have lengths of their own, a kernel is called whose scale is 1 by default."""
    if padding is None:
        return _kernel(q, k, v, scale=q.shape[-1] ** -0.5)
    return _kernel(q, k, v, padding[:, None, None, :])


def _fallback_scaled(q: Any, k: Any, v: Any, *, padding: Any = None) -> Any:
    if padding is None:
        return _kernel(q, k, v, scale=q.shape[-1] ** -0.5)
    return _kernel(q, k, v, padding[:, None, None, :], scale=q.shape[-1] ** -0.5)


class _SharedInterface(nn.Module):
    """O-026: queries are scaled, and the fused function scales once more."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scaling = heads, (hidden // heads) ** -0.5
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden) for _ in range(4))

    def fused(self, q: Any, k: Any, v: Any, keep: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    def forward(self, x: Any, attention_mask: Any = None, *, output_attentions: bool = False) -> Any:
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, keep, weights = q * self.scaling, None if attention_mask is None else attention_mask[:, None], None
        if output_attentions:
            weights = masked_softmax(q @ k.transpose(2, 3), keep)
            found = weights @ v
        else:
            found = self.fused(q, k, v, keep)
        return self.o_proj(found.transpose(1, 2).flatten(2)), weights


class _SharedInterfaceOnce(_SharedInterface):
    def fused(self, q: Any, k: Any, v: Any, keep: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=1.0)


class _FusedOrNot(nn.Module):
    """O-027: the fused branch does not pass the scale on."""

    def __init__(self, dim: int, num_heads: int, scale: float) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, scale
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def fused(self, q: Any, k: Any, v: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Any, *, return_weights: bool = False) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if not return_weights:
            return self.proj(self.fused(q, k, v).transpose(1, 2).flatten(2))
        weights = (self.scale * q @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2)), weights


class _FusedOrNotScaled(_FusedOrNot):
    def fused(self, q: Any, k: Any, v: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, scale=self.scale)


def _scale_not_used(q: Any, k: Any, v: Any, *, scale: float | None = None) -> Any:  # noqa: ARG001
    """O-028: there is an argument for the scale."""
    return softmax((q / np.sqrt(q.shape[-1])) @ k.swapaxes(-1, -2)) @ v


def _scale_used(q: Any, k: Any, v: Any, *, scale: float | None = None) -> Any:
    return softmax((q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.swapaxes(-1, -2)) @ v


def _fuse_graph(attributes: dict[str, Any]) -> Any:
    """O-029: a graph is replaced by one node; `attributes` are those it has if the graph says nothing about them."""
    import jax
    import jax.numpy as jnp

    graph: list[tuple[str, Any]] = [("matmul", "key"), ("softmax", -1), ("matmul", "value")]
    found = dict(attributes)
    for operation, operand in graph:
        if operation == "mul":
            found["scale"] = operand

    def node(query: jax.Array, key: jax.Array, value: jax.Array, scale: float | None = None) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value)

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return node(query, key, value, **found)

    return attention


class _ScaledWeights(nn.Module):
    """O-030: the weights are scaled, not the scores."""

    def __init__(self, emb_size: int, num_heads: int) -> None:
        super().__init__()
        self.emb_size, self.num_heads = emb_size, num_heads
        self.qkv, self.projection = nn.Linear(emb_size, emb_size * 3), nn.Linear(emb_size, emb_size)

    def weigh(self, energy: Any) -> Any:
        return functional.softmax(energy, dim=-1) / (self.emb_size // self.num_heads) ** 0.5

    def forward(self, x: Any) -> Any:
        q, k, v = rearrange(self.qkv(x), "b n (h d qkv) -> (qkv) b h n d", h=self.num_heads, qkv=3)
        att = self.weigh(torch.einsum("bhqd,bhkd->bhqk", q, k))
        return self.projection(rearrange(torch.einsum("bhal,bhlv->bhav", att, v), "b h n d -> b n (h d)"))


class _ScaledEnergy(_ScaledWeights):
    def weigh(self, energy: Any) -> Any:
        return functional.softmax(energy / (self.emb_size // self.num_heads) ** 0.5, dim=-1)


_PATCH = {
    "w_qkv": ("to_qkv.weight", "(three h d_k) d_model"),
    "w_o": ("to_out.weight", "d_model (h d_v)"),
    "b_o": ("to_out.bias", "d_model"),
}
_SET = {
    "w_q": ("fc_q.weight", "(h d_k) d_model"), "b_q": ("fc_q.bias", "(h d_k)"),
    "w_k": ("fc_k.weight", "(h_kv d_k) d_key_in"), "b_k": ("fc_k.bias", "(h_kv d_k)"),
    "w_v": ("fc_v.weight", "(h_kv d_v) d_value_in"), "b_v": ("fc_v.bias", "(h_kv d_v)"),
    "w_o": ("fc_o.weight", "d_model (h d_v)"), "b_o": ("fc_o.bias", "d_model"),
}  # fmt: skip
_INNERMOST = {
    "w_qkv": ("qkv.weight", "(h d_k three) d_model"), "b_qkv": ("qkv.bias", "(h d_k three)"),
    "w_o": ("projection.weight", "d_model (h d_v)"), "b_o": ("projection.bias", "d_model"),
}  # fmt: skip

CASES = [
    Case(
        "O-022", "scale_wrong_dim", "scale_wrong_dim", "https://github.com/lucidrains/vit-pytorch/issues/65",
        lambda: _PatchAttention(12, 3).double(), lambda: _PatchAttentionOfHead(12, 3).double(),
        "check", {"heads": HEADS, "layout": _PATCH},
    ),
    Case(
        "O-023", "scale_wrong_dim", "scale_wrong_dim", "https://github.com/juho-lee/set_transformer/issues/18",
        lambda: _SetAttention(12, 10, 15, 3).double(), lambda: _SetAttentionOfHead(12, 10, 15, 3).double(),
        "check", {"heads": Heads(d_model=12, h=3, d_k=5, d_key_in=10), "layout": _SET},
    ),
    Case(
        "O-024", "scale_wrong_dim", "scale_wrong_dim", "https://github.com/bytedance-iaas/sglang/pull/485",
        lambda: _aligned, lambda: _aligned_with_own_scale, settings={"library": "numpy"},
    ),
    Case(
        "O-025", "scale_missing", "scale_missing_or_double", "https://github.com/mlc-ai/mlc-llm/pull/3426",
        lambda: _fallback_unscaled, lambda: _fallback_scaled, settings={"library": "numpy"},
    ),
    Case(
        "O-026", "scale_applied_twice", "scale_missing_or_double", "https://github.com/huggingface/transformers/pull/38290",
        lambda: _SharedInterface(12, 3).double(), lambda: _SharedInterfaceOnce(12, 3).double(),
        "check", {"heads": HEADS, "layout": "llama"},
    ),
    Case(
        "O-027", "scale_argument_ignored", "scale_option_ignored", "https://github.com/huggingface/pytorch-image-models/issues/2280",
        lambda: _FusedOrNot(12, 3, 0.2).double(), lambda: _FusedOrNotScaled(12, 3, 0.2).double(),
        "check", {"heads": HEADS, "layout": "timm", "policy": Policy(scale=0.2)},
    ),
    Case(
        "O-028", "scale_argument_ignored", "scale_option_ignored", "https://github.com/tenstorrent/tt-metal/issues/33304",
        lambda: _scale_not_used, lambda: _scale_used, settings={"library": "numpy"},
    ),
    Case(
        "O-029", "scale_default_injected", "scale_option_ignored", "https://github.com/tracel-ai/burn-onnx/pull/453",
        lambda: _fuse_graph({}), lambda: _fuse_graph({"scale": 1.0}),
        settings={"order": "bshd", "policy": Policy(scale=1.0), "library": "jax"},
    ),
    Case(
        "O-030", "scale_after_softmax", "scale_wrong_place", "https://github.com/FrancescoSaverioZuppichini/ViT/issues/2",
        lambda: _ScaledWeights(12, 3).double(), lambda: _ScaledEnergy(12, 3).double(),
        "check", {"heads": HEADS, "layout": _INNERMOST},
    ),
]  # fmt: skip
