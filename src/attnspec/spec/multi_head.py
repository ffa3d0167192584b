"""Multi-head attention: the steps in order."""

from jaxtyping import Bool, Float

from ..arrays import A
from ..errors import ConfigError
from ..step import checked
from .attend import Precision, blend, mask, score, softmax
from .attend import scale as scale_scores
from .fan_in import concatenate, mix
from .fan_out import project_keys, project_queries, project_values, share_keys, share_values
from .masks import keep_both, keep_causal
from .parameters import Heads, Parameters


@checked
def multi_head_attention(
    x: Float[A, "batch seq_q d_model"],
    parameters: Parameters[A],
    /,
    *,
    context: Float[A, "batch seq_k d_key_in"] | None = None,
    context_v: Float[A, "batch seq_k d_value_in"] | None = None,
    keep: Bool[A, "#batch #h #seq_q seq_k"] | None = None,
    causal: bool = False,
    offset: int | None = None,
    scale: float | None = None,
    precision: Precision | None = None,
) -> Float[A, "batch seq_q d_model"]:
    """Compute multi-head attention: fan out, attend in every head, fan in.

    The formula is that of Vaswani et al. (2017), "Attention is all you need", section 3.2, with biases, and with the
    grouped heads of Ainslie et al. (2023) if there are fewer key/value heads than query heads.

    Args:
        x: the positions that ask.
        parameters: the layer's parameters.
        context: the positions that can be looked at; None for `x` (self-attention).
        context_v: the positions whose content is blended; None for the context.
        keep: True where the query may attend to the key; an axis of size 1 stands for all. None keeps all.
        causal: whether query i sees only the keys j with `j <= i + offset`.
        offset: where causality starts; None for 0, the first query beside the first key.
        scale: the factor for the scores; None for `1 / sqrt(d_k)`.
        precision: the dtype of the softmax; None for that of the input, but at least float32.

    Returns:
        The output for each position of `x`; exactly `b_o` where a query keeps no key.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    context = x if context is None else context
    queries = project_queries(x, parameters.w_q, parameters.b_q)
    keys = project_keys(context, parameters.w_k, parameters.b_k)
    values = project_values(context if context_v is None else context_v, parameters.w_v, parameters.b_v)
    if (h := queries.shape[1]) != keys.shape[1]:
        keys, values = share_keys(keys, h=h), share_values(values, h=h)
    blended = attend(queries, keys, values, keep=keep, causal=causal, offset=offset, scale=scale, precision=precision)
    return mix(concatenate(blended), parameters.w_o, parameters.b_o)


@checked
def attend(
    queries: Float[A, "batch h seq_q d_k"],
    keys: Float[A, "batch h seq_k d_k"],
    values: Float[A, "batch h seq_k d_v"],
    /,
    *,
    keep: Bool[A, "#batch #h #seq_q seq_k"] | None = None,
    causal: bool = False,
    offset: int | None = None,
    scale: float | None = None,
    precision: Precision | None = None,
    heads: Heads | None = None,
) -> Float[A, "batch h seq_q d_v"]:
    """Compute scaled, masked attention in every head at once.

    The formula is that of Vaswani et al. (2017), equation 1.

    Args:
        queries: what each position looks for.
        keys: what each position can be found by.
        values: what each position has to give.
        keep: True where the query may attend to the key; an axis of size 1 stands for all. None keeps all.
        causal: whether query i sees only the keys j with `j <= i + offset`.
        offset: where causality starts; None for 0, the first query beside the first key.
        scale: the factor for the scores; None for `1 / sqrt(d_k)`.
        precision: the dtype of the softmax; None for that of the input, but at least float32.
        heads: sizes to hold the arrays to; None for whatever agrees. Without them, no check can tell heads and
            sequence apart where all arrays have them swapped.

    Returns:
        What each head found for each query; exactly 0 where a query keeps no key.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    del heads  # it has done its work in the check
    scores = scale_scores(score(queries, keys), d_k=queries.shape[-1], factor=scale)
    if offset is not None and not causal:
        raise ConfigError(f"attend: offset={offset} says where causality starts, but causal=False; give causal=True.")
    if causal:
        seen = keep_causal(scores, offset=offset or 0)
        keep = seen if keep is None else keep_both(keep, seen)
    if keep is not None:
        scores = mask(scores, keep)
    return blend(softmax(scores, precision=precision), values)
