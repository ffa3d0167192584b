"""The chain: which step comes after which, whatever computes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from ..arrays import A
from ..errors import ConfigError
from .attend import Dropout, blend, cap, draw_survivors, drop, extend_bias, gate, mask, score, softmax
from .attend import bias as add_bias
from .attend import scale as scale_scores
from .cache import Cache
from .fan_in import concatenate, mix
from .fan_out import extend_keys, extend_values, normalise, project_keys, project_queries, project_values, share_keys, share_values
from .masks import keep_both, keep_extra
from .parameters import Parameters
from .policy import Policy
from .positions import Positions, count_positions, rotate
from .rules import Mask


@dataclass(eq=False)
class Places(Generic[A]):
    """Where queries and keys stand, one after the other, unless it is said; counted only if something asks.

    Attributes:
        queries: the queries.
        keys: the keys.
        given: where they stand, as said; None for one after the other.
        first_query: the position of the first query.
        first_key: the position of the first key.
    """

    queries: A
    keys: A
    given: Positions[A] | None = None
    first_query: int = 0
    first_key: int = 0

    def positions(self) -> Positions[A]:
        """Where they stand, token by token."""
        if self.given is None:
            self.given = Positions(count_positions(self.queries, self.first_query), count_positions(self.keys, self.first_key))
        return self.given


@dataclass(frozen=True, eq=False)
class Found(Generic[A]):
    """What multi-head attention comes to.

    Attributes:
        y: the output.
        weights: each head's weights, before dropout; None where they were not kept.
        cache: the cache with the new tokens; None where there is none.
    """

    y: A
    weights: A | None
    cache: Cache[A] | None


@dataclass(frozen=True)
class Stages:
    """How the three stages are computed: by the steps of the specification, or by a kernel in the place of several.

    Attributes:
        project: makes queries, keys and values.
        attend: makes what each head found, and its weights.
        mix: makes the output.
    """

    project: Callable[..., tuple[Any, Any, Any]]
    attend: Callable[..., tuple[Any, Any]]
    mix: Callable[..., Any]


def compute(
    x: A,
    parameters: Parameters[A],
    policy: Policy,
    /,
    *,
    context: A | None = None,
    context_v: A | None = None,
    keep: A | Mask | None = None,
    bias: A | None = None,
    causal: bool = False,
    offset: int | None = None,
    scale: float | None = None,
    positions: Positions[A] | None = None,
    dropout: Dropout | None = None,
    cache: Cache[A] | None = None,
    caching: bool = False,
    need_weights: bool = False,
    stages: Stages | None = None,
) -> Found[A]:
    """Run the stages in order; see `multi_head_attention` and `decode`."""
    stages = STEPS if stages is None else stages
    context = x if context is None else context
    queries, keys, values = stages.project(x, context, context if context_v is None else context_v, parameters, policy)
    queries, keys = _normalised(queries, keys, parameters, policy)
    asked = policy.rotation is not None or needs_positions(keep, policy, causal=causal)
    if caching:
        offset = 0 if cache is None else cache.seen
        places = Places(queries, keys, None, offset, offset)
    else:
        places = stand(queries, keys, positions, offset, policy, asked=asked)
    if policy.rotation is not None:
        queries = rotate(queries, places.positions().queries, **vars(policy.rotation))
        keys = rotate(keys, places.positions().keys, **vars(policy.rotation))
    if caching:
        cache = Cache(keys, values) if cache is None else cache.append(keys, values)
        keys, values = cache.keys, cache.values
        places = Places(queries, keys, None, cache.seen - queries.shape[2], cache.evicted)
    blended, weights = stages.attend(
        queries, keys, values, parameters, policy, keep=keep, causal=causal, places=places, bias=bias, scale=scale, dropout=dropout,
        need_weights=need_weights,
    )  # fmt: skip
    if parameters.gates is not None:
        blended = gate(blended, parameters.gates)
    return Found(stages.mix(blended, parameters, policy), weights, cache)


def _project(x: A, context: A, context_v: A, parameters: Parameters[A], policy: Policy) -> tuple[A, A, A]:
    precision = policy.product_precision
    queries = project_queries(x, parameters.w_q, parameters.b_q, precision=precision)
    keys = project_keys(context, parameters.w_k, parameters.b_k, precision=precision)
    return queries, keys, project_values(context_v, parameters.w_v, parameters.b_v, precision=precision)


def _normalised(queries: A, keys: A, parameters: Parameters[A], policy: Policy) -> tuple[A, A]:
    if policy.normalise is not None:
        queries = normalise(queries, parameters.gain_q, kind=policy.normalise, epsilon=policy.epsilon)
        keys = normalise(keys, parameters.gain_k, kind=policy.normalise, epsilon=policy.epsilon)
    elif parameters.gain_q is not None or parameters.gain_k is not None:
        raise ConfigError("multi_head_attention: parameters have gains, but policy.normalise=None; say how to normalise.")
    return queries, keys


def attend_all(
    queries: A,
    keys: A,
    values: A,
    parameters: Parameters[A],
    policy: Policy,
    *,
    keep: A | Mask | None,
    causal: bool,
    places: Places[A],
    bias: A | None,
    scale: float | None,
    dropout: Dropout | None,
    need_weights: bool,
) -> tuple[A, A | None]:
    """Attend to the extra keys too, and with every query head, step by step."""
    kept = realise(queries, keys, keep, places, policy, causal=causal)
    keys, values, kept, bias = extended(keys, values, parameters, kept=kept, bias=bias)
    if (h := queries.shape[1]) != keys.shape[1]:
        keys, values = share_keys(keys, h=h, grouping=policy.grouping), share_values(values, h=h, grouping=policy.grouping)
    weights = weigh(queries, keys, policy, kept=kept, bias=bias, scale=scale, sinks=parameters.sinks)
    blended = blend(dropped(weights, dropout), values, precision=policy.product_precision)
    return blended, weights if need_weights else None


def extended(keys: A, values: A, parameters: Parameters[A], *, kept: A | None, bias: A | None) -> tuple[A, A, A | None, A | None]:
    """Put the extra keys, which every query sees, behind those of the context."""
    if parameters.extra_k is None or parameters.extra_v is None:
        return keys, values, kept, bias
    extra = parameters.extra_k.shape[1]
    kept = None if kept is None else keep_extra(kept, extra=extra)
    bias = None if bias is None else extend_bias(bias, keys, extra=extra)
    return extend_keys(keys, parameters.extra_k), extend_values(values, parameters.extra_v), kept, bias


def weigh(queries: A, keys: A, policy: Policy, *, kept: A | None, bias: A | None, scale: float | None, sinks: A | None) -> A:
    """Share each query's budget among the keys that it keeps: the steps from `score` to `softmax`."""
    scores = score(queries, keys, precision=policy.product_precision)
    scores = scale_scores(scores, d_k=queries.shape[3], factor=policy.scale if scale is None else scale)
    if policy.cap is not None and policy.cap_order == "before":
        scores = cap(scores, limit=policy.cap)
    if bias is not None:
        scores = add_bias(scores, bias)
    if kept is not None:
        scores = mask(scores, kept, empty_row=policy.empty_row)
    if policy.cap is not None and policy.cap_order == "after":
        scores = cap(scores, limit=policy.cap)
    return softmax(scores, sinks, precision=policy.softmax_precision, empty_row=policy.empty_row)


