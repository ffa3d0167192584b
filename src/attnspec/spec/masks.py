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

    Laws:
        Query i sees key j if j is at most i plus offset.
        Causality is a mask.
        What comes later has exactly no influence on a causal prefix.
        A causal prefix can be computed alone.
        Leaving out the first n queries shifts the offset by n.
        A window without a bound to the left and with none to the right is causality.

    Examples: Edge cases
        Each query sees itself and what came before.

        >>> import numpy as np, attnspec
        >>> keys = np.array([[0, 1, 2]])
        >>> attnspec.keep_causal(keys, keys).astype(int)[0, 0]
        array([[1, 0, 0],
               [1, 1, 0],
               [1, 1, 1]])

        A query before the first key sees none; one behind the last sees all.

        >>> attnspec.keep_causal(np.array([[-1, 9]]), keys).astype(int)[0, 0]
        array([[0, 0, 0],
               [1, 1, 1]])

        Positions need not rise: what counts is where a token stands, not its place in the array.

        >>> attnspec.keep_causal(np.array([[1]]), np.array([[2, 0, 1]])).astype(int)[0, 0]
        array([[0, 1, 1]])
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

    Laws:
        A window keeps exactly the keys from i minus left to i plus right.
        A window without a bound to the left and with none to the right is causality.

    Examples: Edge cases
        With 0 on both sides a query sees its own position alone.

        >>> import numpy as np, attnspec
        >>> at = np.array([[0, 1, 2]])
        >>> attnspec.keep_window(at, at, left=0, right=0).astype(int)[0, 0]
        array([[1, 0, 0],
               [0, 1, 0],
               [0, 0, 1]])

        Without bounds it sees all keys, and with one bound all on the other side.

        >>> attnspec.keep_window(at, at).all()
        np.True_
        >>> attnspec.keep_window(at, at, left=1).astype(int)[0, 0]
        array([[1, 1, 1],
               [1, 1, 1],
               [0, 1, 1]])

        Where no key is near, a query sees none.

        >>> attnspec.keep_window(np.array([[9]]), at, left=2, right=2).astype(int)[0, 0]
        array([[0, 0, 0]])
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

    Laws:
        What lies beyond the length of a sequence has exactly no influence.

    Examples: Edge cases
        A length of 0 keeps no key; a length beyond the last key keeps all.

        >>> import numpy as np, attnspec
        >>> keys = np.ones((3, 1, 2, 1))
        >>> attnspec.keep_lengths(keys, np.array([0, 1, 9])).astype(int)[:, 0, 0]
        array([[0, 0],
               [1, 0],
               [1, 1]])

        There is one length for each sequence.

        >>> attnspec.keep_lengths(keys, np.array([1, 2, 2, 1]))
        Traceback (most recent call last):
            ...
        attnspec.errors.ShapeError: keep_lengths: lengths (4,) has batch=4, but batch=3 was set by keys (3, 1, 2, 1).
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

    Laws:
        A query sees the keys of its own document and no others.
        Packed sequences give what each gives alone.

    Examples: Edge cases
        A query of a document without keys sees none.

        >>> import numpy as np, attnspec
        >>> attnspec.keep_documents(np.array([[0, 1]]), np.array([[0, 0, 2]])).astype(int)[0, 0]
        array([[1, 1, 0],
               [0, 0, 0]])

        Numbers need no order; tokens of one number are one document, wherever they stand.

        >>> attnspec.keep_documents(np.array([[7]]), np.array([[7, -1, 7]])).astype(int)[0, 0]
        array([[1, 0, 1]])
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

    Laws:
        Keep both is the intersection.
        Masking twice is masking with both.

    Examples: Edge cases
        An axis of size 1 in one mask stands for all of the other's.

        >>> import numpy as np, attnspec
        >>> padding = np.array([[[[True, True, False]]]])
        >>> causal = np.array([[[[True, False, False], [True, True, False], [True, True, True]]]])
        >>> attnspec.keep_both(padding, causal).astype(int)[0, 0]
        array([[1, 0, 0],
               [1, 1, 0],
               [1, 1, 0]])

        Two masks that each keep some key may keep none together.

        >>> attnspec.keep_both(padding, ~padding).any()
        np.False_
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

    Laws:
        Every query keeps the extra keys, and of the others what it kept.
        Extra keys are keys that every sequence has and every query keeps.

    Examples: Edge cases
        A query that kept no key of the context keeps the extra ones.

        >>> import numpy as np, attnspec
        >>> attnspec.keep_extra(np.array([[[[True, False], [False, False]]]]), extra=1).astype(int)[0, 0]
        array([[1, 0, 1],
               [0, 0, 1]])

        Without extra keys the mask stays as it is.

        >>> attnspec.keep_extra(np.array([[[[True, False]]]]), extra=0)[0, 0]
        array([[ True, False]])
    """
    xp = backend_of(keep)
    found = xp.any(keep, axis=-1)
    always: A = found | ~found
    return xp.concat((keep, xp.repeat(always, extra, axis=3)), axis=3)
