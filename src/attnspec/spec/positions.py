"""Positions: where tokens stand, and what follows from it for queries, keys and scores."""

import math
from dataclasses import dataclass
from typing import Generic

from jaxtyping import Float, Int

from ..arrays import A, accurate_dtype, backend_of
from ..errors import ConfigError
from ..step import check_fields, step
from .policy import Pairing


@dataclass(frozen=True, eq=False)
class Positions(Generic[A]):
    """Where each query and each key stands, token by token.

    Attributes:
        queries: the position of each query.
        keys: the position of each key.
    """

    queries: Int[A, "#batch seq_q"]
    keys: Int[A, "#batch seq_k"]

    def __post_init__(self) -> None:
        check_fields(self)


@step("fan out", equation=r"p_i = i + o")
def count_positions(tokens: Float[A, "batch heads seq width"], offset: int | Int[A, " batch"] = 0, /) -> Int[A, "#batch seq"]:
    """Number the tokens from an offset on.

    Args:
        tokens: the queries or keys to number; only their axes matter.
        offset: the position of the first token: one for all sequences, or one for each.

    Returns:
        The position of each token.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        Query i sees key j if j is at most i plus offset.
        Leaving out the first n queries shifts the offset by n.

    Examples: Edge cases
        An offset may be negative: such queries stand before the first key.

        >>> import numpy as np, attnspec
        >>> attnspec.count_positions(np.ones((1, 1, 3, 1)), -2)
        array([[-2, -1,  0]])

        Each sequence may have an offset of its own.

        >>> attnspec.count_positions(np.ones((2, 1, 3, 1)), np.array([0, 5]))
        array([[0, 1, 2],
               [5, 6, 7]])

        Without tokens there is no position.

        >>> attnspec.count_positions(np.ones((1, 1, 0, 1))).shape
        (1, 0)
    """
    count = backend_of(tokens).arange(tokens.shape[2], tokens)[None, :]
    return count + (offset if isinstance(offset, int) else offset[:, None])


@step("fan out", equation=r"(a, b) \leftarrow (a \cos\theta - b \sin\theta,\; a \sin\theta + b \cos\theta),\; \theta = p\, \beta^{-2c/w}")
def rotate(
    tokens: Float[A, "batch heads seq d_k"],
    positions: Int[A, "#batch seq"],
    /,
    *,
    pairing: Pairing = "half",
    width: int | None = None,
    base: float = 10_000.0,
) -> Float[A, "batch heads seq d_k"]:
    """Turn each pair of channels by an angle that grows with the position.

    The formula is that of Su et al. (2021), "RoFormer", section 3.2.2; the product of two turned vectors depends on
    the difference of their positions alone. Angles are taken at least in float32.

    Args:
        tokens: the queries or keys.
        positions: where they stand.
        pairing: `half` pairs channel i with i + width/2, `interleaved` pairs 2i with 2i + 1.
        width: how many channels turn, from the first on; None for all.
        base: the base of the angles.

    Returns:
        The turned vectors, as long as they were.

    Raises:
        ConfigError: the width is odd, or larger than there are channels.

    Laws:
        Turning keeps the length of every pair of channels.
        The scores of turned vectors depend on the difference of positions alone.
        The two pairings are one rotation under a permutation of the channels.
        At position 0 nothing turns.

    Examples: Edge cases
        Channels from `width` on do not turn; with a width of 0 none does.

        >>> import numpy as np, attnspec
        >>> tokens = np.array([[[[1.0, 0.0, 5.0]]]])
        >>> attnspec.rotate(tokens, np.array([[3]]), width=2).round(2)[0, 0]
        array([[-0.99,  0.14,  5.  ]])
        >>> attnspec.rotate(tokens, np.array([[3]]), width=0)[0, 0]
        array([[1., 0., 5.]])

        A negative position turns back.

        >>> attnspec.rotate(tokens, np.array([[-3]]), width=2).round(2)[0, 0]
        array([[-0.99, -0.14,  5.  ]])

        A channel cannot turn alone.

        >>> attnspec.rotate(tokens, np.array([[3]]))
        Traceback (most recent call last):
            ...
        attnspec.errors.ConfigError: rotate: width=3 must be even, since channels turn in pairs, and at most d_k=3.
    """
    width = _even_width(tokens.shape[3], width)
    xp, turning = backend_of(tokens), tokens[:, :, :, :width]
    first, second = _pairs(turning, pairing)
    angle = _angles(positions, width, base, like=tokens)
    cos, sin = xp.astype(xp.cos(angle), tokens.dtype), xp.astype(xp.sin(angle), tokens.dtype)
    turned = _join(first * cos - second * sin, first * sin + second * cos, pairing)
    return xp.concat((turned, tokens[:, :, :, width:]), axis=3)


