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