def dropped(weights: A, dropout: Dropout | None) -> A:
    """Drop weights at random, if asked to."""
    if dropout is None:
        return weights
    survivors = draw_survivors(weights, rate=dropout.rate, generator=dropout.generator)
    return drop(weights, survivors, rate=dropout.rate)


def _mix(blended: A, parameters: Parameters[A], policy: Policy) -> A:
    return mix(concatenate(blended), parameters.w_o, parameters.b_o, precision=policy.product_precision)


STEPS = Stages(_project, attend_all, _mix)


def needs_positions(keep: A | Mask | None, policy: Policy, *, causal: bool) -> bool:
    """Whether a mask asks where queries and keys stand."""
    return causal or policy.window != (None, None) or (isinstance(keep, Mask) and keep.needs_positions)


def stand(queries: A, keys: A, positions: Positions[A] | None, offset: int | None, policy: Policy, *, asked: bool) -> Places[A]:
    """Take the positions as given, or from the offset on."""
    if offset is not None and positions is not None:
        raise ConfigError(f"attend: offset={offset} and positions both say where the queries stand; give one.")
    if offset is not None and not asked:
        raise ConfigError(
            f"attend: offset={offset} says where the queries stand, but nothing asks; give causal=True, a window or a rotation."
        )
    if offset is None:
        offset = keys.shape[2] - queries.shape[2] if policy.causal_anchor == "bottom_right" else 0
    return Places(queries, keys, positions, offset)


def rules_of(keep: A | Mask | None, policy: Policy, *, causal: bool) -> Mask:
    """Bring all rules on which keys a query may attend to into one mask."""
    rules = keep if isinstance(keep, Mask) else Mask()
    if causal:
        rules &= Mask.causal()
    if policy.window != (None, None):
        rules &= Mask.window(*policy.window)
    return rules


def realise(queries: A, keys: A, keep: A | Mask | None, places: Places[A], policy: Policy, *, causal: bool) -> A | None:
    """Bring all that says which keys a query may attend to into one array."""
    rules = rules_of(keep, policy, causal=causal)
    kept = rules.realise(queries, keys, places.positions() if rules.needs_positions else None)
    if keep is None or isinstance(keep, Mask):
        return kept
    return keep if kept is None else keep_both(keep, kept)
