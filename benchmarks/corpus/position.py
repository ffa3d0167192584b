"""Positions: rotations that pair, count or place wrongly, and biases of the distance."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from attnspec import Heads, Policy, Rotation

from .case import Case
from .textbook import masked_softmax, softmax


class _RotateHalfAttention(nn.Module):
    """O-085: the angles are laid out for neighbours, the rotation takes halves."""

    def __init__(self, *, fault: bool, width: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.fault, self.heads, self.head_dim = fault, heads, width // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def _rotate(self, x: Any) -> Any:
        rates = 10000.0 ** (-torch.arange(0, self.head_dim, 2, dtype=x.dtype) / self.head_dim)
        angles = torch.outer(torch.arange(x.shape[2], dtype=x.dtype), rates)
        angles = angles.repeat_interleave(2, dim=-1) if self.fault else torch.cat((angles, angles), dim=-1)
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    def forward(self, x: Any) -> Any:
        batch, seq, width = x.shape
        q, k, v = (p(x).view(batch, seq, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, width))


def _turn_neighbours(x: Any, first: int, *, joined: bool) -> Any:
    """Rotate neighbouring channels; `joined` puts them back beside each other."""
    positions, half = first + np.arange(x.shape[2]), x.shape[3] // 2
    angles = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    even, odd = x[..., ::2], x[..., 1::2]
    even, odd = even * np.cos(angles) - odd * np.sin(angles), even * np.sin(angles) + odd * np.cos(angles)
    return np.stack((even, odd), axis=-1).reshape(x.shape) if joined else np.concatenate((even, odd), axis=-1)


class _TwoProducers:
    """O-086: a single token's channels come out as all even ones, then all odd ones; those of a prompt do not."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.keys: Any = None
        self.values: Any = None

    def __call__(self, queries: Any, keys: Any, values: Any) -> Any:
        past, new = (0 if self.keys is None else self.keys.shape[2]), queries.shape[2]
        joined = new > 1 or not self.fault
        queries, keys = _turn_neighbours(queries, past, joined=joined), _turn_neighbours(keys, past, joined=joined)
        self.keys = keys if self.keys is None else np.concatenate((self.keys, keys), axis=2)
        self.values = values if self.values is None else np.concatenate((self.values, values), axis=2)
        scores = queries @ self.keys.swapaxes(2, 3) / math.sqrt(queries.shape[-1])
        return softmax(np.where(np.tri(new, past + new, past, dtype=bool), scores, -np.inf)) @ self.values


def _partial_rotation(*, fault: bool, rotated: int = 4, base: float = 10000.0) -> Any:
    """O-087: the width of the head stands where the width of what turns should."""

    def rotate(x: Any, positions: Any) -> Any:
        whole, half = (x.shape[-1] if fault else rotated), rotated // 2
        angles = np.asarray(positions)[..., None, :, None] * base ** (-2 * np.arange(half) / whole)
        first, second = np.arange(half), np.arange(half) + whole // 2
        turned = x.copy()
        turned[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
        turned[..., second] = x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles)
        return turned

    def attention(queries: Any, keys: Any, values: Any, *, positions: Any = None) -> Any:
        queries = rotate(queries, np.arange(queries.shape[2]) if positions is None else positions)
        keys = rotate(keys, np.arange(keys.shape[2]) if positions is None else positions)
        return softmax(np.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1])) @ values

    return attention


class _GeneratingAttention(nn.Module):
    """O-088: new tokens are counted from 0, whatever is cached."""

    def __init__(self, *, fault: bool, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.fault, self.heads = fault, heads
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def _rope(self, x: Any, offset: int) -> Any:
        half = x.shape[-1] // 2
        positions = torch.arange(x.shape[2], dtype=x.dtype) + offset
        angles = positions[:, None] / 10000.0 ** (torch.arange(half, dtype=x.dtype) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)

    def forward(self, x: Any, cache: Any = None) -> Any:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        past = 0 if cache is None else cache[0].shape[2]
        offset = 0 if self.fault else past
        q, k = self._rope(q, offset), self._rope(k, offset)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(past)
        y = scores.masked_fill(~keep, -math.inf).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)