def _even_width(d_k: int, width: int | None) -> int:
    width = d_k if width is None else width
    if width % 2 or width > d_k:
        raise ConfigError(f"rotate: width={width} must be even, since channels turn in pairs, and at most d_k={d_k}.")
    return width


def _angles(positions: A, width: int, base: float, *, like: A) -> A:
    xp = backend_of(positions)
    wide = accurate_dtype(like)
    rates = base ** (xp.astype(xp.arange(width // 2, positions), wide) * -2 / width)  # a power is truer than an exponential
    return xp.astype(positions, wide)[:, None, :, None] * rates


def _pairs(turning: A, pairing: Pairing) -> tuple[A, A]:
    half = turning.shape[3] // 2
    if pairing == "half":
        return turning[:, :, :, :half], turning[:, :, :, half:]
    return turning[:, :, :, ::2], turning[:, :, :, 1::2]


def _join(first: A, second: A, pairing: Pairing) -> A:
    xp = backend_of(first)
    if pairing == "half":
        return xp.concat((first, second), axis=3)
    batch, heads, seq, half = first.shape
    return xp.reshape(xp.concat((first[..., None], second[..., None]), axis=4), (batch, heads, seq, 2 * half))


def alibi_slopes(h: int, /) -> tuple[float, ...]:
    """Give each head its slope for `linear_bias`.

    The formula is that of Press et al. (2022), "Train short, test long": a geometric sequence from 2^(-8/n) for n a
    power of two; for other h, the slopes of the next smaller power of two, then every other one of the next larger.

    Args:
        h: the number of heads.

    Returns:
        One positive slope for each head.

    Raises:
        ConfigError: there is no head.
    """
    if h < 1:
        raise ConfigError(f"alibi_slopes: h={h} must be positive.")
    power = 2 ** (h.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return (*slopes, *(2 ** (-4 * (2 * i + 1) / power) for i in range(h - power)))


@step("attend", equation=r"B_{hij} = -m_h |p_i - p_j|")
def linear_bias(
    slopes: Float[A, " h"], positions_q: Int[A, "#batch seq_q"], positions_k: Int[A, "#batch seq_k"], /
) -> Float[A, "#batch h seq_q seq_k"]:
    """Make a bias that falls with the distance of query and key (ALiBi).

    The formula is that of Press et al. (2022), with the distance in both directions.

    Args:
        slopes: how fast it falls, for each head; see `alibi_slopes`.
        positions_q: where the queries stand.
        positions_k: where the keys stand.

    Returns:
        The bias to add to the scores.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        A linear bias is minus the slope times the distance.
        A bias of positions depends on their difference alone.

    Examples: Edge cases
        What lies ahead counts like what lies behind; a slope of 0 adds nothing.

        >>> import numpy as np, attnspec
        >>> slopes = np.array([0.5, 0.0])
        >>> attnspec.linear_bias(slopes, np.array([[1]]), np.array([[0, 1, 3]])).ravel() + 0
        array([-0.5,  0. , -1. ,  0. ,  0. ,  0. ])

        However far a key is, its bias is finite: it is not masked.

        >>> attnspec.linear_bias(np.ones(1), np.array([[0]]), np.array([[10**6]])).ravel()
        array([-1000000.])
    """
    xp = backend_of(slopes)
    ahead = xp.astype(positions_k[:, None, None, :] - positions_q[:, None, :, None], slopes.dtype)
    return slopes[:, None, None] * -xp.maximum(ahead, -ahead)


@step("attend", equation=r"B_{hij} = T_{b(p_j - p_i),h}")
def relative_bias(
    table: Float[A, "buckets h"],
    positions_q: Int[A, "#batch seq_q"],
    positions_k: Int[A, "#batch seq_k"],
    /,
    *,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Float[A, "#batch h seq_q seq_k"]:
    """Look up a learnt bias by the bucket of the distance of query and key (T5).

    The buckets are those of Raffel et al. (2020), "Exploring the limits of transfer learning": exact for near keys,
    then logarithmic up to the largest distance.

    Args:
        table: a bias for each bucket and head.
        positions_q: where the queries stand.
        positions_k: where the keys stand.
        max_distance: from here on all keys share the last bucket.
        bidirectional: whether keys ahead have buckets of their own, half of them; else they count as distance 0.

    Returns:
        The bias to add to the scores.

    Raises:
        ConfigError: there are too few buckets, or the largest distance already has a bucket of its own.

    Laws:
        Near keys have a bucket of their own, and far ones share the last.
        A bias of positions depends on their difference alone.

    Examples: Edge cases
        Behind the largest distance all keys share a bucket, in each direction another one.

        >>> import numpy as np, attnspec
        >>> table = np.arange(8.0)[:, None]
        >>> far = np.array([[-1000, -5, -1, 0, 1, 5, 1000]])
        >>> attnspec.relative_bias(table, np.array([[0]]), far, max_distance=5).ravel()
        array([3., 3., 1., 0., 5., 7., 7.])

        In one direction, keys ahead count as distance 0.

        >>> attnspec.relative_bias(table, np.array([[0]]), far, max_distance=5, bidirectional=False).ravel()
        array([7., 7., 1., 0., 0., 0., 0.])

        The largest distance must lie behind those that have a bucket of their own.

        >>> attnspec.relative_bias(table, np.array([[0]]), far, max_distance=2)
        Traceback (most recent call last):
            ...
        attnspec.errors.ConfigError: relative_bias: max_distance=2 must exceed the 2 exact buckets of a direction, at least one.
    """
    xp = backend_of(table)
    ahead: A = positions_k[:, None, :] - positions_q[:, :, None]
    places = xp.reshape(_buckets(ahead, table.shape[0], max_distance, bidirectional=bidirectional), (-1,))
    return xp.permute(xp.reshape(xp.take(table, places, axis=0), (*ahead.shape, table.shape[1])), (0, 3, 1, 2))


def _buckets(ahead: A, buckets: int, max_distance: int, *, bidirectional: bool) -> A:
    xp = backend_of(ahead)
    zero = ahead * 0
    first = zero
    if bidirectional:
        buckets //= 2
        first, distance = xp.where(ahead > 0, zero + buckets, zero), xp.maximum(ahead, -ahead)
    else:
        distance = xp.maximum(-ahead, zero)
    exact = buckets // 2
    if not 0 < exact < max_distance:
        raise ConfigError(f"relative_bias: max_distance={max_distance} must exceed the {exact} exact buckets of a direction, at least one.")
    growth = [(max_distance / exact) ** (k / (buckets - exact)) for k in range(1, buckets - exact)]
    starts = [math.ceil(exact * factor - 1e-9) for factor in growth]  # whole numbers: a rounded logarithm misplaces those it hits
    far = zero + exact + sum(xp.astype(distance >= start, ahead.dtype) for start in starts)
    return first + xp.where(distance < exact, distance, far)
