"""Right layers whose parameters are used otherwise than the formula has it."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from attnspec import Heads, Policy

from .entry import Entry, fused

HEADS = Heads(d_model=24, h=4, d_k=5, d_v=3)
WHOLE = {
    "w_q": ("w_q", "h d_model d_k"), "w_k": ("w_k", "h d_model d_k"), "w_v": ("w_v", "h d_model d_v"), "w_o": ("w_o", "(h d_v) d_model")
}  # fmt: skip
BIASED = WHOLE | {"b_q": ("b_q", "h d_k"), "b_k": ("b_k", "h d_k"), "b_v": ("b_v", "h d_v"), "b_o": ("b_o", "d_model")}
SHAPES = {
    "w_q": (4, 24, 5),
    "w_k": (4, 24, 5),
    "w_v": (4, 24, 3),
    "w_o": (12, 24),
    "b_q": (4, 5),
    "b_k": (4, 5),
    "b_v": (4, 3),
    "b_o": (24,),
}


def drawn(layout: Any, /) -> Any:
    """Draw a layer of NumPy that has nothing but its parameters."""
    rng = np.random.default_rng(0)
    return SimpleNamespace(**{name: rng.normal(size=SHAPES[name]) for name in layout})


def no_bias_of_keys(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
    """Leave the bias of the keys away, though there is one: it changes all scores of a row by the same."""
    queries, keys, values = _heads(q, m.w_q, m.b_q), _heads(k, m.w_k, 0.0), _heads(v, m.w_v, m.b_v)
    return _merge(_weights(queries @ keys.mT / math.sqrt(5), keep) @ values, m.w_o) + m.b_o


def folded_scale(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
    """Fold the scale into the matrix and the bias of the queries."""
    scale = 1 / math.sqrt(5)
    queries, keys, values = _heads(q, m.w_q * scale, m.b_q * scale), _heads(k, m.w_k, m.b_k), _heads(v, m.w_v, m.b_v)
    return _merge(_weights(queries @ keys.mT, keep) @ values, m.w_o) + m.b_o


def no_scale(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
    """Do not scale at all, and say so, as T5."""
    queries, keys, values = _heads(q, m.w_q, 0.0), _heads(k, m.w_k, 0.0), _heads(v, m.w_v, 0.0)
    return _merge(_weights(queries @ keys.mT, keep) @ values, m.w_o)


def absorbed(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
    """Multiply the matrices of queries and keys, and those of values and the output, beforehand."""
    scoring, blending = m.w_q @ m.w_k.mT / math.sqrt(5), m.w_v @ m.w_o.reshape(4, 3, 24)
    weights = _weights(q[:, None] @ scoring @ k[:, None].mT, keep)
    return (weights @ (v[:, None] @ blending)).sum(1)


def bias_of_values_at_the_end(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
    """Add the bias of the values to the output: weights sum to one, also where they are uniform."""
    queries, keys, values = _heads(q, m.w_q, m.b_q), _heads(k, m.w_k, m.b_k), _heads(v, m.w_v, 0.0)
    weights = _weights(queries @ keys.mT / math.sqrt(5), keep)
    return _merge(weights @ values, m.w_o) + m.b_v.reshape(-1) @ m.w_o + m.b_o


def _heads(x: Any, w: Any, b: Any) -> Any:
    return x[:, None] @ w + (b[:, None] if isinstance(b, np.ndarray) else b)


def _weights(scores: Any, keep: Any) -> Any:
    scores = scores if keep is None else np.where(keep[:, None], scores, np.finfo(scores.dtype).min)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _merge(found: Any, w_o: Any) -> Any:
    return found.transpose(0, 2, 1, 3).reshape(len(found), -1, len(w_o)) @ w_o


class Strided(nn.Module):
    """A layer whose heads are views with strides, and whose output is a sum over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Any, causal: bool) -> Any:  # noqa: FBT001  # as it is asked
        """Attend."""
        q, k, v = self.qkv(x).as_strided((3, len(x), 4, x.shape[1], 6), (24, 72 * x.shape[1], 6, 72, 1))
        scores = q @ k.mT * 6**-0.5
        if causal:
            scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype).triu(1)
        found = scores.softmax(-1) @ v
        by_head = self.proj.weight.unflatten(1, (4, 6)).permute(1, 2, 0)
        return (found @ by_head).sum(1) + self.proj.bias


_UNIFORM = Policy(empty_row="uniform")


def _of(function: Any, layout: Any, policy: Policy = _UNIFORM) -> Entry:
    settings = {"heads": HEADS, "layout": layout, "call": function, "policy": policy}
    return Entry(f"numpy layer {function.__name__}", lambda: drawn(layout), "check", settings)


ENTRIES = [
    *(_of(function, BIASED) for function in (no_bias_of_keys, folded_scale, bias_of_values_at_the_end)),
    _of(no_scale, WHOLE, Policy(empty_row="uniform", scale=1.0)),
    _of(absorbed, WHOLE),
    Entry(
        "torch layer Strided", lambda: Strided().double(), "check",
        {"heads": Heads(d_model=24, h=4), "layout": fused("qkv", "proj"), "call": lambda m, x, causal: m(x, causal)},
    ),
]  # fmt: skip