class _OffsetDecoder:
    """O-089: with every step the offset grows by the length of the prompt."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.prompt = self.offset = 0
        self.cache: list[Any] = []

    def __call__(self, queries: Any, keys: Any, values: Any) -> Any:
        new = queries.shape[2]
        queries, keys = (_turn_neighbours(x, self.offset, joined=True) for x in (queries, keys))
        self.prompt = self.prompt or new
        self.offset += self.prompt if self.fault else new
        self.cache.append((keys, values))
        keys, values = (np.concatenate(tokens, axis=2) for tokens in zip(*self.cache, strict=True))
        scores = np.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
        keep = np.tri(new, keys.shape[2], keys.shape[2] - new, dtype=bool)
        return softmax(np.where(keep, scores, -np.inf)) @ values


class _PackedSamples:
    """O-090: the table of angles is read from its start, not at the positions that are given."""

    def __init__(self, *, fault: bool, d_model: int = 8, heads: int = 2) -> None:
        rng = np.random.default_rng(0)
        self.fault, self.heads = fault, heads
        self.query_key_value = rng.normal(size=(d_model, 3 * d_model)) / math.sqrt(d_model)
        self.bias = rng.normal(size=3 * d_model)
        self.dense = rng.normal(size=(d_model, d_model)) / math.sqrt(d_model)

    def _apply_rotary(self, x: Any, angles: Any) -> Any:
        first, second = np.split(x, 2, axis=-1)
        return x * np.cos(angles) + np.concatenate((-second, first), axis=-1) * np.sin(angles)

    def __call__(self, x: Any, positions: Any = None) -> Any:
        batch, seq, d_model = x.shape
        mixed = (x @ self.query_key_value + self.bias).reshape(batch, seq, self.heads, 3, -1)
        q, k, v = np.moveaxis(mixed, 3, 0)
        if positions is None or self.fault:
            positions = np.arange(seq)[None]
        rates = 10000.0 ** (-2 * np.arange(q.shape[-1] // 2) / q.shape[-1])
        angles = np.tile(np.asarray(positions)[:, :, None, None] * rates, 2)
        scores = np.einsum("bihd,bjhd->bhij", self._apply_rotary(q, angles), self._apply_rotary(k, angles)) / math.sqrt(q.shape[-1])
        weights = softmax(np.where(np.tri(seq, dtype=bool), scores, -np.inf))
        return np.einsum("bhij,bjhd->bihd", weights, v).reshape(batch, seq, d_model) @ self.dense


class _Rotary:
    """O-091: the sequence is looked for on the axis before the last, where the heads are."""

    def __init__(self, *, fault: bool) -> None:
        self.seq_dimension = -2 if fault else -3

    def __call__(self, x: Any) -> Any:
        seq, dim = x.shape[self.seq_dimension], x.shape[-1]
        rates = 1.0 / (10000 ** (torch.arange(0, dim, 2, dtype=x.dtype) / dim))
        angles = torch.outer(torch.arange(seq, dtype=x.dtype), rates).repeat(1, 2)
        if self.seq_dimension == -3:  # noqa: PLR2004
            angles = angles[:, None]
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def _rotary_attention(*, fault: bool) -> Any:
    rotary = _Rotary(fault=fault)

    def attention(q: Any, k: Any, v: Any) -> Any:
        weights = torch.einsum("bihd,bjhd->bhij", rotary(q), rotary(k)).div(math.sqrt(q.shape[-1])).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)

    return attention


def _alibi(*, fault: bool) -> Any:
    """O-092: the first head's slope is 1, and so on from there."""

    def slopes(heads: int) -> list[float]:
        power = 2 ** int(math.log2(heads))
        own = [2.0 ** (-8 * (head if fault else head + 1) / power) for head in range(power)]
        return own if power == heads else own + slopes(2 * power)[::2][: heads - power]

    def attention(queries: Any, keys: Any, values: Any, *, causal: bool = False, alibi: bool = False) -> Any:
        scores = queries @ keys.swapaxes(-1, -2) / math.sqrt(queries.shape[-1])
        rows, columns = np.ogrid[: scores.shape[-2], : scores.shape[-1]]
        if alibi:
            scores = scores - np.array(slopes(queries.shape[1]))[:, None, None] * np.abs(rows - columns)
        if causal:
            scores = np.where(columns <= rows, scores, -np.inf)
        return softmax(scores) @ values

    return attention


def _distance_bias(*, fault: bool) -> Any:
    """O-093: the bias counts queries from 0, where they are the last of the keys."""

    def attention(queries: Any, keys: Any, values: Any, *, causal: bool = False, slopes: Any = None) -> Any:
        seq_q, seq_k = queries.shape[2], keys.shape[2]
        behind = jnp.arange(seq_q)[:, None] + (seq_k - seq_q) - jnp.arange(seq_k)
        kept = (behind >= 0) | (not causal)
        scores = jnp.matmul(queries, keys.swapaxes(-1, -2)) / math.sqrt(queries.shape[-1])
        if slopes is not None:
            distance = jnp.arange(seq_q)[:, None] - jnp.arange(seq_k) if fault else behind
            scores = scores - slopes[:, None, None] * jnp.abs(distance)
        weights = jnp.where(kept.any(-1, keepdims=True), jax.nn.softmax(jnp.where(kept, scores, -1e30), axis=-1), 0)
        return jnp.matmul(weights, values)

    return attention


