"""Multi-head attention: the steps in order."""

from typing import cast

from jaxtyping import Bool, Float

from ..arrays import A
from ..step import checked
from .attend import Dropout, blend
from .cache import Cache
from .chain import compute, dropped, needs_positions, realise, stand, weigh
from .parameters import Heads, Parameters
from .policy import Policy
from .positions import Positions
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
    return compute(
        x, parameters, policy, context=context, context_v=context_v, keep=keep, bias=bias, causal=causal, offset=offset, scale=scale,
        positions=positions, dropout=dropout,
    ).y  # fmt: skip


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
    found = compute(x, parameters, policy, keep=keep, bias=bias, causal=causal, scale=scale, dropout=dropout, cache=cache, caching=True)
    return found.y, cast("Cache[A]", found.cache)


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
    places = stand(queries, keys, positions, offset, policy, asked=needs_positions(keep, policy, causal=causal))
    kept = realise(queries, keys, keep, places, policy, causal=causal)
    weights = weigh(queries, keys, policy, kept=kept, bias=bias, scale=scale, sinks=sinks)
    return blend(dropped(weights, dropout), values, precision=policy.product_precision)
