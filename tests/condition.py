"""How far float64 may stray from the exact result, and how far it does.

**"Exact to the last digit", defined.** An output y agrees with the operator if, element by element,

    |y - exact| <= tolerance * K,

the left side bounded from above in ball arithmetic, and NaN stands exactly where it must. K, the condition of the
element, is the first-order effect on it, with all signs taken for the worst, of one relative error of size 1 in every
rounded quantity of the chain: errors of size u = 2^-53 move it by at most u K. Written E_X for that of X, with
absolute values taken element by element, it is the bound of Higham's kind with every gamma_n replaced by 1:

    projection   E_Q = |X||W| + |b|, and so for K and V
    normalise    E_c = E_t + mean(E_t + |t|) + |c| with c = t - mean t (layer); else c = t, E_c = E_t
                 E_n = |g| (E_c / r + |n| sum(|c| E_c) / sum(r^2) + |n|) with n = c / r, r the root that divides
    rotate       E_a <- |cos| E_a + |sin| E_b + |a cos| + |b sin| + E_theta (|a sin| + |b cos|), and so for b;
                 E_theta = |theta| (1 + |log rate|), since the rate is a power
    score        E_S = |alpha| (|Q| E_K + E_Q |K| + |Q||K|)
    cap          E_S <- (1 - tanh(S/c)^2) (E_S + |S|) + |c tanh(S/c)|
    bias         E_S <- E_S + |S + B|;   mask: E_S = 0 where the key is dropped
    softmax      d_j = E_S,j + |S_j - max S| + 1, relative, for each numerator; for a sink the same with E_S = 0
    blend        T = sum_j A_j d_j |(D_j V_j - O) W_O|  (D_j is 0 or 1/(1 - rate), else 1; a sink has V = 0)
                 E_O = sum_j A_j D_j (E_V,j + |V_j|)
    gate, mix    K = sum_heads |g| (T + E_O |W_O| + |O||W_O|) + |b_O|

T is the exact response to errors of the logits: it vanishes where one key has all the weight. K itself is computed in
float64 from the centres of the balls, which is plenty for a yardstick.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from enclosure import DIGITS, Enclosure, Problem, Stages, centre, leaves, pairs
from flint import ctx

UNIT = 2.0**-53
"""The unit roundoff of float64: the largest relative error of one rounding."""


@dataclass(frozen=True)
class Agreement:
    """How far an output is from the exact one, element by element; all 0 where the exact one is NaN."""

    error: np.ndarray
    size: np.ndarray
    condition: np.ndarray
    nan_agrees: bool

    @property
    def share(self) -> float:
        """The largest error over condition."""
        return _worst(self.error, self.condition)

    @property
    def relative(self) -> float:
        """The largest relative error of an element."""
        return _worst(self.error, self.size)

    @property
    def relative_to_largest(self) -> float:
        """The largest error, relative to the largest element."""
        return _worst(self.error.max(), self.size.max())

    def within(self, tolerance: float) -> bool:
        """Tell whether every element is within the tolerance times its condition, and NaN exactly where it must be."""
        return self.nan_agrees and bool(np.all(self.error <= tolerance * self.condition))


def compare(enclosure: Enclosure, y: Any) -> Agreement:
    """Measure how far an output is from the enclosed one."""
    y, exact = np.asarray(y), centre(enclosure.balls)
    assert y.shape == exact.shape
    assert y.dtype == np.float64
    with ctx.workdps(DIGITS):
        each = zip(leaves(enclosure.balls), y.reshape(-1).tolist(), strict=True)
        error = np.reshape([float(abs(ball - number).upper()) for ball, number in each], y.shape)
    broken = np.isnan(exact)
    error = np.where(broken, 0.0, np.where(np.isfinite(y), error, np.inf))
    size, condition = (np.where(broken, 0.0, array) for array in (np.abs(exact), condition_of(enclosure)))
    return Agreement(error, size, condition, bool(np.array_equal(np.isnan(y), broken)))


def condition_of(enclosure: Enclosure) -> np.ndarray:
    """K of each element of the output."""
    p, stages = enclosure.problem, enclosure.stages
    keys, values = _shared(p, stages.turned["k"], p.extra_k), _shared(p, stages.values, p.extra_v)
    error_q, error_k = _of_tokens(p, "q", p.x, stages), _shared(p, _of_tokens(p, "k", p.context, stages), None)
    error_v = _shared(p, _of_projection(p.context_v, p.w_v, p.b_v), None)
    error = _of_scores(p, stages, abs(float(p.alpha)) * _of_product(np.abs(stages.turned["q"]), error_q, np.abs(keys), error_k))
    delta, delta_sink = _of_softmax(p, stages, error)
    weights, found = np.nan_to_num(stages.weights), stages.blended[:, :, :, None]
    raised = np.ones_like(weights) if p.survives is None else np.array(p.survives) / (1 - p.options["dropout"].rate)
    w_o, gates = centre(p.w_o).reshape(p.h, p.d_v, -1), np.ones(p.h) if p.gates is None else np.abs(centre(p.gates))
    spread = raised[..., None] * values[:, :, None] - found  # batch h seq_q seq_k d_v
    response = np.einsum("bnij,bnijm->bnim", weights * delta, np.abs(spread @ w_o[:, None]))
    response += np.einsum("bni,bnijm->bnim", stages.sink_share * delta_sink, np.abs(found @ w_o[:, None]))
    error = (weights * raised) @ (error_v + np.abs(values)) + np.abs(stages.blended)
    total = np.einsum("n,bnim->bim", gates, response + error @ np.abs(w_o))
    return total if p.b_o is None else total + np.abs(centre(p.b_o))


def _of_projection(source: Any, weights: Any, biases: Any) -> np.ndarray:
    sums = np.abs(centre(source))[:, None] @ np.abs(centre(weights))
    return sums if biases is None else sums + np.abs(centre(biases))[:, None]


def _of_tokens(p: Problem, side: str, source: Any, stages: Stages) -> np.ndarray:
    weights, biases, gains = (getattr(p, f"{name}_{side}") for name in ("w", "b", "gain"))
    error = _of_projection(source, weights, biases)
    if p.policy.normalise is not None:
        error = _of_normal(stages.projected[side], error, p.policy)
        error = error if gains is None else error * np.abs(centre(gains))[:, None]
    return error if p.policy.rotation is None else _of_turn(stages.normal[side], error, np.array(p.places[side]), p.policy.rotation)


def _of_normal(tokens: np.ndarray, error: np.ndarray, policy: Any) -> np.ndarray:
    width = tokens.shape[-1]
    if policy.normalise == "layer":
        centred = tokens - np.mean(tokens, axis=-1, keepdims=True)
        error = error + np.mean(error + np.abs(tokens), axis=-1, keepdims=True) + np.abs(centred)
        tokens = centred
    square = np.sum(tokens**2, axis=-1, keepdims=True)
    square = square if policy.normalise == "l2" else square + width * policy.epsilon
    square = np.where(square == 0, 1.0, square)
    root = np.sqrt(square if policy.normalise == "l2" else square / width)
    normal = np.abs(tokens) / root
    return error / root + normal * np.sum(np.abs(tokens) * error, axis=-1, keepdims=True) / square + normal


def _of_turn(tokens: np.ndarray, error: np.ndarray, places: np.ndarray, rotation: Any) -> np.ndarray:
    strayed, width = error.copy(), tokens.shape[-1] if rotation.width is None else rotation.width
    for c, first, second in pairs(rotation, tokens.shape[-1]):
        log_rate = -2 * c / width * np.log(rotation.base)
        angle = places[:, None] * np.exp(log_rate)
        cos, sin, off = np.abs(np.cos(angle)), np.abs(np.sin(angle)), np.abs(angle) * (1 + np.abs(log_rate))
        a, b, error_a, error_b = (np.abs(array[..., channel]) for array in (tokens, error) for channel in (first, second))
        strayed[..., first] = cos * error_a + sin * error_b + a * cos + b * sin + off * (a * sin + b * cos)
        strayed[..., second] = sin * error_a + cos * error_b + a * sin + b * cos + off * (a * cos + b * sin)
    return strayed


def _of_product(q: np.ndarray, error_q: np.ndarray, k: np.ndarray, error_k: np.ndarray) -> np.ndarray:
    return q @ error_k.mT + error_q @ k.mT + q @ k.mT


def _of_scores(p: Problem, stages: Stages, error: np.ndarray) -> np.ndarray:
    """Bring the errors of the scaled scores through cap and bias, to those scores that come from query and key."""
    scores, limit = stages.scaled, p.policy.cap
    if limit is not None and p.policy.cap_order == "before":
        error, scores = _of_cap(error, scores, limit)
    if p.bias is not None:
        places = np.ndindex(scores.shape)
        scores = scores + np.reshape([float(p.bias_at(*place)) for place in places], scores.shape)
        error = error + np.abs(scores)
    if limit is not None and p.policy.cap_order == "after":
        error, _ = _of_cap(error, scores, limit)
    return np.where(stages.live, error, 0.0)


def _of_cap(error: np.ndarray, scores: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    bent = np.tanh(scores / limit)
    return (1 - bent**2) * (error + np.abs(scores)) + limit * np.abs(bent), limit * bent


def _of_softmax(p: Problem, stages: Stages, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The relative errors of the numerators, of each key and of the sink; those without weight do not matter."""
    scores = np.where(stages.weights > 0, stages.scores, -np.inf)
    sinks = np.full((p.h, 1), -np.inf) if p.sinks is None else centre(p.sinks)[:, None]
    peak = np.maximum(scores.max(axis=-1), sinks)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    delta = error + np.abs(stages.scores - peak[..., None]) + 1
    return delta, np.where(np.isfinite(sinks), np.abs(sinks - peak) + 1, 0.0)


def _shared(p: Problem, heads: np.ndarray, extra: Any) -> np.ndarray:
    """Put extra keys behind, their numbers or, since they are given, no error; and repeat for each query head."""
    if p.extra:
        behind = np.zeros((p.h_kv, p.extra, heads.shape[-1])) if extra is None else centre(extra)
        heads = np.concatenate([heads, np.broadcast_to(behind, (p.batch, *behind.shape))], axis=2)
    return heads[:, [p.head_read_by(n) for n in range(p.h)]]


def _worst(error: Any, size: Any) -> float:
    """The largest error over size: 0 where there is no error, infinite where there is one of nothing."""
    error, size = np.broadcast_arrays(error, size)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.max(np.where(error == 0, 0.0, error / size), initial=0.0))
