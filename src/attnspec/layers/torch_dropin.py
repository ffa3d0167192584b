"""`torch.nn.MultiheadAttention`, computed by the kernel of this package and checked by its judge."""

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional

from ..arrays import A, dtype_name
from ..errors import ConfigError, DtypeError
from ..spec.attend import Dropout
from ..spec.chain import Places, attend_all
from ..spec.parameters import Heads
from ..spec.policy import Policy
from ..step import is_compiling
from .fused import OPEN, Band
from .promises import Promise
from .torch_kernel import attend

_POLICY = Policy()
_FLOAT: Any = Float
_SHAPED: Any = Shaped
_NO_EXTRAS: Any = SimpleNamespace(extra_k=None, extra_v=None, sinks=None)


@cache
def _promise(axes: str, mask_axes: int) -> Promise:
    """What the call promises, in PyTorch's order of axes."""
    tokens: dict[str, Any] = {
        name: _FLOAT[A, " ".join({"seq": seq, "width": width}.get(axis, axis) for axis in axes.split())]
        for name, seq, width in (("query", "seq_q", "d_model"), ("key", "seq_k", "d_key_in"), ("value", "seq_k", "d_value_in"))
    }
    of_head = "batch*h" if "batch" in axes else "h"
    masks: dict[str, Any] = {
        "key_padding_mask": _SHAPED[A, "batch seq_k" if "batch" in axes else " seq_k"] | None,
        "attn_mask": _SHAPED[A, "seq_q seq_k" if mask_axes <= len("qk") else f"{of_head} seq_q seq_k"] | None,
    }
    flags = dict.fromkeys(("need_weights", "average_attn_weights", "is_causal"), bool)
    sources = {"w_q": "d_model", "w_k": "d_key_in", "w_v": "d_value_in"}
    parameters: dict[str, Any] = {name: _FLOAT[A, f"width {source}"] for name, source in sources.items()}
    return Promise("MultiheadAttention", {"layer": Heads, **parameters, **tokens, **masks, **flags, "return": tokens["query"]})


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with the same constructor, call, parameters and meaning of masks, checked.

    A mask is PyTorch's here: True drops. A query that keeps no key gets weights of 0 and the bias of the output alone,
    where PyTorch gives that or NaN, depending on its mode; and a dropped key has no influence even if it is not finite.
    In training with dropout the weights are those before it, where PyTorch gives those after it.
    It cannot be scripted by `torch.jit`.
    """

    def forward(  # noqa: PLR0917  # PyTorch's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001, FBT002  # PyTorch's signature
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001, FBT002  # PyTorch's signature
        is_causal: bool = False,  # noqa: FBT001, FBT002  # PyTorch's signature
    ) -> tuple[Tensor, Tensor | None]:
        """Compute multi-head attention as `torch.nn.MultiheadAttention` does.

        Args:
            query: the positions that ask.
            key: the positions that can be looked at.
            value: the positions whose content is blended.
            key_padding_mask: True where a key is dropped for all queries, or numbers to add to its scores.
            need_weights: whether to return the weights.
            attn_mask: True where a query may not attend to a key, or numbers to add to the scores.
            average_attn_weights: whether the weights are averaged over the heads.
            is_causal: a hint that `attn_mask` is the causal mask.

        Returns:
            The output, and the weights or None.

        Raises:
            AttnspecError: the arguments do not fit together, or do not fit the layer.
        """
        if is_causal and attn_mask is None:
            raise ConfigError("MultiheadAttention: is_causal=True is a hint about attn_mask; give attn_mask too.")
        if isinstance(query, Tensor) and query.is_nested:
            return super().forward(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        options: dict[str, Any] = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "need_weights": need_weights,
                                   "average_attn_weights": average_attn_weights, "is_causal": is_causal}  # fmt: skip
        if is_compiling():
            return self._compute(query, key, value, **options)
        settings = (self.embed_dim, self.num_heads, self.kdim, self.vdim, type(need_weights), type(average_attn_weights), type(is_causal))
        known: tuple[Any, ...] = (settings, self.batch_first, _kind(_read(self.out_proj, "weight")), _kind(query))
        if not (query is key is value and attn_mask is None and key_padding_mask is None):
            known += (_kind(key), _kind(value), _kind(attn_mask), _kind(key_padding_mask))
        promise = _promise(self._axes(query), getattr(attn_mask, "ndim", 0))
        if promise.holds_for(known):
            return self._compute(query, key, value, **options)
        found: list[tuple[Tensor, Tensor | None]] = []

        def once() -> Tensor:
            found.append(self._compute(query, key, value, **options))
            return found[0][0]

        sizes = Heads(d_model=self.embed_dim, h=self.num_heads, d_key_in=self.kdim, d_value_in=self.vdim)
        weights = dict(zip(("w_q", "w_k", "w_v"), self._projections()[0], strict=True))
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if isinstance(mask, Tensor) and mask.dtype != torch.bool and not mask.is_floating_point():
                wanted = "boolean (True: the key is dropped) or floating-point (added to the scores)"
                raise DtypeError(f"MultiheadAttention: {name} is {dtype_name(mask)}, but must be {wanted}.")
        promise.judge(known, {"layer": sizes, **weights, "query": query, "key": key, "value": value, **options}, once)
        return found[0]

    def _axes(self, query: Any) -> str:
        if getattr(query, "ndim", 3) == 2:  # noqa: PLR2004  # one sequence
            return "seq width"
        return "batch seq width" if self.batch_first else "seq batch width"

    def _projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        together = self.in_proj_weight is not None
        weights = self.in_proj_weight.chunk(3) if together else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return weights, (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)

    def _compute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        need_weights: bool,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        single = query.ndim == 2  # noqa: PLR2004  # one sequence
        if single:
            query, key, value = (query[None],) * 3 if query is key is value else (query[None], key[None], value[None])
        first, keep, bias, band = self.batch_first or single, None, None, OPEN
        queries, keys, values = self._fan_out(query, key, value, first=first)
        if is_causal and key_padding_mask is None and not need_weights:
            band = (None, 0)
        elif attn_mask is not None or key_padding_mask is not None:
            keep, bias = _mask(attn_mask, key_padding_mask, queries.shape[0])
        if _read(self, "bias_k") is not None or self.add_zero_attn:
            keys, values, keep, bias = self._extended(keys, values, keep, bias)
        blended, weights = self._attend(queries, keys, values, keep=keep, bias=bias, band=band, need_weights=need_weights)
        joined = (blended.transpose(1, 2) if first else blended.permute(2, 0, 1, 3)).flatten(2)
        out = self.out_proj
        y = functional.linear(joined, _read(out, "weight"), _read(out, "bias"))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        return (y[0], weights if weights is None else weights[0]) if single else (y, weights)

    def _fan_out(self, query: Tensor, key: Tensor, value: Tensor, *, first: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values, the batch and the heads first."""
        if query is key is value and (together := _read(self, "in_proj_weight")) is not None:
            one, other, _ = query.shape
            joined = functional.linear(query, together, _read(self, "in_proj_bias")).view(one, other, 3, self.num_heads, self.head_dim)
            queries, keys, values = joined.permute((2, 0, 3, 1, 4) if first else (2, 1, 3, 0, 4)).unbind(0)
            return queries, keys, values
        made = (functional.linear(x, w, b) for x, w, b in zip((query, key, value), *self._projections(), strict=True))
        split = (tokens.view(*tokens.shape[:2], self.num_heads, self.head_dim) for tokens in made)
        queries, keys, values = (tokens.transpose(1, 2) if first else tokens.permute(1, 2, 0, 3) for tokens in split)
        return queries, keys, values

    def _extended(
        self, keys: Tensor, values: Tensor, keep: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Put `bias_k`, `bias_v` and the zeros of `add_zero_attn` behind, which every query sees."""
        batch, h, _, width = keys.shape
        extra = int(self.bias_k is not None) + int(self.add_zero_attn)
        if self.bias_k is not None and self.bias_v is not None:
            keys = torch.cat((keys, self.bias_k.view(1, h, 1, width).expand(batch, h, 1, width)), dim=2)
            values = torch.cat((values, self.bias_v.view(1, h, 1, width).expand(batch, h, 1, width)), dim=2)
        if self.add_zero_attn:
            keys, values = functional.pad(keys, (0, 0, 0, 1)), functional.pad(values, (0, 0, 0, 1))
        if extra:
            keep = None if keep is None else functional.pad(keep, (0, extra), value=True)
            bias = None if bias is None else functional.pad(bias, (0, extra))
        return keys, values, keep, bias

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, keep: Tensor | None, bias: Tensor | None, band: Band, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout = Dropout(self.dropout, None) if self.training and self.dropout else None
        found = attend(
            queries, keys, values, keep=keep, bias=bias, band=band, scale=1 / math.sqrt(self.head_dim), dropout=dropout,
            need_weights=need_weights,
        )  # fmt: skip
        if found is None:
            found = attend_all(
                queries, keys, values, _NO_EXTRAS, _POLICY, keep=keep, bias=bias, causal=band != OPEN,
                places=Places(queries, keys), scale=None, dropout=dropout, need_weights=need_weights,
            )  # fmt: skip
        return found


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int) -> tuple[Tensor | None, Tensor | None]:
    """Turn what is dropped or added into what is kept and added."""
    keep = bias = None
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.reshape(batch, 1, 1, key_padding_mask.shape[-1])
    if attn_mask is not None:
        attn_mask = attn_mask.reshape(-1 if attn_mask.ndim == 2 else batch, 1 if attn_mask.ndim == 2 else -1, *attn_mask.shape[-2:])  # noqa: PLR2004
    for mask in (attn_mask, key_padding_mask):
        if mask is not None and mask.dtype == torch.bool:
            keep = ~mask if keep is None else keep & ~mask
        elif mask is not None:
            bias = mask if bias is None else bias + mask
    return keep, bias


def _read(module: nn.Module, name: str) -> Any:
    """Read a parameter, past the slow look-up of modules where nothing stands in its place."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name)


def _kind(x: Any) -> Any:
    """What a verdict depends on."""
    return (type(x), x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x)
