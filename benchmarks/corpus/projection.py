"""Faults of projections: the wrong tensor or weight is read, or a bias is there that should not be."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from attnspec import Heads, Policy, Rotation

from .case import Case
from .textbook import softmax

HEADS = Heads(d_model=12, h=3)


def _rotary(x: Any) -> Any:
    """Turn the halves of each head by its position."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]).double(), 10_000.0 ** -(torch.arange(half).double() / half))
    cos, sin = angles.cos().repeat(1, 2).to(x), angles.sin().repeat(1, 2).to(x)
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class _RewrittenDecoderAttention(nn.Module):
    """O-013: the second and third output of the splitter are taken for each other."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x: Any) -> Any:
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in projected]

    def forward(self, x: Any) -> Any:
        q, v, k = self.split(x)
        return self.attend(q, k, v)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        found = functional.scaled_dot_product_attention(_rotary(q), _rotary(k), v, is_causal=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


class _DecoderAttention(_RewrittenDecoderAttention):
    def forward(self, x: Any) -> Any:
        q, k, v = self.split(x)
        return self.attend(q, k, v)


class _CrossAttention:
    """O-014: values are made of the queries' input."""

    def __init__(self, d_model: int, heads: int) -> None:
        self.heads = heads
        kernels = np.random.default_rng(0).normal(size=(4, d_model, d_model)) / d_model
        self.query_kernel, self.key_kernel, self.value_kernel, self.output_kernel = kernels

    def __call__(self, query: Any, key: Any, value: Any) -> Any:  # noqa: ARG002
        return self.attend(query @ self.query_kernel, key @ self.key_kernel, query @ self.value_kernel)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.reshape(*x.shape[:2], self.heads, -1) for x in (q, k, v))
        weights = softmax(np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]))
        return np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], -1) @ self.output_kernel


class _CrossAttentionOfValues(_CrossAttention):
    def __call__(self, query: Any, key: Any, value: Any) -> Any:
        return self.attend(query @ self.query_kernel, key @ self.key_kernel, value @ self.value_kernel)


class _ReusedProjection(_CrossAttention):
    """O-015: queries and keys share a matrix."""

    def __call__(self, x: Any) -> Any:
        return self.attend(x @ self.query_kernel, x @ self.query_kernel, x @ self.value_kernel)


class _OwnProjections(_ReusedProjection):
    def __call__(self, x: Any) -> Any:
        return self.attend(x @ self.query_kernel, x @ self.key_kernel, x @ self.value_kernel)


class _BiasOfInputsOnly(nn.Module):
    """O-016: the flag does not reach the output projection."""

    def __init__(self, d_model: int, heads: int, *, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.out_proj = self.make_output(d_model, bias=bias)

    def make_output(self, d_model: int, *, bias: bool) -> nn.Module:
        del bias
        return nn.Linear(d_model, d_model)

    def forward(self, x: Any) -> Any:
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out_proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _BiasOfAllOrNone(_BiasOfInputsOnly):
    def make_output(self, d_model: int, *, bias: bool) -> nn.Module:
        return nn.Linear(d_model, d_model, bias=bias)


class _FastInEval(_BiasOfAllOrNone):
    """O-017: outside training padding is left to a shorter path, which takes it for granted that there are biases."""

    def is_fast(self) -> bool:
        return not self.training

    def forward(self, x: Any, key_padding_mask: Any = None) -> Any:
        if key_padding_mask is None:
            return super().forward(x)
        keep = key_padding_mask[:, None, None, :]
        if not self.is_fast():
            q, k, v = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            return self.out_proj(functional.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2))
        weight, bias = self.in_proj.weight.view(3, self.heads, -1, x.shape[-1]), self.in_proj.bias.view(3, self.heads, 1, -1)
        q, k, v = (torch.einsum("btm,hdm->bhtd", x, w) + b for w, b in zip(weight, bias, strict=True))
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2)
        return torch.addmm(self.out_proj.bias, found.flatten(0, 1), self.out_proj.weight.T).view_as(x)


class _FastInEvalGuarded(_FastInEval):
    def is_fast(self) -> bool:
        return not self.training and self.in_proj.bias is not None


_KERNELS = {
    "w_q": ("query_kernel", "d_model (h d_k)"),
    "w_k": ("key_kernel", "d_key_in (h_kv d_k)"),
    "w_v": ("value_kernel", "d_value_in (h_kv d_v)"),
    "w_o": ("output_kernel", "(h d_v) d_model"),
}
_NO_BIAS = {"w_qkv": ("in_proj.weight", "(three h d_k) d_model"), "w_o": ("out_proj.weight", "d_model (h d_v)")}

CASES = [
    Case(
        "O-013", "operand_swap_kv", "operand_routing", "https://github.com/tenstorrent/tt-mlir/issues/8958",
        lambda: _RewrittenDecoderAttention(12, 3).double(), lambda: _DecoderAttention(12, 3).double(),
        "check", {"heads": HEADS, "layout": "llama", "causal": True, "policy": Policy(rotation=Rotation())},
    ),
    Case(
        "O-014", "operand_wrong_source", "operand_routing", "https://github.com/tensorflow/tensorflow/pull/35859",
        lambda: _CrossAttention(12, 3), lambda: _CrossAttentionOfValues(12, 3),
        "check", {"heads": HEADS, "layout": _KERNELS},
    ),
    Case(
        "O-015", "projection_shared", "operand_routing", "https://github.com/stevezheng23/sequence_labeling_tf/pull/81",
        lambda: _ReusedProjection(12, 3), lambda: _OwnProjections(12, 3), "check", {"heads": HEADS, "layout": _KERNELS},
    ),
    Case(
        "O-016", "projection_bias_flag", "projection_bias", "https://github.com/pytorch/pytorch/issues/52257",
        lambda: _BiasOfInputsOnly(12, 3, bias=False).double(), lambda: _BiasOfAllOrNone(12, 3, bias=False).double(),
        "check", {"heads": HEADS, "layout": {**_NO_BIAS, "other": ("out_proj.*", None)}},  # a bias that should not be there stays
    ),
    Case(
        "O-017", "projection_bias_flag", "projection_bias", "https://github.com/pytorch/pytorch/issues/97128",
        lambda: _FastInEval(12, 3, bias=False).double(), lambda: _FastInEvalGuarded(12, 3, bias=False).double(),
        "check", {"heads": HEADS, "layout": _NO_BIAS},
    ),
]  # fmt: skip
