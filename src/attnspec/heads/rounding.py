"""How far two right computations of the same attention can be apart, because each rounds in its own order."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..spec.attend import blend, score
from ..spec.fan_in import concatenate, mix
from ..spec.fan_out import project_keys, project_queries, project_values
from ..step import Call, Trace

Array = npt.NDArray[Any]

_EXP = 20  # PyTorch's fused kernel for the CPU takes an exponential that is right to 20 units in the last place (exp_u20)


def allowances(steps: Trace, /, *, scale: float | None = None) -> dict[str, Array]:
    """Work out how much rounding explains, element by element, by running the specification on magnitudes.

    A sum of n products rounds to within n units of its sum of magnitudes; with probability 1 - 2 exp(-18), within
    6 sqrt(n) (Higham and Mary, 2019, "A new approach to probabilistic rounding error analysis", theorem 3.1). An error
    of a score is carried through the softmax to first order: `dA = A (dS - sum(A dS))`.

    Args:
        steps: what the specification did, on NumPy arrays.
        scale: the factor for the scores; None for `1 / sqrt(d_k)`.

    Returns:
        The largest difference that rounding explains: of the projections that were made, of `blend`, and of `mix` if
        it was made.
    """
    allowed: dict[str, Array] = {}
    for project in (project_queries, project_keys, project_values):
        if (name := project.__name__) in steps:
            source, w, b = _magnitudes(steps, name)
            allowed[name] = _units(source, w.shape[-2] + 1) * project(source, w, b)
    for name, call in zip(("project_queries", "project_keys"), _turns(steps), strict=False):
        allowed[name] = _turned(allowed[name], call)
    queries, keys = _magnitudes(steps, "score")[:2]
    weights, values = _magnitudes(steps, "blend")[:2]
    off_queries, off_keys = _shared(allowed.get("project_queries"), queries), _shared(allowed.get("project_keys"), keys)
    off_values = _shared(allowed.get("project_values"), values)
    d_k, seq_k = queries.shape[-1], keys.shape[-2]
    off_scores = score(off_queries, keys) + score(queries, off_keys) + _units(queries, d_k + 2) * score(queries, keys)
    moved = weights * off_scores * abs(d_k**-0.5 if scale is None else scale)
    off_weights = moved + weights * (moved.sum(axis=-1, keepdims=True) + _units(weights, seq_k) + _units(weights, 2 * _EXP))
    allowed["blend"] = blend(off_weights, values) + blend(weights, off_values) + _units(values, seq_k) * blend(weights, values)
    if "mix" in steps:
        concatenated, w_o, b_o = _magnitudes(steps, "mix")
        rounded = _units(w_o, len(w_o) + 1) * mix(concatenated, w_o, b_o)
        allowed["mix"] = mix(concatenate(allowed["blend"]), w_o) + rounded
    return allowed


def projections_of(steps: Trace, /) -> dict[str, Array]:
    """Pick the queries and keys as a model has them: turned, where they turn with their position.

    Args:
        steps: what the specification did.

    Returns:
        The results of the turns by the name of the projection that they follow; nothing if there was none.
    """
    turned = [call.result for call in _turns(steps)]
    return dict(zip(("project_queries", "project_keys"), turned, strict=False))


def _turns(steps: Trace) -> list[Call]:
    return [call for call in steps.calls if call.step.name == "rotate"]


def _turned(off: Array, call: Call) -> Array:
    """Carry errors through a turn by halves, and add those of its angle.

    An angle of p * base**-e is off by some 2 |log(base**-e)| + 3 units in each of the two computations, and no rate is
    faster than 1 or slower than e**-20; its cosine and sine and the products add 4.
    """
    tokens, positions, half = np.abs(call.arguments["tokens"]), call.arguments["positions"], (call.arguments["width"] or off.shape[3]) // 2
    units = _units(off, 1) * (86 * positions[:, None, :, None] + 4)

    def paired(x: Array) -> Array:
        both = x[..., :half] + x[..., half : 2 * half]
        return np.concatenate((both, both, x[..., 2 * half :]), axis=-1)

    spread = paired(off)
    spread[..., : 2 * half] += (units * paired(tokens))[..., : 2 * half]
    return spread.astype(off.dtype)


def _units(x: Array, n: int) -> float:
    """Twice the rounding of a sum of n terms, once for each of the two computations."""
    return float(np.finfo(x.dtype).eps) * min(n, 6 * math.sqrt(n))


def _magnitudes(steps: Trace, name: str) -> list[Any]:
    magnitudes = [np.abs(x) for x in steps[name].arguments.values() if isinstance(x, np.ndarray)]
    return magnitudes + [None] * (3 - len(magnitudes))


def _shared(off: Array | None, like: Array) -> Array:
    """Give each query head the errors of its group; none where both computations start from the same array."""
    return np.zeros_like(like) if off is None else np.repeat(off, like.shape[1] // off.shape[1], axis=1)
