"""Masks: which query may attend to which key. True keeps, everywhere."""

from jaxtyping import Bool, Float, Int

from ..arrays import A, backend_of
from ..step import step


@step("attend", equation=r"M_{ij} = [p_j \le p_i]")
def keep_causal(positions_q: Int[A, "#batch seq_q"], positions_k: Int[A, "#batch seq_k"], /) -> Bool[A, "#batch 1 seq_q seq_k"]:
    """Let each query see the keys up to its own position.

    Args:
        positions_q: where the queries stand.
        positions_k: where the keys stand.

    Returns:
        True where the query may attend to the key.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return positions_k[:, None, None, :] <= positions_q[:, None, :, None]


@step("attend", equation=r"M_{ij} = [p_i - l \le p_j \le p_i + r]")
def keep_window(
    positions_q: Int[A, "#batch seq_q"], positions_k: Int[A, "#batch seq_k"], /, *, left: int | None = None, right: int | None = None
) -> Bool[A, "#batch 1 seq_q seq_k"]:
    """Let each query see a window of keys around its own position.

    The bounds are those of ONNX Attention-25: how many keys to the left and to the right, its own not counted.

    Args:
        positions_q: where the queries stand.
        positions_k: where the keys stand.
        left: how far back a query sees; None for all the way.
        right: how far ahead a query sees; None for all the way.

    Returns:
        True where the query may attend to the key.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    ahead = positions_k[:, None, None, :] - positions_q[:, None, :, None]
    behind = ahead >= (-left if left is not None else ahead)
    return behind & (ahead <= (right if right is not None else ahead))


@step("attend", equation=r"M_{ij} = [j < n_b]")
def keep_lengths(keys: Float[A, "batch h seq_k d_k"], lengths: Int[A, " batch"], /) -> Bool[A, "batch 1 1 seq_k"]:
    """Let queries see only the first keys of each sequence, the others are padding.

    Args:
        keys: the keys; only their axes matter.
        lengths: how many keys of each sequence are real.

    Returns:
        True where the key is real.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return (backend_of(keys).arange(keys.shape[2], keys) < lengths[:, None])[:, None, None, :]


@step("attend", equation=r"M_{ij} = [s_i = s_j]")
def keep_documents(documents_q: Int[A, "#batch seq_q"], documents_k: Int[A, "#batch seq_k"], /) -> Bool[A, "#batch 1 seq_q seq_k"]:
    """Let each query see only its own document, of several packed into one sequence.

    Args:
        documents_q: the number of each query's document.
        documents_k: the number of each key's document.

    Returns:
        True where query and key are of one document.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return documents_q[:, None, :, None] == documents_k[:, None, None, :]


@step("attend", equation=r"M_{ij} = M_{ij} \wedge M'_{ij}")
def keep_both(keep: Bool[A, "#batch #h #seq_q seq_k"], other: Bool[A, "#batch #h #seq_q seq_k"], /) -> Bool[A, "#batch #h #seq_q seq_k"]:
    """Let a query see only the keys that both masks keep.

    Args:
        keep: one mask.
        other: another.

    Returns:
        True where both are.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    return keep & other


@step("attend", equation=r"M_{ij} = 1 \text{ for every extra key } j")
def keep_extra(keep: Bool[A, "#batch #h #seq_q seq_k"], /, *, extra: int) -> Bool[A, "#batch #h #seq_q seq_k+extra"]:
    """Let every query see extra keys, which stand behind those of the context.

    Args:
        keep: True where the query may attend to the key.
        extra: how many extra keys there are.

    Returns:
        The mask for all keys.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    xp = backend_of(keep)
    always: A = keep[:, :, :, :1] | ~keep[:, :, :, :1]
    return xp.concat((keep, xp.repeat(always, extra, axis=3)), axis=3)
