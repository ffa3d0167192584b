"""Fan out: every head gets queries, keys and values of its own."""

from jaxtyping import Float

from ..arrays import A, Precision, accurate_dtype, backend_of, product
from ..errors import ConfigError
from ..step import step
from .policy import Grouping, Norm


@step("fan out", equation=r"Q_i = X W^Q_i + b^Q_i", multiply_adds="batch*h*seq_q*d_model*d_k")
def project_queries(
    x: Float[A, "batch seq_q d_model"],
    w_q: Float[A, "h d_model d_k"],
    b_q: Float[A, "h d_k"] | None = None,
    /,
    *,
    precision: Precision | None = None,
) -> Float[A, "batch h seq_q d_k"]:
    """Ask, once per head, what each position looks for.

    The formula is that of Vaswani et al. (2017), "Attention is all you need", section 3.2.2, with a bias.

    Args:
        x: the positions that ask.
        w_q: each head's own projection.
        b_q: each head's own bias; None for none.
        precision: the dtype to multiply in; None for the library's own way.

    Returns:
        One query for each head and position.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        Changing the parameters of one head changes only its slot.
        A batch is computed sequence by sequence.
        Permuting the queries permutes the output.
        One head of full width is plain attention.

    Examples: Edge cases
        No positions, no queries; every head has its own for each position.

        >>> import numpy as np, attnspec
        >>> attnspec.project_queries(np.ones((1, 0, 3)), np.ones((2, 3, 4))).shape
        (1, 2, 0, 4)

        A position that is not a number spoils its own query alone.

        >>> x = np.array([[[np.nan], [1.0]]])
        >>> attnspec.project_queries(x, np.ones((1, 1, 1)), np.zeros((1, 1)))[0, 0]
        array([[nan],
               [ 1.]])

        A transposed projection is refused, unless it is square.

        >>> attnspec.project_queries(np.ones((1, 5, 3)), np.ones((2, 4, 3)))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        attnspec.errors.ShapeError: project_queries: w_q (2, 4, 3) has d_model=4, but d_model=3 was set by x (1, 5, 3)...
    """
    return _project(x, w_q, b_q, precision)


@step("fan out", equation=r"K_i = C W^K_i + b^K_i", multiply_adds="batch*h_kv*seq_k*d_key_in*d_k")
def project_keys(
    context: Float[A, "batch seq_k d_key_in"],
    w_k: Float[A, "h_kv d_key_in d_k"],
    b_k: Float[A, "h_kv d_k"] | None = None,
    /,
    *,
    precision: Precision | None = None,
) -> Float[A, "batch h_kv seq_k d_k"]:
    """Say, once per key/value head, what each position can be found by.

    The formula is that of Vaswani et al. (2017), section 3.2.2, with a bias.

    Args:
        context: the positions that can be looked at.
        w_k: each key/value head's own projection.
        b_k: each key/value head's own bias; None for none.
        precision: the dtype to multiply in; None for the library's own way.

    Returns:
        One key for each key/value head and position.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        Changing the parameters of one head changes only its slot.
        `b_k` has no influence.
        The order of the keys is irrelevant.
        Grouped heads are heads with repeated parameters.
        One head of full width is plain attention.

    Examples: Edge cases
        A context without positions has no keys.

        >>> import numpy as np, attnspec
        >>> attnspec.project_keys(np.ones((1, 0, 3)), np.ones((2, 3, 4))).shape
        (1, 2, 0, 4)

        A position of zeros has the bias as its key.

        >>> b_k = np.array([[5.0, 7.0]])
        >>> attnspec.project_keys(np.zeros((1, 2, 3)), np.ones((1, 3, 2)), b_k)[0, 0]
        array([[5., 7.],
               [5., 7.]])
    """
    return _project(context, w_k, b_k, precision)


@step("fan out", equation=r"V_i = C' W^V_i + b^V_i", multiply_adds="batch*h_kv*seq_k*d_value_in*d_v")
def project_values(
    context_v: Float[A, "batch seq_k d_value_in"],
    w_v: Float[A, "h_kv d_value_in d_v"],
    b_v: Float[A, "h_kv d_v"] | None = None,
    /,
    *,
    precision: Precision | None = None,
) -> Float[A, "batch h_kv seq_k d_v"]:
    """Say, once per key/value head, what each position has to give.

    The formula is that of Vaswani et al. (2017), section 3.2.2, with a bias.

    Args:
        context_v: the positions whose content is blended, in general the context of the keys.
        w_v: each key/value head's own projection.
        b_v: each key/value head's own bias; None for none.
        precision: the dtype to multiply in; None for the library's own way.

    Returns:
        One value for each key/value head and position.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        Changing the parameters of one head changes only its slot.
        Values come from the context, unless they have one of their own.
        The order of the keys is irrelevant.
        Grouped heads are heads with repeated parameters.
        One head of full width is plain attention.

    Examples: Edge cases
        Values may be wider than keys, or narrower.

        >>> import numpy as np, attnspec
        >>> attnspec.project_values(np.ones((1, 2, 3)), np.ones((1, 3, 5))).shape
        (1, 1, 2, 5)

        Without a bias, a position of zeros has nothing to give.

        >>> attnspec.project_values(np.zeros((1, 1, 3)), np.ones((1, 3, 2)))[0, 0]
        array([[0., 0.]])
    """
    return _project(context_v, w_v, b_v, precision)


