"""Fan out: every head gets queries, keys and values of its own."""

from jaxtyping import Float

from ..arrays import A, backend_of
from ..errors import ConfigError
from ..step import step


@step("fan out", equation=r"Q_i = X W^Q_i + b^Q_i", multiply_adds="batch*h*seq_q*d_model*d_k")
def project_queries(
    x: Float[A, "batch seq_q d_model"], w_q: Float[A, "h d_model d_k"], b_q: Float[A, "h d_k"] | None = None, /
) -> Float[A, "batch h seq_q d_k"]:
    """Ask, once per head, what each position looks for.

    The formula is that of Vaswani et al. (2017), "Attention is all you need", section 3.2.2, with a bias.

    Args:
        x: the positions that ask.
        w_q: each head's own projection.
        b_q: each head's own bias; None for none.

    Returns:
        One query for each head and position.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return _project(x, w_q, b_q)


@step("fan out", equation=r"K_i = C W^K_i + b^K_i", multiply_adds="batch*h_kv*seq_k*d_key_in*d_k")
def project_keys(
    context: Float[A, "batch seq_k d_key_in"], w_k: Float[A, "h_kv d_key_in d_k"], b_k: Float[A, "h_kv d_k"] | None = None, /
) -> Float[A, "batch h_kv seq_k d_k"]:
    """Say, once per key/value head, what each position can be found by.

    The formula is that of Vaswani et al. (2017), section 3.2.2, with a bias.

    Args:
        context: the positions that can be looked at.
        w_k: each key/value head's own projection.
        b_k: each key/value head's own bias; None for none.

    Returns:
        One key for each key/value head and position.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return _project(context, w_k, b_k)


@step("fan out", equation=r"V_i = C' W^V_i + b^V_i", multiply_adds="batch*h_kv*seq_k*d_value_in*d_v")
def project_values(
    context_v: Float[A, "batch seq_k d_value_in"], w_v: Float[A, "h_kv d_value_in d_v"], b_v: Float[A, "h_kv d_v"] | None = None, /
) -> Float[A, "batch h_kv seq_k d_v"]:
    """Say, once per key/value head, what each position has to give.

    The formula is that of Vaswani et al. (2017), section 3.2.2, with a bias.

    Args:
        context_v: the positions whose content is blended, in general the context of the keys.
        w_v: each key/value head's own projection.
        b_v: each key/value head's own bias; None for none.

    Returns:
        One value for each key/value head and position.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return _project(context_v, w_v, b_v)


@step("fan out", equation=r"K_i = K_{\lfloor i h_{kv} / h \rfloor}")
def share_keys(keys: Float[A, "batch h_kv seq_k d_k"], /, *, h: int) -> Float[A, "batch h seq_k d_k"]:
    """Give every query head the keys of its group: query head i reads key head `i // (h // h_kv)`.

    The grouping is that of Ainslie et al. (2023), "GQA", with the heads of a group side by side.

    Args:
        keys: one set of keys for each group.
        h: the number of query heads, a multiple of the number of groups.

    Returns:
        One set of keys for each query head.

    Raises:
        ConfigError: the groups do not divide the query heads.
    """
    return _share("share_keys", keys, h)


@step("fan out", equation=r"V_i = V_{\lfloor i h_{kv} / h \rfloor}")
def share_values(values: Float[A, "batch h_kv seq_k d_v"], /, *, h: int) -> Float[A, "batch h seq_k d_v"]:
    """Give every query head the values of its group: query head i reads value head `i // (h // h_kv)`.

    The grouping is that of Ainslie et al. (2023), "GQA", with the heads of a group side by side.

    Args:
        values: one set of values for each group.
        h: the number of query heads, a multiple of the number of groups.

    Returns:
        One set of values for each query head.

    Raises:
        ConfigError: the groups do not divide the query heads.
    """
    return _share("share_values", values, h)


def _project(x: A, w: A, b: A | None) -> A:
    projected = x[:, None, :, :] @ w
    return projected if b is None else projected + b[:, None, :]


def _share(name: str, heads: A, h: int) -> A:
    h_kv = heads.shape[1]
    if h_kv == 0 or h % h_kv:
        msg = f"{name}: h={h} must be a multiple of h_kv={h_kv}, so that all key/value heads serve equally many query heads."
        raise ConfigError(msg)
    return backend_of(heads).repeat(heads, h // h_kv, axis=1)
