"""Ragged batches: several sequences packed one behind the other into one, told apart by their cumulative lengths."""

from jaxtyping import Int

from ..arrays import A, backend_of
from ..step import step
from .positions import Positions
from .rules import Mask


@step("fan out", equation=r"s_i = |\{ c : c_0 < c \le i \}|")
def number_documents(cumulative: Int[A, " boundaries"], /, *, seq: int) -> Int[A, "1 seq"]:
    """Say for each token of a packed sequence which document it belongs to.

    The boundaries are those of FlashAttention's `cu_seqlens`: 0, then the end of each document.

    Args:
        cumulative: the boundaries, rising.
        seq: how many tokens there are.

    Returns:
        The number of each token's document, from 0 on; tokens behind the last boundary are one more document.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        Every document of a packed sequence has its number, and counts its tokens from 0 on.
        Packed sequences give what each gives alone.

    Examples: Edge cases
        An empty document takes a number, but no token.

        >>> import numpy as np, attnspec
        >>> attnspec.number_documents(np.array([0, 2, 2, 3]), seq=3)
        array([[0, 0, 2]])

        Tokens behind the last boundary are one more document; without a boundary behind 0 all of them are.

        >>> attnspec.number_documents(np.array([0, 2]), seq=4)
        array([[0, 0, 1, 1]])
        >>> attnspec.number_documents(np.array([0]), seq=2)
        array([[0, 0]])
    """
    xp = backend_of(cumulative)
    passed = xp.arange(seq, cumulative)[:, None] >= cumulative[None, 1:]
    return xp.sum(xp.astype(passed, cumulative.dtype), axis=1)[None, :, 0]


@step("fan out", equation=r"p_i = i - c_{s_i}")
def count_in_documents(cumulative: Int[A, " boundaries"], documents: Int[A, "1 seq"], /) -> Int[A, "1 seq"]:
    """Number the tokens of each document of a packed sequence from 0 on.

    Args:
        cumulative: the boundaries: 0, then the end of each document.
        documents: the number of each token's document.

    Returns:
        The position of each token in its document.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        Every document of a packed sequence has its number, and counts its tokens from 0 on.
        Packed sequences give what each gives alone.

    Examples: Edge cases
        An empty document moves nothing.

        >>> import numpy as np, attnspec
        >>> attnspec.count_in_documents(np.array([0, 2, 2, 4]), np.array([[0, 0, 2, 2]]))
        array([[0, 1, 0, 1]])

        Tokens behind the last boundary count from 0 on, too.

        >>> attnspec.count_in_documents(np.array([0, 2]), np.array([[0, 0, 1, 1]]))
        array([[0, 1, 0, 1]])
    """
    xp = backend_of(cumulative)
    return xp.arange(documents.shape[1], cumulative)[None, :] - xp.take(cumulative, documents[0, :], axis=0)[None, :]


def packed(cumulative_q: A, cumulative_k: A | None = None, /, *, seq_q: int, seq_k: int | None = None) -> tuple[Mask, Positions[A]]:
    """Make the mask and the positions of packed sequences: each document attends to itself, and counts from 0 on.

    Args:
        cumulative_q: the boundaries of the queries' documents: 0, then the end of each.
        cumulative_k: the boundaries of the keys' documents, as many; None for those of the queries.
        seq_q: how many queries there are.
        seq_k: how many keys there are; None for as many as queries.

    Returns:
        The mask, for `keep`, and the positions, for `positions`.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    cumulative_k = cumulative_q if cumulative_k is None else cumulative_k
    documents_q = number_documents(cumulative_q, seq=seq_q)
    documents_k = number_documents(cumulative_k, seq=seq_q if seq_k is None else seq_k)
    positions = Positions(count_in_documents(cumulative_q, documents_q), count_in_documents(cumulative_k, documents_k))
    return Mask.documents(documents_q, documents_k), positions
