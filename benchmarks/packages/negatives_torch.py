"""Right implementations in PyTorch that look wrong, or that compute the same otherwise."""

import math
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from attnspec import Heads, Policy, Rotation

from .entry import Entry


def scaled_queries(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Scale the queries, not the scores."""
    scores = (queries / math.sqrt(queries.shape[-1])) @ keys.mT
    return _masked(scores, keep, -math.inf).softmax(-1) @ values


def base_two(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Powers of two, with the logarithm in the scale, as fused kernels do."""
    scores = queries @ keys.mT * (math.log2(math.e) / math.sqrt(queries.shape[-1]))
    scores = _masked(scores, keep, -math.inf)
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True) @ values


def merged_chunks(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Chunks of four keys by themselves, merged by their log-sum-exp; a finite fill, since a chunk may be dropped whole."""
    found, totals = [], []
    for start in range(0, keys.shape[2], 4):
        chunk = slice(start, start + 4)
        scores = queries @ keys[:, :, chunk].mT / math.sqrt(queries.shape[-1])
        scores = _masked(scores, None if keep is None else keep[..., chunk], torch.finfo(scores.dtype).min / 2)
        totals.append(scores.logsumexp(-1, keepdim=True))
        found.append(scores.softmax(-1) @ values[:, :, chunk])
    shares = torch.stack(totals).softmax(0)
    return sum(share * each for share, each in zip(shares, found, strict=True))


def padded_width(queries: Any, keys: Any, values: Any, *, keep: Any = None, causal: bool = False) -> Any:
    """Heads filled up to a multiple of eight channels, and the scale of the width that they had."""
    width, d_v = queries.shape[-1], values.shape[-1]
    q, k, v = (F.pad(x, (0, -x.shape[-1] % 8)) for x in (queries, keys, values))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if causal else torch.ones(1, 1, dtype=torch.bool)
    mask = seen if keep is None else seen & keep
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(*q.shape[:3], k.shape[2]), scale=width**-0.5)[..., :d_v]


def halves(queries: Any, keys: Any, values: Any, *, positions: Any = None) -> Any:
    """Rotate channels of the two halves with each other, angles concatenated twice, as GPT-NeoX and Llama."""
    width = queries.shape[-1]
    places = torch.arange(max(queries.shape[2], keys.shape[2]))[None] if positions is None else positions
    angles = places[..., None].to(queries) * 10_000.0 ** (-torch.arange(0, width, 2).to(queries) / width)
    cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))

    def turned(x: Any) -> Any:
        left, right = x.chunk(2, -1)
        return x * cos[:, :, : x.shape[2]] + torch.cat([-right, left], -1) * sin[:, :, : x.shape[2]]

    return F.scaled_dot_product_attention(turned(queries), turned(keys), values)


def lowest_added(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """The lowest number added to dropped scores, as BERT has it."""
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    if keep is not None:
        scores = scores + (1.0 - keep.to(scores.dtype)) * torch.finfo(scores.dtype).min
    return scores.softmax(-1) @ values


def billion_fill(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """-1e9 in place of dropped scores, as the annotated transformer has it; scores are float32 at least."""
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return _masked(scores, keep, -1e9).softmax(-1).to(values.dtype) @ values


def ones_hide_no_future(queries: Any, keys: Any, values: Any, *, padding: Any = None) -> Any:
    """A padding mask, of ones where nothing is padding; the triangle is added inside."""
    padding = torch.ones(len(keys), keys.shape[2], dtype=torch.bool) if padding is None else padding
    seen = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=padding[:, None, None] & seen)


def einsums(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """All products as einsums."""
    scores = torch.einsum("bhid,bhjd->bhij", queries, keys) / math.sqrt(queries.shape[-1])
    return torch.einsum("bhij,bhjv->bhiv", _masked(scores, keep, -math.inf).softmax(-1), values)


def single_throughout(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """All in float32, and the result as wide as the input."""
    q, k, v = (x.float() for x in (queries, keys, values))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    return (_masked(scores, keep, -math.inf).softmax(-1) @ v).to(queries.dtype)


def logarithms(queries: Any, keys: Any, values: Any, *, keep: Any = None) -> Any:
    """Weights by their logarithms; rows without keys are set aside before, so that their gradients are zeros too."""
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    if keep is None:
        return scores.log_softmax(-1).exp() @ values
    empty = ~keep.any(-1, keepdim=True)
    weights = scores.masked_fill(~keep & ~empty, -math.inf).log_softmax(-1).exp()
    return weights.masked_fill(empty, 0.0) @ values


def grouped_by_reshape(queries: Any, keys: Any, values: Any, *, h_kv: int) -> Any:
    """Queries in groups of heads, and no key repeated."""
    q = queries.unflatten(1, (h_kv, -1))
    weights = torch.einsum("bgrid,bgjd->bgrij", q, keys).div(math.sqrt(q.shape[-1])).softmax(-1)
    return torch.einsum("bgrij,bgjv->bgriv", weights, values).flatten(1, 2)


def sink_as_a_column(queries: Any, keys: Any, values: Any, *, sinks: Any = None) -> Any:
    """A sink that is one more column of scores, dropped after the softmax."""
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    if sinks is None:
        return scores.softmax(-1) @ values
    column = sinks[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ values


def repeated_then_halved(queries: Any, keys: Any, values: Any) -> Any:
    """All keys twice, one copy behind the other."""
    return F.scaled_dot_product_attention(queries, keys.repeat(1, 1, 2, 1), values.repeat(1, 1, 2, 1))


def _masked(scores: Any, keep: Any, fill: float) -> Any:
    return scores if keep is None else scores.masked_fill(~keep, fill)


_NAN, _ANY, _TURNED = Policy(empty_row="nan"), Policy(empty_row="any"), Heads(d_model=24, h=3, d_k=8)


def _of(function: Any, policy: Policy | None = None, **more: Any) -> Entry:
    settings = {"library": "torch", **({} if policy is None else {"policy": policy}), **more}
    return Entry(f"torch {function.__name__}", lambda: function, "check_attention", settings)


ENTRIES = [
    *(_of(function, _NAN) for function in (scaled_queries, base_two, einsums, single_throughout)),
    *(_of(function, _ANY) for function in (lowest_added, billion_fill, merged_chunks)),
    *(_of(function) for function in (padded_width, logarithms, sink_as_a_column, repeated_then_halved)),
    _of(halves, Policy(rotation=Rotation(pairing="half")), heads=_TURNED),
    _of(ones_hide_no_future, causal=True),
    _of(grouped_by_reshape, heads=Heads(d_model=24, h=6, h_kv=2, d_k=5)),
]