def _handed_on_bias(*, fault: bool) -> Any:
    """O-094: the second block takes the weights for the bias that the first one made, where weights are returned too."""

    def block(queries: Any, keys: Any, values: Any, position_bias: Any, keep: Any, *, return_weights: bool) -> tuple[Any, ...]:
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
        if position_bias is None:
            position_bias = torch.zeros_like(scores)
        weights = masked_softmax(scores + position_bias, keep)
        return (weights @ values, *([weights] if return_weights else []), position_bias)

    def stack(queries: Any, keys: Any, values: Any, *, bias: Any = None, keep: Any = None, return_weights: bool = False) -> Any:
        for _ in range(2):  # only the last block's answer is looked at
            outputs = block(queries, keys, values, bias, keep, return_weights=return_weights)
            bias = outputs[1] if fault else outputs[-1]
        return outputs[:2] if return_weights else outputs[0]

    return stack


_LLAMA = {
    **{f"w_{role}": (f"{role}_proj.weight", "(h d_k) d_model") for role in "qkv"},
    "w_o": ("o_proj.weight", "d_model (h d_v)"),
}
_FUSED = {"w_qkv": ("qkv_proj.weight", "(three h d_k) d_model"), "w_o": ("o_proj.weight", "d_model (h d_v)")}
_MEGATRON = {
    "w_qkv": ("query_key_value", "d_model (h three d_k)"),
    "b_qkv": ("bias", "(h three d_k)"),
    "w_o": ("dense", "(h d_v) d_model"),
}

CASES = [
    Case(
        "O-085", "rope_pairing_mismatch", "rope_pairing", "https://github.com/raiyanyahya/how-to-train-your-gpt/pull/7",
        lambda: _RotateHalfAttention(fault=True).double(), lambda: _RotateHalfAttention(fault=False).double(),
        "check", {"heads": Heads(d_model=12, h=2), "layout": _LLAMA, "causal": True, "policy": Policy(rotation=Rotation())},
    ),
    Case(
        "O-086", "rope_output_order", "rope_pairing", "https://github.com/vllm-project/vllm-metal/pull/44",
        lambda: partial(_TwoProducers, fault=True), lambda: partial(_TwoProducers, fault=False),
        "check_cache", {"policy": Policy(rotation=Rotation(pairing="interleaved")), "library": "numpy"},
    ),
    Case(
        "O-087", "rope_partial_width", "rope_pairing", "https://github.com/pie-project/pie/pull/603",
        partial(_partial_rotation, fault=True), partial(_partial_rotation, fault=False),
        settings={"policy": Policy(rotation=Rotation(width=4)), "heads": Heads(d_model=20, h=2, d_k=10, d_v=3), "library": "numpy"},
    ),
    Case(
        "O-088", "rope_position_offset", "rope_position", "https://github.com/Blaizzy/mlx-vlm/issues/1983",
        lambda: _GeneratingAttention(fault=True).double(), lambda: _GeneratingAttention(fault=False).double(),
        "check", {"heads": Heads(d_model=12, h=3), "layout": _FUSED, "causal": True, "policy": Policy(rotation=Rotation())},
    ),
    Case(
        "O-089", "rope_position_offset", "rope_position", "https://github.com/skyzh/tiny-llm/pull/46",
        lambda: partial(_OffsetDecoder, fault=True), lambda: partial(_OffsetDecoder, fault=False),
        "check_cache", {"policy": Policy(rotation=Rotation(pairing="interleaved")), "library": "numpy"},
    ),
    Case(
        "O-090", "rope_position_ids_ignored", "rope_position", "https://github.com/NVIDIA/Megatron-LM/issues/453",
        partial(_PackedSamples, fault=True), partial(_PackedSamples, fault=False),
        "check", {"heads": Heads(d_model=8, h=2), "layout": _MEGATRON, "causal": True, "policy": Policy(rotation=Rotation())},
    ),
    Case(
        "O-091", "rope_wrong_axis", "rope_wrong_axis", "https://github.com/facebookresearch/xformers/issues/841",
        partial(_rotary_attention, fault=True), partial(_rotary_attention, fault=False),
        settings={"order": "bshd", "policy": Policy(rotation=Rotation()), "library": "torch"},
    ),
    Case(
        "O-092", "alibi_slope", "additive_position_bias", "https://github.com/paiml/aprender/pull/2143",
        partial(_alibi, fault=True), partial(_alibi, fault=False),
        settings={"library": "numpy", "call": lambda f, q, k, v, causal, slopes: f(q, k, v, causal=causal, alibi=slopes is not None)},
    ),
    Case(
        "O-093", "relative_bias_offset", "additive_position_bias", "https://github.com/huggingface/candle/pull/899",
        partial(_distance_bias, fault=True), partial(_distance_bias, fault=False),
        settings={"policy": Policy(causal_anchor="bottom_right"), "library": "jax"},
    ),
    Case(
        "O-094", "relative_bias_wrong_stream", "additive_position_bias", "https://github.com/huggingface/transformers/pull/4499",
        partial(_handed_on_bias, fault=True), partial(_handed_on_bias, fault=False), settings={"library": "torch"},
    ),
]  # fmt: skip
