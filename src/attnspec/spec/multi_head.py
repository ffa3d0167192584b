"""Multi-head attention: the steps in order."""

from jaxtyping import Bool, Float

from ..arrays import A
from ..errors import ConfigError
from ..step import checked
from .attend import Dropout, blend, cap, draw_survivors, drop, extend_bias, gate, mask, score, softmax
from .attend import bias as add_bias
from .attend import scale as scale_scores
from .cache import Cache
from .fan_in import concatenate, mix
from .fan_out import extend_keys, extend_values, normalise, project_keys, project_queries, project_values, share_keys, share_values
from .masks import keep_both, keep_extra
from .parameters import Heads, Parameters
from .policy import Policy
from .positions import Positions, count_positions, rotate
from .rules import Mask

DEFAULT = Policy()


@checked
def multi_head_attention(
    x: Float[A, "batch seq_q d_model"],
    parameters: Parameters[A],
    /,
    *,
    context: Float[A, "batch seq_k d_key_in"] | None = None,
    context_v: Float[A, "batch seq_k d_value_in"] | None = None,
    keep: Bool[A, "#batch #h #seq_q seq_k"] | Mask | None = None,
    bias: Float[A, "#batch #h #seq_q #seq_k"] | None = None,
    causal: bool = False,
    offset: int | None = None,
    scale: float | None = None,
    positions: Positions[A] | None = None,
    dropout: Dropout | None = None,
    policy: Policy = DEFAULT,
) -> Float[A, "batch seq_q d_model"]:
    """Compute multi-head attention: fan out, attend in every head, fan in.

    The formula is that of Vaswani et al. (2017), "Attention is all you need", section 3.2, with biases, with the
    grouped heads of Ainslie et al. (2023) if there are fewer key/value heads than query heads, and with every other
    step only where `parameters`, an option or the policy asks for it.

    Args:
        x: the positions that ask.
        parameters: the layer's parameters.
        context: the positions that can be looked at; None for `x` (self-attention).
        context_v: the positions whose content is blended; None for the context.
        keep: True where the query may attend to the key, an axis of size 1 stands for all; or a `Mask`. None keeps all.
        bias: what to add to the scaled scores; None for nothing.
        causal: whether a query sees only keys up to its own position.
        offset: the position of the first query, where the first key is at 0; None for what the policy's anchor says.
        scale: the factor for the scores; None for the policy's.
        positions: where each query and key stands; None for one after the other, from the offset and from 0.
        dropout: dropout of the weights; None for none.
        policy: the conventions; by default those of ONNX Attention-25.

    Returns:
        The output for each position of `x`; exactly `b_o` where a query keeps no key, by the default policy.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    context = x if context is None else context
    queries, keys, values = _fan_out(x, context, context if context_v is None else context_v, parameters, policy)
    asked = policy.rotation is not None or _needs_positions(keep, policy, causal=causal)
    positions = _positions(queries, keys, positions, offset, policy, asked=asked)
    if positions is not None:
        queries, keys = _turned(queries, positions.queries, policy), _turned(keys, positions.keys, policy)
    kept = _kept(queries, keys, keep, positions, policy, causal=causal)
    blended = _attend_all(queries, keys, values, parameters, policy, kept=kept, bias=bias, scale=scale, dropout=dropout)
    return _fan_in(blended, parameters, policy)


@checked
def decode(
    x: Float[A, "batch seq_q d_model"],
    parameters: Parameters[A],
    cache: Cache[A] | None,
    /,
    *,
    keep: Bool[A, "#batch #h #seq_q seq_k"] | Mask | None = None,
    bias: Float[A, "#batch #h #seq_q #seq_k"] | None = None,
    causal: bool = True,
    scale: float | None = None,
    dropout: Dropout | None = None,
    policy: Policy = DEFAULT,
) -> tuple[Float[A, "batch seq_q d_model"], Cache[A]]:
    """Compute multi-head self-attention of new tokens over all tokens so far, the cached ones and the new ones.

    One call with n tokens gives what n calls with one give.

    Args:
        x: the new tokens.
        parameters: the layer's parameters.
        cache: the keys and values of the tokens before; None if there are none.
        keep: True where the query may attend to the key, over all tokens in the cache and the new ones; or a `Mask`.
        bias: what to add to the scaled scores, over the same tokens; None for nothing.
        causal: whether a token sees only those up to its own position.
        scale: the factor for the scores; None for the policy's.
        dropout: dropout of the weights; None for none.
        policy: the conventions; by default those of ONNX Attention-25.

    Returns:
        The output for each new token, and the cache with the new tokens in it.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    queries, keys, values = _fan_out(x, x, x, parameters, policy)
    here = count_positions(queries, 0 if cache is None else cache.seen)
    queries, keys = _turned(queries, here, policy), _turned(keys, here, policy)
    cache = Cache(keys, values) if cache is None else cache.append(keys, values)
    positions = Positions(here, count_positions(cache.keys, cache.evicted))
    kept = _kept(queries, cache.keys, keep, positions, policy, causal=causal)
    blended = _attend_all(queries, cache.keys, cache.values, parameters, policy, kept=kept, bias=bias, scale=scale, dropout=dropout)
    return _fan_in(blended, parameters, policy), cache


