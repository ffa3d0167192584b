"""Attend: scaled, masked attention, run once per head."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Bool, Float

from ..arrays import A, Precision, accurate_dtype, backend_of, product
from ..errors import ConfigError
from ..step import check_fields, step
from .policy import EmptyRow


@step("attend", equation=r"S = Q K^{\top}", multiply_adds="batch*h*seq_q*seq_k*d_k")
def score(
    queries: Float[A, "batch h seq_q d_k"], keys: Float[A, "batch h seq_k d_k"], /, *, precision: Precision | None = None
) -> Float[A, "batch h seq_q seq_k"]:
    """Compare every query with every key, head by head.

    The formula is that of Vaswani et al. (2017), equation 1.

    Args:
        queries: what each position looks for.
        keys: what each position can be found by.
        precision: the dtype to multiply in; None for the library's own way.

    Returns:
        How well each key answers each query; any real number, NaN for a key that is not finite.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    clean, broken = _without_broken(keys)
    return backend_of(keys).where(broken, math.nan, product(queries, clean.mT, precision=precision))


@step("attend", equation=r"S \leftarrow S / \sqrt{d_k}")
def scale(scores: Float[A, "batch h seq_q seq_k"], /, *, d_k: int, factor: float | None = None) -> Float[A, "batch h seq_q seq_k"]:
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
        ConfigError: the factor is infinite or NaN.
    """
    if factor is None:
        return scores * (1 / math.sqrt(d_k))
    if not math.isfinite(factor):
        raise ConfigError(f"scale: factor={factor} must be finite.")
    return scores * factor


@step("attend", equation=r"S \leftarrow c \tanh(S / c)")
def cap(scores: Float[A, "batch h seq_q seq_k"], /, *, limit: float) -> Float[A, "batch h seq_q seq_k"]:
    """Bend the scores so that none exceeds a limit.

    The formula is that of Gemma 2 (2024), section 2, and of ONNX Attention (`softcap`).

    Args:
        scores: the scaled scores.
        limit: no score is larger than this, nor smaller than its negative.

    Returns:
        The bent scores.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return backend_of(scores).tanh(scores / limit) * limit


