"""Defects of a given relative size, planted in steps of the specification, and other evaluations that have none.

A function of `DEFECTS` or `EQUIVALENTS` returns what stands in for the steps, for `attnspec.substitute`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import attnspec

Substitutes = dict[str, Callable[..., Any]]


def _times(name: str, size: float) -> Substitutes:
    """The result of a step, off by one factor."""
    step = getattr(attnspec, name)
    return {name: lambda *arrays, **options: step(*arrays, **options) * (1 + size)}


def _option(name: str, option: str, size: float) -> Substitutes:
    """An option of a step, off by one factor."""
    step = getattr(attnspec, name)
    return {name: lambda *arrays, **options: step(*arrays, **{**options, option: options[option] * (1 + size)})}


def _argument(name: str, size: float) -> Substitutes:
    """The second array of a step, off by one factor."""
    step = getattr(attnspec, name)
    return {name: lambda x, y, *arrays, **options: step(x, y * (1 + size), *arrays, **options)}


def _one_element(name: str, size: float) -> Substitutes:
    """The largest element of a step's result, off by one factor; all others as they are."""
    step = getattr(attnspec, name)

    def altered(*arrays: Any, **options: Any) -> Any:
        result = step(*arrays, **options).copy()
        result.reshape(-1)[np.argmax(np.abs(result))] *= 1 + size
        return result

    return {name: altered}


def _exponentials(size: float) -> Substitutes:
    """Every other exponential too large."""

    def softmax(scores: Any, *_: Any, **__: Any) -> Any:
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares[..., ::2] *= 1 + size
        return shares / shares.sum(axis=-1, keepdims=True)

    return {"softmax": softmax}


def _angle(size: float) -> Substitutes:
    """All angles too large: turned a little more, for small angles and halves."""

    def rotate(tokens: Any, positions: Any, /, **options: Any) -> Any:
        turned = attnspec.rotate(tokens, positions, **options)
        half = turned.shape[3] // 2
        rates = options["base"] ** (-np.arange(half) / half)
        more = positions[:, None, :, None] * rates * size
        a, b = turned[..., :half], turned[..., half:]
        return np.concatenate((a - b * more, b + a * more), axis=3)

    return {"rotate": rotate}


def _fill(size: float) -> Substitutes:
    """Dropped keys get a low score beside kept ones, not minus infinity, and so a share of about this size."""

    def mask(scores: Any, keep: Any, **_: Any) -> Any:
        low = scores.max(axis=-1, keepdims=True) + (np.log(size) if size else -np.inf)
        return np.where(keep, scores, np.where(keep.any(axis=-1, keepdims=True), low, -np.inf))

    return {"mask": mask}


ROTATED = {"rotation": "half", "places": "given"}
DEFECTS: dict[str, tuple[dict[str, Any], Callable[[float], Substitutes], float]] = {
    "one query": ({}, lambda size: _one_element("project_queries", size), 1e-11),
    "the gain of normalised keys": ({"normalise": "rms"}, lambda size: _times("normalise", size), 1e-12),
    "epsilon of rms": ({"normalise": "rms"}, lambda size: _option("normalise", "epsilon", size), 1e-5),
    "epsilon of layer": ({"normalise": "layer"}, lambda size: _option("normalise", "epsilon", size), 1e-5),
    "the length of l2": ({"normalise": "l2", "scale": 0.3}, lambda size: _times("normalise", size), 1e-11),
    "the angle": (ROTATED, _angle, 1e-11),
    "the base of the angles": (ROTATED, lambda size: _option("rotate", "base", size), 1e-11),
    "the scale": ({}, lambda size: _times("scale", size), 1e-12),
    "one score": ({}, lambda size: _one_element("score", size), 1e-10),
    "the cap's limit": ({"cap": "before"}, lambda size: _option("cap", "limit", size), 1e-12),
    "the cap's limit, after": ({"cap": "after", "keep": "padding"}, lambda size: _option("cap", "limit", size), 1e-12),
    "the bias": ({"bias": "full"}, lambda size: _argument("bias", size), 1e-12),
    "the share of dropped keys": ({"keep": "array"}, _fill, 1e-12),
    "exponentials": ({}, _exponentials, 1e-12),
    "the sinks": ({"sinks": True}, lambda size: _argument("softmax", size), 1e-12),
    "one weight": ({}, lambda size: _one_element("softmax", size), 1e-11),
    "weights that survive dropout": ({"dropout": True}, lambda size: _times("drop", size), 1e-12),
    "the extra values": ({"extra": True}, lambda size: _argument("extend_values", size), 1e-12),
    "one value": ({}, lambda size: _one_element("project_values", size), 1e-12),
    "the gates": ({"gates": True}, lambda size: _argument("gate", size), 1e-12),
    "what one head found": ({}, lambda size: _one_element("blend", size), 1e-12),
    "the mixing matrix": ({}, lambda size: _argument("mix", size), 1e-12),
}
"""What is off, the options under which it matters, how to plant it at a relative size, and a size that must be caught."""


def _unshifted(scores: Any, *_: Any, **__: Any) -> Any:
    shares = np.exp(scores)
    return shares / shares.sum(axis=-1, keepdims=True)


def _base_two(scores: Any, *_: Any, **__: Any) -> Any:
    shares = np.exp2((scores - scores.max(axis=-1, keepdims=True)) * np.log2(np.e))
    return shares * (1 / shares.sum(axis=-1, keepdims=True))


def _from_behind(weights: Any, values: Any, **_: Any) -> Any:
    return sum(weights[..., j : j + 1] * values[..., j : j + 1, :] for j in reversed(range(weights.shape[3])))


EQUIVALENTS: dict[str, Substitutes] = {
    "scaled queries": {"score": lambda q, k, **_: (q / np.sqrt(q.shape[3])) @ k.mT, "scale": lambda scores, **_: scores},
    "scaled on both sides": {
        "score": lambda q, k, **_: (q * q.shape[3] ** -0.25) @ (k * q.shape[3] ** -0.25).mT,
        "scale": lambda scores, **_: scores,
    },
    "softmax without a shift": {"softmax": _unshifted},
    "softmax of base two, with a reciprocal": {"softmax": _base_two},
    "divided last": {
        "softmax": lambda scores, *_, **__: np.exp(scores - scores.max(axis=-1, keepdims=True)),
        "blend": lambda shares, values, **_: (shares @ values) / shares.sum(axis=-1, keepdims=True),
    },
    "blended from behind": {"blend": _from_behind},
}
"""Other ways to compute the same operator (without masks, sinks and dropout), which must pass."""
