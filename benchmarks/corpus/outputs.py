"""Outputs: weights that are not those that were asked for, and an output that is too short."""

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from attnspec import Heads

from .case import Case
from .textbook import masked_softmax


def _weights_of_training(*, fault: bool) -> Any:
    """O-107: the weights come back as dropout left them."""

    def attention(
        queries: Any, keys: Any, values: Any, *, dropout: float = 0.0, survivors: Any = None, return_weights: bool = False
    ) -> Any:
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1]), dim=-1)
        dropped = weights if survivors is None else weights * survivors / (1 - dropout)
        found = torch.einsum("bhij,bhjd->bhid", dropped, values)
        if not return_weights:
            return found
        return found, dropped if fault else weights

    return attention


class _TranslationAttention(nn.Module):
    """O-108: the fast branch returns the mean over the heads, whatever was asked for."""

    def __init__(self, *, fault: bool, embed_dim: int = 12, num_heads: int = 3) -> None:
        super().__init__()
        self.fault, self.num_heads = fault, num_heads
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(
        self, query: Any, key: Any, value: Any, keep: Any = None, *, need_weights: bool = False, need_head_weights: bool = False
    ) -> Any:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
        fast = keep is None
        weights = scores.softmax(-1) if fast else masked_softmax(scores, keep[:, None])
        y = self.out_proj((weights @ v).transpose(1, 2).flatten(2))
        if not (need_weights or need_head_weights):
            return y
        return y, weights if need_head_weights and not (fast and self.fault) else weights.mean(1)


class _EncoderAttention(nn.Module):
    """O-109: columns that are padding in every sample are cut off in evaluation, those of the output too."""

    def __init__(self, *, fault: bool, d_model: int = 8, nhead: int = 2) -> None:
        super().__init__()
        self.fault, self.nhead = fault, nhead
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Any, padding: Any = None) -> Any:
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.nhead, -1)).permute(2, 0, 3, 1, 4)
        if padding is not None and not self.training:
            longest = 1 + int(padding.any(0).nonzero().max())
            k, v, padding = k[:, :, :longest], v[:, :, :longest], padding[:, :longest]
            if self.fault:
                q = q[:, :, :longest]
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = masked_softmax(scores, None if padding is None else padding[:, None, None, :])
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


_FAIRSEQ = {
    **{f"w_{role}": (f"{role}_proj.weight", "(h d_k) d_model") for role in "qkv"},
    **{f"b_{role}": (f"{role}_proj.bias", "(h d_k)") for role in "qkv"},
    "w_o": ("out_proj.weight", "d_model (h d_v)"),
    "b_o": ("out_proj.bias", "d_model"),
}
_ENCODER = {
    "w_qkv": ("in_proj.weight", "(three h d_k) d_model"),
    "b_qkv": ("in_proj.bias", "(three h d_k)"),
    "w_o": ("out_proj.weight", "d_model (h d_v)"),
    "b_o": ("out_proj.bias", "d_model"),
}

CASES = [
    Case(
        "O-107", "weights_returned_after_dropout", "returned_weights", "https://github.com/pytorch/pytorch/issues/42929",
        partial(_weights_of_training, fault=True), partial(_weights_of_training, fault=False), settings={"library": "torch"},
    ),
    Case(
        "O-108", "weights_wrong_reduction", "returned_weights", "https://github.com/facebookresearch/fairseq/issues/3365",
        lambda: _TranslationAttention(fault=True).double(), lambda: _TranslationAttention(fault=False).double(),
        "check", {
            "heads": Heads(d_model=12, h=3), "layout": _FAIRSEQ,
            "call": lambda layer, q, k, v, keep, return_weights: layer(q, k, v, keep, need_head_weights=return_weights),
        },
    ),
    Case(
        "O-109", "output_truncated", "output_shape", "https://github.com/pytorch/pytorch/issues/97111",
        lambda: _EncoderAttention(fault=True).double().eval(), lambda: _EncoderAttention(fault=False).double().eval(),
        "check", {"heads": Heads(d_model=8, h=2), "layout": _ENCODER},
    ),
]  # fmt: skip
