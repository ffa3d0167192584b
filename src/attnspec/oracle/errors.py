"""The errors of an array, and of a product of two."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..step import Call
from .rounding import Rounding, growth, scatter

Array = npt.NDArray[Any]

_BUDGET = 4_000_000  # how many numbers an array may hold
SIGMAS = 6  # how many standard deviations an error may have
_NEAR = 0.01  # errors of scores up to here move weights in proportion
_FAR = 0.5  # errors of scores from here on can move a mean further than its farthest value is


@dataclass(frozen=True, eq=False)
class Shares:
    """The weights, with a column for the sink if there is one, and the errors of their scores.

    All errors before the division count as errors of the scores: `A exp(d) / sum(A exp(d))` is exact.

    Attributes:
        weights: the weights, before dropout.
        kept: where a key is not masked.
        worst: how large an error of a score can be.
        variance: the variance of the part that is a key's own.
        common: that of the part that all keys of a query share, the error of the query.
        raised: what dropout multiplies the weights by.
    """

    weights: Array
    kept: Array
    worst: Array
    variance: Array
    common: Any
    raised: Any = None

    @cached_property
    def farthest(self) -> float:
        """The largest error of a score of any weight."""
        return float(np.max(self.worst, where=self.weights > 0, initial=0.0))

    def scattered(self) -> tuple[Array, Array]:
        """The standard deviation of the common part, and the variance of the own part, relative to the weights.

        They are those of the scores where these are small; where they are not, an exponential raises them.
        """
        deviation, own = np.sqrt(np.broadcast_to(self.common, (2, *self.weights.shape))), self.variance
        if self.farthest < _NEAR:
            return deviation, own
        reach = np.minimum(SIGMAS * np.sqrt(deviation**2 + own), np.minimum(self.worst, 300.0))
        least = (self.weights * np.exp(-reach)).sum(axis=-1, keepdims=True)
        steep = np.where(reach > 0, np.expm1(reach) / reach, 1.0) / np.where(least > 0, least, 1.0)
        return deviation * steep, own * steep**2

    def apart(self, values: Array, found: Array, rows: Array, squares: Array | None = None, /) -> tuple[Array, Any]:
        """Sum the distances of the values from what was found, by given weights, and their squares.

        The first row bounds how far a mean of values can move, so that it need not exceed the largest distance; the
        others, and the squares, tell by how much it scatters, so that the same holds for that many deviations.
        """
        batch, h, seq_q, seq_k = self.weights.shape
        width = max(1, _BUDGET // max(1, batch * h * seq_q * seq_k))
        sums, scatters, is_far = [], [], self.farthest > _FAR
        for start in range(0, values.shape[-1], width):
            part = values[..., start : start + width].mT[:, :, None]
            part = part if self.raised is None else part * self.raised[:, :, :, None]
            distance = part - found[..., start : start + width, None]  # batch h seq_q width seq_k
            np.abs(distance, out=distance)
            total, scatter = distance @ rows, 0.0
            largest = np.where(self.kept[:, :, :, None], distance, 0.0).max(axis=-1, initial=0.0) if is_far else np.array(np.inf)
            if squares is not None:
                scatter = np.minimum(total[..., 1:] ** 2 + np.square(distance, out=distance) @ squares, (largest[..., None] / SIGMAS) ** 2)
            sums.append(np.minimum(total[..., 0], largest))
            scatters.append(scatter)
        return np.concatenate(sums, axis=3), np.concatenate(scatters, axis=3) if squares is not None else None


@dataclass(frozen=True, eq=False)
class Moved:
    """The part of an error that comes from scores: it is linear in the values, so that `mix` can take it as it is.

    Attributes:
        part: its size, in the error that contains it.
        moved: by how much each weight can change.
        values: the values, with a row of zeros for the sink if there is one.
        found: what each head found.
        shares: the weights.
        gates: the heads' factors.
    """

    part: Array
    moved: Array
    values: Array
    found: Array
    shares: Shares
    gates: Any = 1.0


@dataclass(frozen=True, eq=False)
class Errors:
    """The errors of an array; of one that no step made, none.

    Attributes:
        worst: how large they can be.
        variance: their variance, for a random order of summation and for any.
        common: of scores, the variance of the part that all keys of a query share; it is not in `variance`.
        shares: of weights, what they come from.
        moved: of what heads found, the part that comes from scores; it is in `worst`.
    """

    worst: Any = 0.0
    variance: Any = 0.0
    common: Any = 0.0
    shares: Shares | None = None
    moved: Moved | None = None

    def map(self, change: Callable[[Array], Array], /) -> "Errors":
        """Change all that is there in the same way."""
        worst, variance, common = (e if isinstance(e, float) else change(e) for e in (self.worst, self.variance, self.common))
        return Errors(worst, variance, common)


def _times(x: Any, y: Any) -> Any:
    return 0.0 if isinstance(x, float) or isinstance(y, float) else x @ y


@dataclass(frozen=True, eq=False)
class Product:
    """The errors of a matrix product, apart for what comes from its first factor."""

    worst: Any
    first: Any
    rest: Any
    squares: Array
    magnitudes: Array


def product(
    r: Rounding, left: tuple[Array, Errors], right: tuple[Array, Errors], total: Array, *, addend: Any = None, more: int = 0
) -> Product:
    """Work out the errors of the product of two arrays with errors, plus an addend; `more` relative errors come to each term."""
    (x, of_x), (y, of_y) = left, right
    size_x, size_y = np.abs(x), np.abs(y)
    magnitudes, squares, count = size_x @ size_y, x**2 @ y**2, y.shape[-2]
    if addend is not None:
        magnitudes, squares, count = magnitudes + np.abs(addend), squares + addend**2, count + 1
    carried = _times(of_x.worst, size_y + of_y.worst) + _times(size_x, of_y.worst)
    relative = (1 + growth(count + more, r.unit)) * (1 + r.operands) ** 2 - 1
    factor = squares * (r.operands**2 / 3)
    rest = _times(x**2, of_y.variance) + scatter(r.unit, count, squares, total, magnitudes) + factor
    return Product(carried + relative * (magnitudes + carried), _times(of_x.variance, y**2) + factor, rest, squares, magnitudes)


Known = Callable[[Any], Errors]
"""Looks up the errors of an array."""

Rule = Callable[[Rounding, Call, Known], Errors]
"""Says what errors the result of a call has."""