@step("fan out", equation=r"K_i = K_{\lfloor i h_{kv} / h \rfloor}")
def share_keys(keys: Float[A, "batch h_kv seq_k d_k"], /, *, h: int, grouping: Grouping = "contiguous") -> Float[A, "batch h seq_k d_k"]:
    """Give every query head the keys of its group: query head i reads key head `i // (h / h_kv)`, or `i % h_kv`.

    The grouping is that of Ainslie et al. (2023), "GQA".

    Args:
        keys: one set of keys for each group.
        h: the number of query heads, a multiple of the number of groups.
        grouping: whether the heads of a group are `contiguous`, or every h_kv-th head (`strided`).

    Returns:
        One set of keys for each query head.

    Raises:
        ConfigError: the groups do not divide the query heads.

    Laws:
        Sharing gives query head i the keys and values of its group.
        Grouped heads are heads with repeated parameters.

    Examples: Edge cases
        One set of keys serves all heads; as many sets as heads are left as they are.

        >>> import numpy as np, attnspec
        >>> one, two = np.array([[[[5.0]]]]), np.array([[[[5.0]], [[7.0]]]])
        >>> attnspec.share_keys(one, h=3).ravel()
        array([5., 5., 5.])
        >>> attnspec.share_keys(two, h=2).ravel()
        array([5., 7.])

        The heads of a group stand together, or one in each round.

        >>> attnspec.share_keys(two, h=4).ravel()
        array([5., 5., 7., 7.])
        >>> attnspec.share_keys(two, h=4, grouping="strided").ravel()
        array([5., 7., 5., 7.])

        Groups are equal, or there are none.

        >>> attnspec.share_keys(two, h=3)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        attnspec.errors.ConfigError: share_keys: h=3 must be a multiple of h_kv=2...
    """
    return _share("share_keys", keys, h, grouping)


@step("fan out", equation=r"V_i = V_{\lfloor i h_{kv} / h \rfloor}")
def share_values(
    values: Float[A, "batch h_kv seq_k d_v"], /, *, h: int, grouping: Grouping = "contiguous"
) -> Float[A, "batch h seq_k d_v"]:
    """Give every query head the values of its group: query head i reads value head `i // (h / h_kv)`, or `i % h_kv`.

    The grouping is that of Ainslie et al. (2023), "GQA".

    Args:
        values: one set of values for each group.
        h: the number of query heads, a multiple of the number of groups.
        grouping: whether the heads of a group are `contiguous`, or every h_kv-th head (`strided`).

    Returns:
        One set of values for each query head.

    Raises:
        ConfigError: the groups do not divide the query heads.

    Laws:
        Sharing gives query head i the keys and values of its group.
        Grouped heads are heads with repeated parameters.

    Examples: Edge cases
        One set of values serves all heads; as many sets as heads are left as they are.

        >>> import numpy as np, attnspec
        >>> one, two = np.array([[[[5.0]]]]), np.array([[[[5.0]], [[7.0]]]])
        >>> attnspec.share_values(one, h=3).ravel()
        array([5., 5., 5.])
        >>> attnspec.share_values(two, h=2).ravel()
        array([5., 7.])

        Without positions there is nothing to share, and still a place for every head.

        >>> attnspec.share_values(np.ones((1, 2, 0, 3)), h=4).shape
        (1, 4, 0, 3)
    """
    return _share("share_values", values, h, grouping)


def _project(x: A, w: A, b: A | None, precision: Precision | None) -> A:
    projected = product(x[:, None, :, :], w, precision=precision)
    return projected if b is None else projected + b[:, None, :]


