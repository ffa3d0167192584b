"""Where an implementation rounds, and what comes of it in a sum of products."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rounding:
    """Where an implementation rounds, as unit roundoffs; 0 for a place where it does not round once more.

    Attributes:
        unit: arithmetic and accumulation.
        projected: queries, keys and values, and what is made of them before they are compared.
        scores: scores, wherever they are kept; so are then all other results on the way to the weights.
        weights: the weights.
        blended: what each head found.
        output: the output.
        exponential: the relative error of an exponential and the error of a hyperbolic tangent, in units of `unit`.
        argument: how often the argument of an exponential is rounded.
        underflow: half of the smallest number of a narrow dtype: what rounding to it adds in absolute terms.
        peak: how often the largest score is rounded, by itself, before it is subtracted.
        operands: the factors of matrix products.
    """

    unit: float
    projected: float = 0.0
    scores: float = 0.0
    weights: float = 0.0
    blended: float = 0.0
    output: float = 0.0
    exponential: float = 8.0
    argument: float = 2.0
    underflow: float = 0.0
    peak: float = 0.0
    operands: float = 0.0

    def store(self, worst: Any, variance: Any, result: Array, unit: float, /) -> tuple[Any, Any]:
        """Round a result once more, to a narrower dtype; both its errors grow."""
        if not unit:
            return worst, variance
        size = np.abs(result)
        worst = worst + unit * (size + worst) + self.underflow
        return worst, variance + (unit * size) ** 2 / 3 + self.underflow**2 / 3


def _narrow(unit: float, underflow: float) -> tuple[Rounding, Rounding]:
    """Step by step, every result in the narrow dtype; and fused, where scores are not kept."""
    narrow = dict.fromkeys(("projected", "scores", "weights", "blended", "output"), unit)
    eager = Rounding(2.0**-24, **narrow, underflow=underflow, peak=2.0)
    return eager, replace(eager, scores=0.0)


_SINGLE = Rounding(2.0**-24, underflow=2.0**-126, peak=2.0)

ROUNDINGS: dict[str, tuple[Rounding, ...]] = {
    "float64": (Rounding(2.0**-53, underflow=2.0**-1022, peak=2.0),),
    "float32": (_SINGLE,),
    "tf32": (replace(_SINGLE, operands=2.0**-11),),
    "bfloat16": _narrow(2.0**-8, 2.0**-126),
    "float16": _narrow(2.0**-11, 2.0**-25),
    "float64_float32_inside": (_SINGLE,),
    "float32_bfloat16_inside": (replace(_SINGLE, operands=2.0**-8),),
}
"""The roundings to allow for, by the name of a precision; the largest tolerance of them counts.

`tf32` and `float32_bfloat16_inside` round the factors of matrix products, as accelerators may do.
"""


LENIENT: dict[str, tuple[Rounding, ...]] = {
    "float64": (replace(ROUNDINGS["float64"][0], peak=8.0, blended=2.0**-49),),
    "float32": (replace(_SINGLE, peak=8.0, blended=2.0**-20),),
    "bfloat16": (*ROUNDINGS["bfloat16"], Rounding(2.0**-8, underflow=2.0**-126, peak=2.0, blended=2.0**-6)),
    "float16": (*ROUNDINGS["float16"], Rounding(2.0**-11, underflow=2.0**-25, peak=2.0, blended=2.0**-8)),
}
"""Rougher ways to compute, which are right too: parts merged by their log-sum-exp; every operation rounded to 16 bits."""


def growth(count: float, unit: float, /) -> float:
    """The largest relative error of a sum of as many products, in any order: (1 - u)^-n - 1, a little below gamma_n."""
    return math.expm1(-count * math.log1p(-unit)) if unit < 1 else math.inf


def scatter(unit: float, count: int, squares: Array, total: Array, magnitudes: Array) -> Array:
    """The variance of the error of a sum of products, for a random order and for any.

    The error of each rounding is taken for independent, with the variance u^2/3. Partial sums that are taken in a
    random order have a mean square of (n + 1) / n (squares / 6 + total^2 / 3); in any order none is larger than half of
    what the magnitudes and the total come to.

    Args:
        unit: the unit roundoff.
        count: how many terms there are.
        squares: the sum of the squares of the terms.
        total: their sum.
        magnitudes: the sum of their magnitudes.

    Returns:
        The two variances, along a new first axis.
    """
    both = np.stack(((count + 1) * (squares / 6 + total**2 / 3), count * ((magnitudes + np.abs(total)) / 2) ** 2))
    return (both + squares) * (unit**2 / 3)
