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
    """
    mixed = product(concatenated, w_o, precision=precision)
    return mixed if b_o is None else mixed + b_o
