"""Fan in: the heads' findings side by side, then mixed."""

from jaxtyping import Float

from ..arrays import A, Precision, backend_of, product
from ..step import step


@step("fan in", equation=r"Z = [Z_1; \dots; Z_h]")
def concatenate(blended: Float[A, "batch h seq_q d_v"], /) -> Float[A, "batch seq_q h*d_v"]:
    """Put what the heads found side by side, head after head.

    The formula is that of Vaswani et al. (2017), section 3.2.2.

    Args:
        blended: what each head found.

    Returns:
        One vector for each position, in which every head has its own slot.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        Changing the parameters of one head changes only its slot.
        Permuting the heads and their blocks of `w_o` together changes nothing.
        Mixing the heads is adding what each makes of its block of `w_o`.
        A batch is computed sequence by sequence.

    Examples: Edge cases
        Head after head: all channels of the first, then all of the second.

        >>> import numpy as np, attnspec
        >>> attnspec.concatenate(np.array([[[[1.0, 2.0]], [[3.0, 4.0]]]]))
        array([[[1., 2., 3., 4.]]])

        One head is left as it is, less its axis. Without queries there are no rows.

        >>> attnspec.concatenate(np.array([[[[1.0, 2.0]]]]))
        array([[[1., 2.]]])
        >>> attnspec.concatenate(np.ones((1, 3, 0, 2))).shape
        (1, 0, 6)
    """
    batch, h, seq_q, d_v = blended.shape
    xp = backend_of(blended)
    return xp.reshape(xp.permute(blended, (0, 2, 1, 3)), (batch, seq_q, h * d_v))


@step("fan in", equation=r"Y = Z W^O + b^O", multiply_adds="batch*seq_q*(h*d_v)*d_model")
def mix(
    concatenated: Float[A, "batch seq_q h*d_v"],
    w_o: Float[A, "h*d_v d_model"],
    b_o: Float[A, " d_model"] | None = None,
    /,
    *,
    precision: Precision | None = None,
) -> Float[A, "batch seq_q d_model"]:
    """Let the findings of different heads meet; without this they would stay in separate slots.

    The formula is that of Vaswani et al. (2017), section 3.2.2, with a bias.

    Args:
        concatenated: the findings side by side.
        w_o: the output projection.
        b_o: its bias; None for none.
        precision: the dtype to multiply in; None for the library's own way.

    Returns:
        The output, of the width of the input.

    Raises:
        AttnspecError: the arguments do not fit together.

    Laws:
        Mixing the heads is adding what each makes of its block of `w_o`.
        Permuting the heads and their blocks of `w_o` together changes nothing.
        A query without a key gives exactly `b_o`.
        Without any position to look at the output is exactly `b_o`.

    Examples: Edge cases
        Where no head found anything, exactly the bias is left.

        >>> import numpy as np, attnspec
        >>> b_o = np.array([0.1, 0.2, 0.3])
        >>> attnspec.mix(np.zeros((1, 1, 2)), np.ones((2, 3)), b_o)[0]
        array([[0.1, 0.2, 0.3]])

        The width of what comes in is that of all heads together.

        >>> attnspec.mix(np.ones((1, 1, 4)), np.ones((2, 3)))
        Traceback (most recent call last):
            ...
        attnspec.errors.ShapeError: mix: w_o (2, 3) has h*d_v=2, but h*d_v=4 was set by concatenated (1, 1, 4).
    """
    mixed = product(concatenated, w_o, precision=precision)
    return mixed if b_o is None else mixed + b_o