@checked
def attend(
    queries: Float[A, "batch h seq_q d_k"],
    keys: Float[A, "batch h seq_k d_k"],
    values: Float[A, "batch h seq_k d_v"],
    /,
    *,
    keep: Bool[A, "#batch #h #seq_q seq_k"] | Mask | None = None,
    bias: Float[A, "#batch #h #seq_q #seq_k"] | None = None,
    causal: bool = False,
    offset: int | None = None,
    scale: float | None = None,
    positions: Positions[A] | None = None,
    sinks: Float[A, " h"] | None = None,
    dropout: Dropout | None = None,
    policy: Policy = DEFAULT,
    heads: Heads | None = None,
) -> Float[A, "batch h seq_q d_v"]:
    """Compute scaled, masked attention in every head at once.

    The formula is that of Vaswani et al. (2017), equation 1.

    Args:
        queries: what each position looks for.
        keys: what each position can be found by.
        values: what each position has to give.
        keep: True where the query may attend to the key, an axis of size 1 stands for all; or a `Mask`. None keeps all.
        bias: what to add to the scaled scores; None for nothing.
        causal: whether a query sees only keys up to its own position.
        offset: the position of the first query, where the first key is at 0; None for what the policy's anchor says.
        scale: the factor for the scores; None for the policy's.
        positions: where each query and key stands; None for one after the other, from the offset and from 0.
        sinks: each head's score of a sink; None for no sink.
        dropout: dropout of the weights; None for none.
        policy: the conventions; those of fan out have done their work before.
        heads: sizes to hold the arrays to; None for whatever agrees. Without them, no check can tell heads and
            sequence apart where all arrays have them swapped.

    Returns:
        What each head found for each query; exactly 0 where a query keeps no key, by the default policy.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    del heads  # it has done its work in the check
    positions = _positions(queries, keys, positions, offset, policy, asked=_needs_positions(keep, policy, causal=causal))
    kept = _kept(queries, keys, keep, positions, policy, causal=causal)
    return _attend(queries, keys, values, policy, kept=kept, bias=bias, scale=scale, sinks=sinks, dropout=dropout)


def _fan_out(x: A, context: A, context_v: A, parameters: Parameters[A], policy: Policy) -> tuple[A, A, A]:
    precision = policy.product_precision
    queries = project_queries(x, parameters.w_q, parameters.b_q, precision=precision)
    keys = project_keys(context, parameters.w_k, parameters.b_k, precision=precision)
    values = project_values(context_v, parameters.w_v, parameters.b_v, precision=precision)
    if policy.normalise is not None:
        queries = normalise(queries, parameters.gain_q, kind=policy.normalise, epsilon=policy.epsilon)
        keys = normalise(keys, parameters.gain_k, kind=policy.normalise, epsilon=policy.epsilon)
    elif parameters.gain_q is not None or parameters.gain_k is not None:
        raise ConfigError("multi_head_attention: parameters have gains, but policy.normalise=None; say how to normalise.")
    return queries, keys, values


def _attend_all(
    queries: A,
    keys: A,
    values: A,
    parameters: Parameters[A],
    policy: Policy,
    *,
    kept: A | None,
    bias: A | None,
    scale: float | None,
    dropout: Dropout | None,
) -> A:
    """Attend to the extra keys too, and with every query head."""
    if parameters.extra_k is not None and parameters.extra_v is not None:
        extra = parameters.extra_k.shape[1]
        kept = None if kept is None else keep_extra(kept, extra=extra)
        bias = None if bias is None else extend_bias(bias, keys, extra=extra)
        keys, values = extend_keys(keys, parameters.extra_k), extend_values(values, parameters.extra_v)
    if (h := queries.shape[1]) != keys.shape[1]:
        keys, values = share_keys(keys, h=h, grouping=policy.grouping), share_values(values, h=h, grouping=policy.grouping)
    return _attend(queries, keys, values, policy, kept=kept, bias=bias, scale=scale, sinks=parameters.sinks, dropout=dropout)


def _attend(
    queries: A,
    keys: A,
    values: A,
    policy: Policy,
    *,
    kept: A | None,
    bias: A | None,
    scale: float | None,
    sinks: A | None,
    dropout: Dropout | None,
) -> A:
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
    weights = softmax(scores, sinks, precision=policy.softmax_precision, empty_row=policy.empty_row)
    if dropout is not None:
        survivors = draw_survivors(weights, rate=dropout.rate, generator=dropout.generator)
        weights = drop(weights, survivors, rate=dropout.rate)
    return blend(weights, values, precision=policy.product_precision)


def _fan_in(blended: A, parameters: Parameters[A], policy: Policy) -> A:
    if parameters.gates is not None:
        blended = gate(blended, parameters.gates)
    return mix(concatenate(blended), parameters.w_o, parameters.b_o, precision=policy.product_precision)


def _needs_positions(keep: A | Mask | None, policy: Policy, *, causal: bool) -> bool:
    return causal or policy.window != (None, None) or (isinstance(keep, Mask) and keep.needs_positions)


def _positions(
    queries: A, keys: A, positions: Positions[A] | None, offset: int | None, policy: Policy, *, asked: bool
) -> Positions[A] | None:
    """Take the positions as given, or count them if they are asked for."""
    if offset is not None and positions is not None:
        raise ConfigError(f"attend: offset={offset} and positions both say where the queries stand; give one.")
    if offset is not None and not asked:
        raise ConfigError(
            f"attend: offset={offset} says where the queries stand, but nothing asks; give causal=True, a window or a rotation."
        )
    if positions is not None or not asked:
        return positions
    if offset is None:
        offset = keys.shape[2] - queries.shape[2] if policy.causal_anchor == "bottom_right" else 0
    return Positions(count_positions(queries, offset), count_positions(keys))


def _turned(tokens: A, places: A, policy: Policy) -> A:
    return tokens if policy.rotation is None else rotate(tokens, places, **vars(policy.rotation))


def _kept(queries: A, keys: A, keep: A | Mask | None, positions: Positions[A] | None, policy: Policy, *, causal: bool) -> A | None:
    """Bring all that says which keys a query may attend to into one mask."""
    rules = keep if isinstance(keep, Mask) else Mask()
    if causal:
        rules &= Mask.causal()
    if policy.window != (None, None):
        rules &= Mask.window(*policy.window)
    kept = rules.realise(queries, keys, positions)
    if keep is None or isinstance(keep, Mask):
        return kept
    return keep if kept is None else keep_both(keep, kept)
