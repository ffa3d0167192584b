"""The kernel of the PyTorch layers: matrix products over all heads at once, and `scaled_dot_product_attention`."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from ..spec.attend import Dropout
from ..spec.policy import Policy
from .fused import OPEN, Band

_FEW_ROWS = 128
_FEW_ROWS_TRAINING = 32
_SMALL_WEIGHTS = 1 << 14

_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # it came with PyTorch 2.7


def project(x: Tensor, context: Tensor, context_v: Tensor, parameters: Any, policy: Policy, /) -> tuple[Tensor, Tensor, Tensor]:
    """Make queries, keys and values, in one product where one source and small weights make that the fastest."""
    del policy
    w_q, w_k, w_v = parameters.w_q, parameters.w_k, parameters.w_v
    b_q, b_k, b_v = parameters.b_q, parameters.b_k, parameters.b_v
    if context is x and context_v is x and w_q.numel() <= _SMALL_WEIGHTS and w_k.shape[2] == w_v.shape[2]:
        w, b = torch.cat((w_q, w_k, w_v)), None if b_q is None or b_k is None or b_v is None else torch.cat((b_q, b_k, b_v))
        if b is not None or b_q is b_k is b_v:
            queries, keys, values = _project(x, w, b).split_with_sizes((w_q.shape[0], w_k.shape[0], w_v.shape[0]), 1)
            return queries, keys, values
    return _project(x, w_q, b_q), _project(context, w_k, b_k), _project(context_v, w_v, b_v)


def _project(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Multiply by each head's matrix: few rows head by head, many by one matrix, which has to be copied together."""
    (batch, seq, width_in), (heads, _, width) = x.shape, w.shape
    count = batch * seq
    few = _FEW_ROWS_TRAINING if torch.is_grad_enabled() and (w.requires_grad or x.requires_grad) else _FEW_ROWS
    if statically_known_true(count <= few):  # false where sizes are symbols that leave it open
        rows = x.reshape(1, count, width_in).expand(heads, count, width_in)
        each = torch.bmm(rows, w) if b is None else torch.baddbmm(b[:, None], rows, w)
        return each.view(heads, batch, seq, width).transpose(0, 1)
    rows, joined = x.reshape(count, width_in), w.transpose(0, 1).reshape(width_in, heads * width)
    flat = rows @ joined if b is None else torch.addmm(b.reshape(heads * width), rows, joined)
    return flat.view(batch, seq, heads, width).transpose(1, 2)


def mix(blended: Tensor, parameters: Any, policy: Policy, /) -> Tensor:
    """Make the output."""
    del policy
    batch, h, seq, width = blended.shape
    w_o, b_o = parameters.w_o, parameters.b_o
    rows = blended.transpose(1, 2).reshape(batch * seq, h * width)
    return (rows @ w_o if b_o is None else torch.addmm(b_o, rows, w_o)).view(batch, seq, w_o.shape[1])


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    /,
    *,
    keep: Tensor | None,
    bias: Tensor | None,
    band: Band,
    scale: float,
    dropout: Dropout | None,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """Make what each head found, and its weights if needed; None if only the steps can.

    A dropped key has no influence even if it is not finite: such keys are put to zero. If a query sees one, the steps take
    over where numbers can be looked at; under torch.compile and on other devices than the CPU that query is put to NaN.
    """
    if keys.shape[2] == 0 or keys.shape[1] == 0:
        return None
    seen = None
    if band != OPEN:
        band = _trimmed(band, queries, keys)
    if keep is not None or band != OPEN:
        finite = _are_finite(keys, values)
        if finite is None:
            keys, values, seen = _without_broken(queries, keys, values, keep, band)
        elif not finite:
            keys, values, broken = _without_broken(queries, keys, values, keep, band)
            if broken.any() or not _are_finite(keys, values):
                return None
    if need_weights:
        blended, weights = _attend_in_full(
            queries, keys, values, _in_band(queries, keys, keep, band), bias, scale=scale, dropout=dropout
        )  # fmt: skip
    else:
        causal, mask, weights = _is_causal(band) and keep is None and bias is None, None, None
        causal = causal and scale > 0  # PyTorch drops a key before it scales, which turns minus infinity around
        if not causal and (keep is not None or bias is not None or band != OPEN):
            mask = _addend(_in_band(queries, keys, keep, band), bias)
        blended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, dropout_p=dropout.rate if dropout else 0.0, scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )  # fmt: skip
        if mask is not None and _is_exporting():  # what PyTorch writes to ONNX does not give 0 where there is no key
            dropped = ~mask if mask.dtype == torch.bool else mask == -torch.inf
            blended = blended.masked_fill(dropped.all(dim=-1, keepdim=True), 0.0)
    return blended if seen is None else torch.where(seen[..., None], torch.nan, blended), weights


