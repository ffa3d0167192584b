"""Masks: which query may attend to which key. True keeps, everywhere."""

from jaxtyping import Bool, Float

from ..arrays import A, backend_of
from ..step import step


@step("attend", equation=r"M_{ij} = [j \le i + o]")
def keep_causal(scores: Float[A, "batch h seq_q seq_k"], /, *, offset: int = 0) -> Bool[A, "1 1 seq_q seq_k"]:
    """Let each query see the keys up to its own position.

    The anchor is explicit because projects differ: 0 aligns the first query with the first key (ONNX Attention),
    `seq_k - seq_q` the last with the last, the length of a cache continues it.

    Args:
        scores: the scores to mask; only their axes matter.
        offset: query i sees key j if `j <= i + offset`.

    Returns:
        True where the query may attend to the key.

    Raises:
        AttnspecError: the arguments do not fit together.
    """
    xp = backend_of(scores)
    seq_q, seq_k = scores.shape[-2:]
    latest = xp.arange(seq_q, scores) + offset
    return (xp.arange(seq_k, scores)[None, :] <= latest[:, None])[None, None, :, :]


@step("attend", equation=r"M_{ij} = M_{ij} \wedge M'_{ij}")
def keep_both(
    keep: Bool[A, "#batch #h #seq_q seq_k"], other: Bool[A, "#batch #h #seq_q seq_k"], /
) -> Bool[A, "#batch #h #seq_q seq_k"]:
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
