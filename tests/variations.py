"""Variations of the problems of `options`: other sizes, sharper attention, far positions."""

from dataclasses import replace
from typing import Any

from options import Drawn

from attnspec import Positions


def fit(choice: dict[str, Any], sizes: dict[str, int]) -> dict[str, int]:
    """Raise sizes to the least that a choice needs."""
    sizes = dict(sizes)
    if choice["rotation"]:
        sizes["d_k"] = max(sizes["d_k"] + sizes["d_k"] % 2, 4 if choice["rotation"] == "partial" else 2)
    if choice["keep"] == "array":
        sizes["seq_q"] = max(sizes["seq_q"], 2)
    return sizes | ({"batch": 2} if choice["keep"] == "lengths" else {})


def sharpen(drawn: Drawn, factor: float) -> Drawn:
    """Multiply the logits by a power of two: through the queries' projection, or through what comes after their normalisation."""
    parameters, options = drawn.parameters, drawn.options
    if options["policy"].normalise is None:
        biases = None if parameters.b_q is None else parameters.b_q * factor
        return replace(drawn, parameters=replace(parameters, w_q=parameters.w_q * factor, b_q=biases))
    if parameters.gain_q is not None:
        return replace(drawn, parameters=replace(parameters, gain_q=parameters.gain_q * factor))
    scale = parameters.heads.d_k**-0.5 if options["scale"] is None else options["scale"]
    return replace(drawn, options=options | {"scale": scale * factor})


def spread(drawn: Drawn, factor: int) -> Drawn:
    """Move given positions apart, as in a long context."""
    if (places := drawn.options.get("positions")) is None:
        return drawn
    return replace(drawn, options=drawn.options | {"positions": Positions(places.queries * factor, places.keys * factor)})