def _attend_in_full(
    queries: Tensor, keys: Tensor, values: Tensor, keep: Tensor | None, bias: Tensor | None, *, scale: float, dropout: Dropout | None
) -> tuple[Tensor, Tensor]:
    """Attend with weights that can be returned."""
    if (group := queries.shape[1] // keys.shape[1]) > 1:
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = (queries * scale) @ keys.mT
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    empty = scores.amax(dim=-1, keepdim=True) == -torch.inf if bias is not None else None
    weights = _softmax(scores)
    if empty is not None:
        weights = weights.masked_fill(empty, 0.0)
    elif keep is not None:
        weights = weights.masked_fill(~keep.any(dim=-1, keepdim=True), 0.0)
    return (functional.dropout(weights, dropout.rate) if dropout else weights) @ values, weights


def _softmax(scores: Tensor) -> Tensor:
    """Take the softmax, in place where nobody else needs the scores: of a long sequence they fill the memory."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.softmax(scores, dim=-1)
    try:
        return torch.softmax(scores, dim=-1, out=scores)
    except RuntimeError:  # under vmap
        return torch.softmax(scores, dim=-1)


def _addend(keep: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if keep is None or bias is None:
        return keep if bias is None else bias
    return torch.where(keep, bias, -torch.inf)


def _is_causal(band: Band) -> bool:
    """Tell whether a band is known, even where bounds are symbols, to be what a kernel means by causal."""
    low, high = band
    return low is None and high is not None and statically_known_true(high == 0)


def _trimmed(band: Band, queries: Tensor, keys: Tensor) -> Band:
    """Forget the bounds that every key keeps to."""
    if torch.compiler.is_compiling():
        return band
    low, high = band
    return None if low is None or low <= 1 - queries.shape[2] else low, None if high is None or high >= keys.shape[2] - 1 else high


def _in_band(queries: Tensor, keys: Tensor, keep: Tensor | None, band: Band) -> Tensor | None:
    """Narrow the mask to the band."""
    low, high = band
    if band != OPEN:
        ahead = torch.arange(keys.shape[2], device=keys.device) - torch.arange(queries.shape[2], device=keys.device)[:, None]
        places = ahead[None, None]
        for bounded in (None if low is None else places >= low, None if high is None else places <= high):
            keep = bounded if keep is None else keep if bounded is None else keep & bounded
    return keep


def _are_finite(keys: Tensor, values: Tensor) -> bool | None:
    """Tell whether all keys and values are finite; None where numbers cannot be looked at, or only at a price."""
    if torch.compiler.is_compiling() or keys.device.type != "cpu":
        return None
    wide = torch.promote_types(keys.dtype, torch.float32)
    try:
        return math.isfinite((keys.sum(dtype=wide) + values.sum(dtype=wide)).item())  # one that overflows only takes the steps
    except RuntimeError:  # under vmap, and with tensors that hold no numbers
        return None


def _without_broken(queries: Tensor, keys: Tensor, values: Tensor, keep: Tensor | None, band: Band) -> tuple[Tensor, Tensor, Tensor]:
    """Zero what is not finite, and tell which queries see it."""
    finite_k, finite_v = keys.isfinite(), values.isfinite()
    broken = ~(finite_k.all(dim=-1) & finite_v.all(dim=-1)).repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    if keep is None and _is_causal(band):
        last = torch.arange(queries.shape[2], device=keys.device).clamp(max=keys.shape[2] - 1)
        seen = broken.cumsum(dim=-1).index_select(-1, last) > 0
    elif (kept := _in_band(queries, keys, keep, band)) is None:
        seen = broken.any(dim=-1, keepdim=True).expand(queries.shape[:3])
    else:
        seen = (kept & broken[:, :, None, :]).any(dim=-1).expand(queries.shape[:3])
    return torch.where(finite_k, keys, 0.0), torch.where(finite_v, values, 0.0), seen
