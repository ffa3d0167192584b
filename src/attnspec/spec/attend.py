"""Attend: scaled, masked attention, run once per head."""

import math
from typing import Literal

from jaxtyping import Bool, Float

from ..arrays import A, backend_of, dtype_name
from ..step import step

Precision = Literal["float32", "float64"]


@step("attend", equation=r"S = Q K^{\top}", multiply_adds="batch*h*seq_q*seq_k*d_k")
def score(
    queries: Float[A, "batch h seq_q d_k"], keys: Float[A, "batch h seq_k d_k"], /
) -> Float[A, "batch h seq_q seq_k"]:
    """Compare every query with every key, head by head.

    The formula is that of Vaswani et al. (2017), equation 1.

    Args:
        queries: what each position looks for.
        keys: what each position can be found by.

    Returns:
        How well each key answers each query; any real number.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return queries @ keys.mT


@step("attend", equation=r"S \leftarrow S / \sqrt{d_k}")
def scale(
    scores: Float[A, "batch h seq_q seq_k"], /, *, d_k: int, factor: float | None = None
) -> Float[A, "batch h seq_q seq_k"]:
    """Keep the spread of the scores independent of the width of a head.

    The formula is that of Vaswani et al. (2017), section 3.2.1: a sum of d_k products of independent numbers of
    variance 1 has variance d_k.

    Args:
        scores: the scores as they come.
        d_k: the width of one head's queries and keys.
        factor: another factor to multiply by; None for `1 / sqrt(d_k)`.

    Returns:
        The scores times the factor.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return scores * (1 / math.sqrt(d_k) if factor is None else factor)


@step("attend", equation=r"S_{ij} \leftarrow -\infty \text{ unless } M_{ij}")
def mask(
    scores: Float[A, "batch h seq_q seq_k"], keep: Bool[A, "#batch #h #seq_q seq_k"], /
) -> Float[A, "batch h seq_q seq_k"]:
    """Shut out the keys that a query may not attend to.

    Vaswani et al. (2017), section 3.2.3, set these scores to minus infinity.

    Args:
        scores: the scaled scores.
        keep: True where the query may attend to the key; an axis of size 1 stands for all.

    Returns:
        The scores, minus infinity where the key is dropped.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return backend_of(scores).where(keep, scores, -math.inf)


@step("attend", equation=r"A_{ij} = \frac{e^{S_{ij} - \max_j S_{ij}}}{\sum_j e^{S_{ij} - \max_j S_{ij}}}")
def softmax(
    scores: Float[A, "batch h seq_q seq_k"], /, *, precision: Precision | None = None
) -> Float[A, "batch h seq_q seq_k"]:
    """Share each query's one budget among the keys that it kept; a query with none left spends nothing.

    The formula is that of Vaswani et al. (2017), equation 1, shifted by the largest score so that nothing overflows
    (Blanchard, Higham and Higham, 2021). A row of minus infinities gives zeros, as ONNX Attention does.

    Args:
        scores: the masked scores.
        precision: the dtype to work in; None for that of the scores, but at least float32.

    Returns:
        Weights that add up to 1 for each query, or to 0 if it kept no key, in the dtype of the scores.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    xp = backend_of(scores)
    wide = xp.astype(scores, precision or ("float64" if dtype_name(scores) == "float64" else "float32"))
    peak = xp.max(wide, axis=-1)
    shares = xp.exp(wide - xp.where(peak == -math.inf, 0.0, peak))
    total = xp.sum(shares, axis=-1)
    return xp.astype(shares / xp.where(total == 0, 1.0, total), scores.dtype)


@step("attend", equation=r"Z = A V", multiply_adds="batch*h*seq_q*seq_k*d_v")
def blend(
    weights: Float[A, "batch h seq_q seq_k"], values: Float[A, "batch h seq_k d_v"], /
) -> Float[A, "batch h seq_q d_v"]:
    """Average the values by the weights.

    The formula is that of Vaswani et al. (2017), equation 1. A value of weight 0 has exactly no influence, even if it
    is infinite or NaN; a query that sees such a value gets NaN.

    Args:
        weights: each query's shares.
        values: what each position has to give.

    Returns:
        What each head found for each query.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    xp = backend_of(values)
    finite = xp.isfinite(values)
    blended = weights @ xp.where(finite, values, 0.0)
    broken = xp.any(~finite, axis=-1).mT  # batch h 1 seq_k: the keys whose value is not finite
    return xp.where(xp.any((weights != 0) & broken, axis=-1), math.nan, blended)
