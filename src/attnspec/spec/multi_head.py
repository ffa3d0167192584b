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

    Laws:
        Permuting the heads and their blocks of `w_o` together changes nothing.
        Mixing the heads is adding what each makes of its block of `w_o`.
        One head of full width is plain attention.
        Grouped heads are heads with repeated parameters.
        Self-attention is attention with itself as context.
        Values come from the context, unless they have one of their own.
        Other sequences of the batch have exactly no influence.
        A batch is computed sequence by sequence.
        A dropped key has exactly no influence.
        A query without a key gives exactly `b_o`.
        Without any position to look at the output is exactly `b_o`.
        The precision asked for reaches the softmax.
        Every step keeps the dtype of the input.
        Arguments are never modified.

    Examples: Edge cases
        A query without a key gives exactly `b_o`: here the first, and here all, since there is nothing to look at.

        >>> import numpy as np, attnspec
        >>> heads = attnspec.Heads(d_model=2, h=1)
        >>> parameters = attnspec.Parameters.random(heads, seed=0).map(lambda array: 0 * array + 1)
        >>> x = np.array([[[3.0, 5.0], [7.0, 9.0]]])
        >>> keep = np.array([[[[False, False], [True, True]]]])
        >>> attnspec.multi_head_attention(x, parameters, keep=keep)[0]
        array([[ 1.,  1.],
               [35., 35.]])
        >>> attnspec.multi_head_attention(x, parameters, context=np.ones((1, 0, 2)))[0]
        array([[1., 1.],
               [1., 1.]])

        Anchored at the last key, causality leaves nothing to the first of more queries than keys.

        >>> late = attnspec.Policy(causal_anchor="bottom_right")
        >>> attnspec.multi_head_attention(x, parameters, context=x[:, :1], causal=True, policy=late)[0]
        array([[ 1.,  1.],
               [19., 19.]])
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

    Laws:
        One call of n tokens gives what n calls of one give.
        Leaving out the first n queries shifts the offset by n.

    Examples: Edge cases
        The first call has no cache; several new tokens see each other as far as causality lets them.

        >>> import numpy as np, attnspec
        >>> heads = attnspec.Heads(d_model=2, h=1)
        >>> parameters = attnspec.Parameters.random(heads, seed=0)
        >>> x = np.array([[[3.0, 5.0], [7.0, 9.0], [2.0, 4.0]]])
        >>> y, cache = attnspec.decode(x[:, :2], parameters, None)
        >>> cache.seen
        2

        The third token finds what it finds in one call for all.

        >>> last, cache = attnspec.decode(x[:, 2:], parameters, cache)
        >>> np.allclose(last, attnspec.multi_head_attention(x, parameters, causal=True)[:, 2:])
        True
        >>> cache.seen
        3
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

    Laws:
        The order of the keys is irrelevant.
        Permuting the queries permutes the output.
        A key has exactly no influence on the queries that drop it.
        Causality is a mask.
        A query with one key gets exactly its value.
        Queries of zeros find the mean of the values.
        What a query finds lies between the values that it keeps.
        Attention is linear in the values.
        Scaling the queries is scaling the scores.
        Duplicating every key and value changes nothing.
        A query that sees a broken value gets NaN, and no other.
        A query without a key has zero gradients.
        A dropped key that is broken has exactly no influence on gradients.
        Dropout of rate 0 changes nothing.

    Examples: Edge cases
        A query that keeps no key finds exactly 0, by the default policy.

        >>> import numpy as np, attnspec
        >>> queries, keys = np.ones((1, 1, 2, 1)), np.ones((1, 1, 2, 1))
        >>> values = np.array([[[[5.0], [7.0]]]])
        >>> keep = np.array([[[[False, False], [True, False]]]])
        >>> attnspec.attend(queries, keys, values, keep=keep).ravel()
        array([0., 5.])
        >>> attnspec.attend(queries, keys, values, keep=keep, policy=attnspec.Policy(empty_row="uniform")).ravel()
        array([6., 5.])

        An offset that is negative leaves the first queries without a key.

        >>> attnspec.attend(queries, keys, values, causal=True, offset=-1).ravel()
        array([0., 5.])

        Without keys nothing is found.

        >>> attnspec.attend(queries, keys[:, :, :0], values[:, :, :0]).ravel()
        array([0., 0.])
    """
    del heads  # it has done its work in the check
    places = stand(queries, keys, positions, offset, policy, asked=needs_positions(keep, policy, causal=causal))
    kept = realise(queries, keys, keep, places, policy, causal=causal)
    weights = weigh(queries, keys, policy, kept=kept, bias=bias, scale=scale, sinks=sinks)
    return blend(dropped(weights, dropout), values, precision=policy.product_precision)