@step("fan out", equation=r"x \leftarrow g \odot x / \lVert x \rVert")
def normalise(
    tokens: Float[A, "batch heads seq d_k"], gain: Float[A, "#heads d_k"] | None = None, /, *, kind: Norm, epsilon: float = 1e-6
) -> Float[A, "batch heads seq d_k"]:
    """Bring each head's queries or keys to one length, before they are compared.

    `rms` divides by the root mean square (Zhang and Sennrich, 2019), `layer` first subtracts the mean (Ba et al.,
    2016), `l2` divides by the length (Henry et al., 2020, "Query-key normalization"). Worked out at least in float32.

    Args:
        tokens: the queries or keys.
        gain: a factor for each channel, of all heads or of each; None for none.
        kind: `rms`, `layer` or `l2`.
        epsilon: what the mean square is raised by before the root; `l2` has none, and leaves a zero vector zero.

    Returns:
        The normalised vectors.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        Normalised vectors all have one length.
        The length of a vector has no influence once it is normalised.

    Examples: Edge cases
        A vector of zeros has no direction, and stays as it is.

        >>> import numpy as np, attnspec
        >>> zeros = np.zeros((1, 1, 1, 2))
        >>> attnspec.normalise(zeros, kind="l2")[0, 0]
        array([[0., 0.]])
        >>> attnspec.normalise(zeros, kind="rms", epsilon=0.0)[0, 0]
        array([[0., 0.]])

        A single channel is its own mean, so `layer` leaves nothing of it; `rms` leaves its sign.

        >>> single = np.array([[[[-3.0]]]])
        >>> attnspec.normalise(single, kind="layer")[0, 0]
        array([[0.]])
        >>> attnspec.normalise(single, kind="rms", epsilon=0.0)[0, 0]
        array([[-1.]])

        Where a vector is tiny, `epsilon` is what it is measured by.

        >>> tiny = np.full((1, 1, 1, 2), 1e-6)
        >>> attnspec.normalise(tiny, kind="rms").round(4)[0, 0]
        array([[0.001, 0.001]])
    """
    xp, width = backend_of(tokens), tokens.shape[3]
    wide = xp.astype(tokens, accurate_dtype(tokens))
    centred = wide - xp.sum(wide, axis=-1) / width if kind == "layer" else wide
    square = xp.sum(centred * centred, axis=-1)
    spread = square if kind == "l2" else square / width + epsilon
    normal = xp.astype(centred / xp.where(spread == 0, 1.0, spread) ** 0.5, tokens.dtype)
    return normal if gain is None else normal * gain[:, None, :]


@step("fan out", equation=r"K_i \leftarrow [K_i; E^K_i]")
def extend_keys(keys: Float[A, "batch h_kv seq_k d_k"], extra_k: Float[A, "h_kv extra d_k"], /) -> Float[A, "batch h_kv seq_k+extra d_k"]:
    """Put learnt keys behind those of the context, the same for every sequence.

    They are `bias_k` of `torch.nn.MultiheadAttention`; a key and a value of zeros are its `add_zero_attn`.

    Args:
        keys: the keys of the context.
        extra_k: the learnt keys.

    Returns:
        The keys, the learnt ones last.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        Extra keys are keys that every sequence has and every query keeps.
        An extra key and value of zeros are a sink of score 0.

    Examples: Edge cases
        Without learnt keys nothing changes.

        >>> import numpy as np, attnspec
        >>> attnspec.extend_keys(np.ones((1, 2, 3, 4)), np.ones((2, 0, 4))).shape
        (1, 2, 3, 4)

        Where the context has no keys, the learnt ones are all that there is.

        >>> attnspec.extend_keys(np.ones((2, 1, 0, 1)), np.array([[[5.0]]])).ravel()
        array([5., 5.])
    """
    return _extend(keys, extra_k)


@step("fan out", equation=r"V_i \leftarrow [V_i; E^V_i]")
def extend_values(
    values: Float[A, "batch h_kv seq_k d_v"], extra_v: Float[A, "h_kv extra d_v"], /
) -> Float[A, "batch h_kv seq_k+extra d_v"]:
    """Put learnt values behind those of the context, the same for every sequence.

    They are `bias_v` of `torch.nn.MultiheadAttention`; a key and a value of zeros are its `add_zero_attn`.

    Args:
        values: the values of the context.
        extra_v: the learnt values.

    Returns:
        The values, the learnt ones last.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        Extra keys are keys that every sequence has and every query keeps.
        An extra key and value of zeros are a sink of score 0.

    Examples: Edge cases
        Without learnt values nothing changes.

        >>> import numpy as np, attnspec
        >>> attnspec.extend_values(np.ones((1, 2, 3, 4)), np.ones((2, 0, 4))).shape
        (1, 2, 3, 4)

        Where the context has no values, the learnt ones are all that there is.

        >>> attnspec.extend_values(np.ones((2, 1, 0, 1)), np.array([[[5.0]]])).ravel()
        array([5., 5.])
    """
    return _extend(values, extra_v)


def _extend(heads: A, extra: A) -> A:
    xp = backend_of(heads)
    return xp.concat((heads, xp.repeat(extra[None, :, :, :], heads.shape[0], axis=0)), axis=2)


def _share(name: str, heads: A, h: int, grouping: Grouping) -> A:
    batch, h_kv, seq, width = heads.shape
    if h_kv == 0 or h % h_kv:
        msg = f"{name}: h={h} must be a multiple of h_kv={h_kv}, so that all key/value heads serve equally many query heads."
        raise ConfigError(msg)
    xp = backend_of(heads)
    spread = (heads[:, :, None, :, :], 2) if grouping == "contiguous" else (heads[:, None, :, :, :], 1)
    return xp.reshape(xp.repeat(spread[0], h // h_kv, axis=spread[1]), (batch, h, seq, width))
