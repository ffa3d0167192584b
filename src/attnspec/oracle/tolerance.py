"""How far a right computation of attention can be from the exact result, for every element of it."""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..step import Call, Trace
from .errors import SIGMAS, Array, Errors
from .errors_attend import ATTEND, of_weights
from .errors_fan import FAN
from .rounding import ROUNDINGS, Rounding

__all__ = ["ROUNDINGS", "Rounding", "Tolerance", "tolerance"]

_UNIT = 2.0**-53
_EXACT = Errors()
_RULES = FAN | ATTEND


@dataclass(frozen=True, eq=False)
class Tolerance:
    """How far a right result can be from the one that float64 gives, element by element; 0 where that is not finite.

    Attributes:
        worst: no evaluation that rounds where it is said to strays further.
        sigma: one standard deviation, if rounding errors are independent and sums are taken in a random order.
        sigma_any: one standard deviation for any order of the sums.
    """

    worst: Array
    sigma: Array
    sigma_any: Array

    @property
    def drawn(self) -> Array:
        """The tolerance for inputs that were drawn at random."""
        return self._within(self.sigma)

    @property
    def outside(self) -> Array:
        """The tolerance for inputs that came from outside, where numbers repeat or are sorted."""
        return self._within(self.sigma_any)

    def _within(self, sigma: Array) -> Array:
        limit: Array = np.minimum(self.worst, SIGMAS * sigma)
        return limit

    def __or__(self, other: "Tolerance") -> "Tolerance":
        return Tolerance(*(np.maximum(mine, its) for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))


def tolerance(
    steps: Trace,
    roundings: Rounding | tuple[Rounding, ...],
    /,
    sharp: bool = True,  # noqa: FBT001, FBT002  # there is but one flag
    *,
    of: str | None = None,
) -> Tolerance:
    """Work out how far a right result can be from that of a trace.

    Args:
        steps: what the specification did, in float64 on NumPy arrays. Arrays that none of its steps made are the same
            numbers for the specification and the implementation; so is what was cut or picked from a step's result.
        roundings: where the implementation rounds; of several ways, the largest tolerance counts, element by element.
        sharp: whether errors of the scores are carried through the output projection as they are, which makes the
            worst case smaller.
        of: the step whose latest result it is about; None for the last step.

    Returns:
        The tolerances.

    Raises:
        ConfigError: there is no step in the trace that has errors, or not this one.
    """
    calls = [call for call in steps.calls if call.step.name in _RULES]
    while calls and of is not None and calls[-1].step.name != of:
        calls.pop()
    if not calls:
        wanted = "no step of the trace has errors" if of is None else f"of={of!r} must be a step of the trace that has errors"
        raise ConfigError(f"tolerance: {wanted}; there are: {', '.join(name for name in steps if name in _RULES) or 'none'}.")
    ways = (roundings,) if isinstance(roundings, Rounding) else roundings
    with np.errstate(all="ignore"):  # NaN and infinities of the reference
        return reduce(Tolerance.__or__, (_carry(calls, way, sharp=sharp) for way in ways))


def _carry(calls: list[Call], rounding: Rounding, *, sharp: bool) -> Tolerance:
    found: dict[int, Errors] = {}  # by identity: the trace keeps the arrays alive

    def known(array: Any) -> Errors:
        return found.get(id(array), _EXACT)

    for call in calls:
        errors = _RULES[call.step.name](rounding, call, known)
        found[id(call.result)] = errors if sharp else replace(errors, moved=None)
    result, errors = calls[-1].result, found[id(calls[-1].result)]
    if errors.shares is not None:
        errors = of_weights(rounding, errors.shares, result)
    share = _UNIT / rounding.unit  # the reference rounds too, so many times less
    worst, variance = errors.worst * (1 + 1e-6 + share), np.sqrt((errors.variance + errors.common) * (1 + share**2))
    both = np.broadcast_to(variance, (2, *result.shape))
    return Tolerance(*(np.where(np.isfinite(result), e, 0.0) for e in (worst, *both)))
