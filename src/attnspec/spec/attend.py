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

    Laws:
        The order of the keys is irrelevant.
        Permuting the queries permutes the output.
        Scaling the queries is scaling the scores.
        A key has exactly no influence on the queries that drop it.
        A dropped key that is broken has exactly no influence on gradients.

    Examples: Edge cases
        A key that is not finite has the score NaN with every query, and spoils no other.

        >>> import numpy as np, attnspec
        >>> keys = np.array([[[[1.0], [np.inf], [np.nan]]]])
        >>> attnspec.score(np.array([[[[2.0]]]]), keys)[0, 0]
        array([[ 2., nan, nan]])

        Without keys there is no score.

        >>> attnspec.score(np.ones((1, 1, 2, 3)), np.ones((1, 1, 0, 3))).shape
        (1, 1, 2, 0)

        Queries and keys of different heads never meet, so both have equally many.

        >>> attnspec.score(np.ones((1, 4, 7, 3)), np.ones((1, 2, 5, 3)))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        attnspec.errors.ShapeError: score: keys (1, 2, 5, 3) has h=2, but h=4 was set by queries (1, 4, 7, 3)...
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

    Laws:
        The scale is 1 over the square root of `d_k`.
        Scaling the queries is scaling the scores.
        One head of full width is plain attention.

    Examples: Edge cases
        A factor of 0 makes all keys equal, a negative one turns their order round.

        >>> import numpy as np, attnspec
        >>> scores = np.array([[[[3.0, 5.0]]]])
        >>> attnspec.scale(scores, d_k=4)[0, 0]
        array([[1.5, 2.5]])
        >>> attnspec.scale(scores, d_k=4, factor=0.0)[0, 0]
        array([[0., 0.]])
        >>> attnspec.scale(scores, d_k=4, factor=-1.0)[0, 0]
        array([[-3., -5.]])

        An infinite factor would make NaN of a score of 0.

        >>> attnspec.scale(scores, d_k=4, factor=np.inf)
        Traceback (most recent call last):
            ...
        attnspec.errors.ConfigError: scale: factor=inf must be finite.
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

    Laws:
        A cap keeps the order of the scores, and none exceeds it.

    Examples: Edge cases
        However large a score is, it ends at the limit; a score far below the limit is left nearly as it is.

        >>> import numpy as np, attnspec
        >>> scores = np.array([[[[1e300, -np.inf, 0.5]]]])
        >>> attnspec.cap(scores, limit=30.0).round(4)[0, 0]
        array([[ 30. , -30. ,   0.5]])

        So a dropped key comes back to life where the cap follows the mask. NaN stays NaN.

        >>> masked = np.array([[[[0.0, -np.inf, np.nan]]]])
        >>> attnspec.softmax(attnspec.cap(masked[..., :2], limit=2.0)).round(4)[0, 0]
        array([[0.8808, 0.1192]])
        >>> attnspec.cap(masked, limit=2.0)[0, 0]
        array([[ 0., -2., nan]])

        No cap is None, not infinity.

        >>> attnspec.Policy(cap=np.inf)
        Traceback (most recent call last):
            ...
        attnspec.errors.ConfigError: Policy: cap=inf must be positive and finite; None is for no cap.
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

    Laws:
        A bias of minus infinity drops the key.
        An axis of size 1 in the bias stands for all.

    Examples: Edge cases
        One number for each key serves all queries.

        >>> import numpy as np, attnspec
        >>> scores = np.zeros((1, 1, 2, 2))
        >>> attnspec.bias(scores, np.array([[[[5.0, 7.0]]]]))[0, 0]
        array([[5., 7.],
               [5., 7.]])

        Minus infinity drops a key, however high its score.

        >>> high = np.array([[[[1e300, 0.0]]]])
        >>> attnspec.softmax(attnspec.bias(high, np.array([[[[-np.inf, 0.0]]]])))[0, 0]
        array([[0., 1.]])

        An axis of another size than 1 must fit.

        >>> attnspec.bias(scores, np.zeros((1, 1, 3, 2)))
        Traceback (most recent call last):
            ...
        attnspec.errors.ShapeError: bias: addend (1, 1, 3, 2) has seq_q=3, but seq_q=2 was set by scores (1, 1, 2, 2).
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

    Laws:
        Extra keys have no bias, and those of the context keep theirs.

    Examples: Edge cases
        One number for all keys of the context is written out, so that it does not reach the extra keys.

        >>> import numpy as np, attnspec
        >>> attnspec.extend_bias(np.full((1, 1, 1, 1), 5.0), np.ones((1, 1, 3, 2)), extra=1)[0, 0]
        array([[5., 5., 5., 0.]])

        Without extra keys the bias stays as it is.

        >>> attnspec.extend_bias(np.array([[[[5.0, -np.inf]]]]), np.ones((1, 1, 2, 2)), extra=0)[0, 0]
        array([[  5., -inf]])
    """
    xp = backend_of(addend)
    spread = addend if addend.shape[3] == keys.shape[2] else xp.repeat(addend, keys.shape[2], axis=3)
    column = xp.sum(addend, axis=-1)
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

    Laws:
        A dropped key has exactly no influence.
        A key has exactly no influence on the queries that drop it.
        Keeping all keys is no mask.
        An axis of size 1 in the mask stands for all.
        Masking twice is masking with both.
        Causality is a mask.
        A dropped key has exactly no influence on gradients.

    Examples: Edge cases
        A dropped key is gone, whatever its score was.

        >>> import numpy as np, attnspec
        >>> scores = np.array([[[[3.0, np.nan, np.inf]]]])
        >>> keep = np.array([[[[True, False, False]]]])
        >>> attnspec.mask(scores, keep)[0, 0]
        array([[  3., -inf, -inf]])

        What a query gets that keeps no key is a convention.

        >>> scores, nothing = np.array([[[[3.0, 5.0]]]]), np.zeros((1, 1, 1, 2), bool)
        >>> attnspec.mask(scores, nothing)[0, 0]
        array([[-inf, -inf]])
        >>> attnspec.mask(scores, nothing, empty_row="uniform")[0, 0]
        array([[0., 0.]])
        >>> attnspec.mask(scores, nothing, empty_row="unmasked")[0, 0]
        array([[3., 5.]])

        Numbers are no mask: they do not say whether 1 keeps or drops.

        >>> attnspec.mask(scores, np.ones((1, 1, 1, 2)))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        attnspec.errors.DtypeError: mask: keep is float64, but must be boolean...
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

    Laws:
        The weights of a query sum to 1, or without a key to 0.
        Adding a constant to all scores of a query changes nothing.
        A larger score gets a larger weight.
        Huge scores do not overflow.
        A sink takes the share of one more key and gives nothing.
        A query with one key gets exactly its value.
        Duplicating every key and value changes nothing.
        A query without a key has zero gradients.
        Float64 precision gives the float64 weights rounded once.
        The precision asked for reaches the softmax.

    Examples: Edge cases
        A row of minus infinities gives zeros, or NaN where that is the convention.

        >>> import numpy as np, attnspec
        >>> row = np.full((1, 1, 1, 2), -np.inf)
        >>> attnspec.softmax(row)[0, 0]
        array([[0., 0.]])
        >>> attnspec.softmax(row, empty_row="nan")[0, 0]
        array([[nan, nan]])

        Only the differences of scores count, so that huge ones do not overflow; a single key gets all.

        >>> attnspec.softmax(np.array([[[[1e300, 1e300, -1e300]]]]))[0, 0]
        array([[0.5, 0.5, 0. ]])
        >>> attnspec.softmax(np.array([[[[-1e300]]]]))[0, 0]
        array([[1.]])

        A score of NaN makes NaN of the whole row: a query that sees a broken key has no answer.

        >>> attnspec.softmax(np.array([[[[np.nan, 0.0]]]]))[0, 0]
        array([[nan, nan]])

        Beside a sink the weights add up to less than 1, and to 0 where no key is kept.

        >>> attnspec.softmax(np.zeros((1, 1, 1, 2)), np.zeros(1)).round(4)[0, 0]
        array([[0.3333, 0.3333]])
        >>> attnspec.softmax(row, np.zeros(1))[0, 0]
        array([[0., 0.]])
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

    Laws:
        Over evenly spread chances dropout keeps the mean of the weights.
        Dropout of rate 0 changes nothing.

    Examples: Edge cases
        With a rate of 0 every weight survives, even where chance gives exactly 0.

        >>> import numpy as np, attnspec
        >>> weights = np.full((1, 1, 1, 3), 1 / 3)
        >>> attnspec.draw_survivors(weights, rate=0.0, generator=np.zeros)[0, 0]
        array([[ True,  True,  True]])

        Chance may be any function that makes numbers from 0 to less than 1; those below the rate drop their weights.

        >>> chances = np.array([[[[0.1, 0.5, 0.9]]]])
        >>> attnspec.draw_survivors(weights, rate=0.5, generator=lambda shape: chances)[0, 0]
        array([[False,  True,  True]])
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

    Laws:
        Over evenly spread chances dropout keeps the mean of the weights.
        Dropout of rate 0 changes nothing.
        A weight that dropout drops is exactly 0.

    Examples: Edge cases
        What is dropped is 0, even if it was NaN; the others are raised.

        >>> import numpy as np, attnspec
        >>> weights = np.array([[[[0.25, 0.25, np.nan]]]])
        >>> survivors = np.array([[[[True, False, False]]]])
        >>> attnspec.drop(weights, survivors, rate=0.5)[0, 0]
        array([[0.5, 0. , 0. ]])

        If chance drops all weights of a query, it finds nothing.

        >>> attnspec.drop(weights, np.zeros((1, 1, 1, 3), bool), rate=0.5)[0, 0]
        array([[0., 0., 0.]])

        Not all weights can be dropped on average, since the others could not make up for them.

        >>> attnspec.Dropout(1.0, np.zeros)
        Traceback (most recent call last):
            ...
        attnspec.errors.ConfigError: Dropout: rate=1.0 must be at least 0 and less than 1.
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

    Laws:
        What a query finds lies between the values that it keeps.
        Attention is linear in the values.
        A query with one key gets exactly its value.
        Queries of zeros find the mean of the values.
        A key has exactly no influence on the queries that drop it.
        A query that sees a broken value gets NaN, and no other.

    Examples: Edge cases
        A value of weight 0 has no influence, even if it is NaN; with any weight it makes NaN of all that the query finds.

        >>> import numpy as np, attnspec
        >>> values = np.array([[[[1.0, 2.0], [np.nan, 4.0]]]])
        >>> attnspec.blend(np.array([[[[1.0, 0.0], [0.5, 0.5]]]]), values)[0, 0]
        array([[ 1.,  2.],
               [nan, nan]])

        Weights of zeros find nothing, and so do queries without keys.

        >>> attnspec.blend(np.zeros((1, 1, 1, 2)), values)[0, 0]
        array([[0., 0.]])
        >>> attnspec.blend(np.zeros((1, 1, 1, 0)), np.ones((1, 1, 0, 2)))[0, 0]
        array([[0., 0.]])
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

    Laws:
        A gate is a factor of the block of `w_o` of its head.
        A head with a gate of 0 can be taken away.

    Examples: Edge cases
        Each head has one gate, for all sequences and positions.

        >>> import numpy as np, attnspec
        >>> attnspec.gate(np.ones((1, 2, 2, 1)), np.array([0.0, 5.0])).ravel()
        array([0., 0., 5., 5.])

        A closed gate does not hide what is broken: 0 times NaN is NaN.

        >>> attnspec.gate(np.array([[[[np.nan, 1.0]]]]), np.zeros(1))[0, 0]
        array([[nan,  0.]])
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
