"""The chain with a kernel in the place of the steps from `score` to `blend`, wherever it computes the same."""

import math
from collections.abc import Callable
from typing import Any, Protocol

from ..arrays import accurate_dtype
from ..spec.attend import Dropout
from ..spec.chain import Places, attend_all, extended, realise, rules_of
from ..spec.fan_out import share_keys, share_values
from ..spec.masks import keep_both
from ..spec.policy import Policy
from ..spec.rules import Causal, Mask, Window

Band = tuple[int | None, int | None]
"""The least and the greatest number of places that a key may stand behind the query which sees it; None for no bound."""

OPEN: Band = (None, None)


class Kernel(Protocol):
    """What a fast layer needs: the three stages, on arrays that fit."""

    def project(self, x: Any, context: Any, context_v: Any, parameters: Any, policy: Policy, /) -> tuple[Any, Any, Any]:
        """Make queries, keys and values."""

    def attend(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        /,
        *,
        keep: Any | None,
        bias: Any | None,
        band: Band,
        scale: float,
        dropout: Dropout | None,
        need_weights: bool,
    ) -> tuple[Any, Any | None] | None:
        """Make what each head found, and its weights if needed; None if only the steps can."""

    def mix(self, blended: Any, parameters: Any, policy: Policy, /) -> Any:
        """Make the output."""


def factor_of(policy: Policy, d_k: int, /) -> float:
    """Work out the factor of the scores.

    Args:
        policy: the conventions.
        d_k: the width of one head's queries and keys.

    Returns:
        The policy's own, or that of the specification.
    """
    return 1 / math.sqrt(d_k) if policy.scale is None else policy.scale


def is_fused(policy: Policy, parameters: Any, x: Any, /) -> bool:
    """Tell whether a kernel computes what the policy and the parameters ask for.

    A cap of the scores, a sink, or a precision of one's own for products or softmax take the steps.

    Args:
        policy: the conventions.
        parameters: the parameters.
        x: an array of the dtype.

    Returns:
        Whether it does.
    """
    precise = policy.softmax_precision is None or policy.softmax_precision == accurate_dtype(x)
    return precise and policy.cap is None and parameters.sinks is None


def attend(  # noqa: PLR0917  # a stage of the chain, behind its kernel
    kernel: Callable[..., tuple[Any, Any | None] | None],
    /,
    queries: Any,
    keys: Any,
    values: Any,
    parameters: Any,
    policy: Policy,
    *,
    keep: Any,
    causal: bool,
    places: Places[Any],
    bias: Any | None,
    scale: float | None,
    dropout: Dropout | None,
    need_weights: bool,
) -> tuple[Any, Any | None]:
    """Attend by the kernel, or step by step where it cannot."""
    found = None
    if is_fused(policy, parameters, queries):
        band, kept = OPEN, keep
        if queries.shape[2] == 1 and places.given is None and places.first_query - places.first_key >= keys.shape[2] - 1:
            causal = False  # a single query that stands behind all keys: decoding
        if causal or policy.window != OPEN or isinstance(keep, Mask):
            band, kept = _band(queries, keys, keep, places, policy, causal=causal, whole=parameters.extra_k is not None)
        if policy.empty_row in ("zero", "any") or (kept is None and band == OPEN):
            k, v, kept, addend = extended(keys, values, parameters, kept=kept, bias=bias)
            if policy.grouping == "strided" and (h := queries.shape[1]) != k.shape[1]:
                k, v = share_keys(k, h=h, grouping="strided"), share_values(v, h=h, grouping="strided")
            factor = factor_of(policy, queries.shape[3]) if scale is None else scale
            found = kernel(queries, k, v, keep=kept, bias=addend, band=band, scale=factor, dropout=dropout, need_weights=need_weights)
    if found is not None:
        return found
    return attend_all(
        queries, keys, values, parameters, policy, keep=keep, causal=causal, places=places, bias=bias, scale=scale, dropout=dropout,
        need_weights=need_weights,
    )  # fmt: skip


def _band(queries: Any, keys: Any, keep: Any, places: Places[Any], policy: Policy, *, causal: bool, whole: bool) -> tuple[Band, Any]:
    """Take causality and windows out of the mask, if tokens stand one after the other; they need no array."""
    if whole or places.given is not None:
        return OPEN, realise(queries, keys, keep, places, policy, causal=causal)
    rules, ahead = rules_of(keep, policy, causal=causal).rules, places.first_query - places.first_key
    lows = [ahead - rule.left for rule in rules if isinstance(rule, Window) and rule.left is not None]
    highs = [ahead + rule.right for rule in rules if isinstance(rule, Window) and rule.right is not None]
    highs += [ahead for rule in rules if isinstance(rule, Causal)]
    kept = Mask(tuple(rule for rule in rules if not isinstance(rule, Causal | Window))).realise(queries, keys, None)
    if keep is not None and not isinstance(keep, Mask):
        kept = keep if kept is None else keep_both(keep, kept)
    return (max(lows) if lows else None, min(highs) if highs else None), kept