@step("attend", equation=r"S \leftarrow S + B")
def bias(scores: Float[A, "batch h seq_q seq_k"], addend: Float[A, "#batch #h #seq_q #seq_k"], /) -> Float[A, "batch h seq_q seq_k"]:
    """Add what is known of a query and a key beforehand: how far apart they are, or how much a key matters.

    Args:
        scores: the scaled, capped scores.
        addend: what to add; an axis of size 1 stands for all.

    Returns:
        The biased scores.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return scores + addend


@step("attend", equation=r"B_{ij} = 0 \text{ for every extra key } j")
def extend_bias(
    addend: Float[A, "#batch #h #seq_q #seq_k"], keys: Float[A, "batch h_kv seq_k d_k"], /, *, extra: int
) -> Float[A, "#batch #h #seq_q seq_k+extra"]:
    """Leave the scores of extra keys, which stand behind those of the context, as they are.

    Args:
        addend: the bias for the keys of the context.
        keys: the keys of the context; only their number matters.
        extra: how many extra keys there are.

    Returns:
        The bias for all keys.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    xp = backend_of(addend)
    spread = xp.repeat(addend, keys.shape[2] // addend.shape[3], axis=3)
    column = addend[:, :, :, :1]
    zero = xp.astype((column == 0) & (column != 0), addend.dtype)
    return xp.concat((spread, xp.repeat(zero, extra, axis=3)), axis=3)


@step("attend", equation=r"S_{ij} \leftarrow -\infty \text{ unless } M_{ij}")
def mask(
    scores: Float[A, "batch h seq_q seq_k"], keep: Bool[A, "#batch #h #seq_q seq_k"], /, *, empty_row: EmptyRow = "zero"
) -> Float[A, "batch h seq_q seq_k"]:
    """Shut out the keys that a query may not attend to.

    Vaswani et al. (2017), section 3.2.3, set these scores to minus infinity. What a query without any key gets is a
    convention: with `uniform` its scores are all 0, with `unmasked` they stay, else they are all minus infinity.

    Args:
        scores: the scaled, biased scores.
        keep: True where the query may attend to the key; an axis of size 1 stands for all.
        empty_row: what a query gets that keeps no key.

    Returns:
        The scores, minus infinity where the key is dropped.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    xp = backend_of(scores)
    kept = xp.where(keep, scores, -math.inf)
    if empty_row in ("zero", "nan", "any"):
        return kept
    return xp.where(xp.any(keep, axis=-1), kept, 0.0 if empty_row == "uniform" else scores)


@step("attend", equation=r"A_{ij} = \frac{e^{S_{ij} - m_i}}{\sum_j e^{S_{ij} - m_i} + e^{s - m_i}},\; m_i = \max(\max_j S_{ij}, s)")
def softmax(
    scores: Float[A, "batch h seq_q seq_k"],
    sinks: Float[A, " h"] | None = None,
    /,
    *,
    precision: Precision | Literal["input"] | None = None,
    empty_row: EmptyRow = "zero",
) -> Float[A, "batch h seq_q seq_k"]:
    """Share each query's one budget among the keys that it kept; a query with none left spends nothing.

    The formula is that of Vaswani et al. (2017), equation 1, shifted by the largest score so that nothing overflows
    (Blanchard, Higham and Higham, 2021). A row of minus infinities gives zeros, as in ONNX Attention. A sink is one
    more score for each head that takes its share and gives nothing, as in gpt-oss (2025).

    Args:
        scores: the masked scores.
        sinks: each head's score of the sink; None for no sink.
        precision: the dtype to work in; None for that of the scores, but at least float32; `input` for that of the
            scores, whatever it is.
        empty_row: `nan` gives NaN to a query that keeps no key and has no sink, anything else zeros.

    Returns:
        Weights that add up to 1 for each query, to less where there is a sink, and to 0 where no key is kept, in the
        dtype of the scores.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    xp = backend_of(scores)
    wide = xp.astype(scores, _working_dtype(scores, precision))
    sink = None if sinks is None else xp.astype(sinks, wide.dtype)[:, None, None]
    peak = xp.max(wide, axis=-1) if sink is None else xp.maximum(xp.max(wide, axis=-1), sink)
    peak = xp.where(peak == -math.inf, 0.0, peak)
    shares = xp.exp(wide - peak)
    total = xp.sum(shares, axis=-1) if sink is None else xp.sum(shares, axis=-1) + xp.exp(sink - peak)
    return xp.astype(shares / xp.where(total == 0, math.nan if empty_row == "nan" else 1.0, total), scores.dtype)


@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of the weights, as in training.

    Attributes:
        rate: the share of weights that is dropped, at least 0 and less than 1.
        generator: where chance comes from: a generator of NumPy or of PyTorch, or a function that makes numbers
            from [0, 1) in a given shape (`lambda shape: jax.random.uniform(key, shape)`).
    """

    rate: float
    generator: Any

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.rate < 1:
            raise ConfigError(f"Dropout: rate={self.rate} must be at least 0 and less than 1.")


@step("attend", equation=r"D_{ij} = [u_{ij} \ge p],\; u_{ij} \sim U(0, 1)")
def draw_survivors(weights: Float[A, "batch h seq_q seq_k"], /, *, rate: float, generator: Any) -> Bool[A, "batch h seq_q seq_k"]:
    """Draw which weights survive dropout, each by itself.

    Args:
        weights: the weights; only their axes matter.
        rate: the share that is dropped.
        generator: where chance comes from.

    Returns:
        True for a weight that stays.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return backend_of(weights).uniform(weights, generator) >= rate


@step("attend", equation=r"A \leftarrow A \odot D / (1 - p)")
def drop(
    weights: Float[A, "batch h seq_q seq_k"], survivors: Bool[A, "batch h seq_q seq_k"], /, *, rate: float
) -> Float[A, "batch h seq_q seq_k"]:
    """Drop weights at random in training, and raise the others so that the mean stays.

    The formula is that of Srivastava et al. (2014), inverted. "The weights" of a layer are those that `softmax`
    returns, before they are dropped: they add up to 1.

    Args:
        weights: each query's shares.
        survivors: True for a weight that stays.
        rate: the share of weights that is dropped.

    Returns:
        The surviving weights divided by `1 - rate`, zeros elsewhere.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return backend_of(weights).where(survivors, weights / (1 - rate), 0.0)


@step("attend", equation=r"Z = A V", multiply_adds="batch*h*seq_q*seq_k*d_v")
def blend(
    weights: Float[A, "batch h seq_q seq_k"], values: Float[A, "batch h seq_k d_v"], /, *, precision: Precision | None = None
) -> Float[A, "batch h seq_q d_v"]:
    """Average the values by the weights.

    The formula is that of Vaswani et al. (2017), equation 1. A value of weight 0 has exactly no influence, even if it
    is infinite or NaN; a query that sees such a value gets NaN.

    Args:
        weights: each query's shares.
        values: what each position has to give.
        precision: the dtype to multiply in; None for the library's own way.

    Returns:
        What each head found for each query.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    xp = backend_of(values)
    clean, broken = _without_broken(values)
    return xp.where(xp.any((weights != 0) & broken, axis=-1), math.nan, product(weights, clean, precision=precision))


@step("attend", equation=r"Z_i \leftarrow g_i Z_i")
def gate(blended: Float[A, "batch h seq_q d_v"], gates: Float[A, " h"], /) -> Float[A, "batch h seq_q d_v"]:
    """Let each head through by its own factor: 1 keeps it, 0 ablates it.

    The factor is that of Michel, Levy and Neubig (2019), "Are sixteen heads really better than one?", equation 2.

    Args:
        blended: what each head found.
        gates: each head's factor.

    Returns:
        What each head is heard to have found.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return blended * gates[:, None, None]


def _without_broken(rows: A) -> tuple[A, A]:
    """Zero what is not finite, and tell which rows had any, in a row of its own: 0 * NaN would be NaN, forward and backward."""
    xp = backend_of(rows)
    finite = xp.isfinite(rows)
    return xp.where(finite, rows, 0.0), xp.any(~finite, axis=-1).mT


def _working_dtype(scores: A, precision: Precision | Literal["input"] | None) -> object:
    if precision is None:
        return accurate_dtype(scores)
    return scores.dtype if precision == "input" else precision
