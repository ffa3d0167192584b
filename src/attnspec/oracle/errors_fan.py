"""How each step of fan out and fan in carries the errors of its arguments on and adds its own: one rule for each step.

Every rule bounds an error in two ways. The worst case holds for every evaluation whose operations obey the standard
model of rounding, `fl(a op b) = (a op b)(1 + d)` with |d| <= u (Higham, 2002, "Accuracy and Stability of Numerical
Algorithms"): absolute values are taken element by element. The variance takes rounding errors for independent, with
mean 0 and variance u^2/3; there are two of it, along a first axis, for sums in a random order and in any order.
"""

from typing import Any

import numpy as np

from ..step import Call
from .errors import Array, Errors, Known, Moved, Rule, product
from .rounding import Rounding, growth


def _project(r: Rounding, call: Call, known: Known) -> Errors:
    x, w, *b = (a for a in call.arguments.values() if isinstance(a, np.ndarray))
    given = known(x).map(lambda e: e[..., None, :, :])
    p = product(r, (x[:, None], given), (w, known(w)), call.result, addend=b[0][:, None, :] if b else None)
    return Errors(*r.store(p.worst, p.first + p.rest, call.result, r.projected))


def _normalise(r: Rounding, call: Call, known: Known) -> Errors:
    tokens, gain, kind = call.arguments["tokens"], call.arguments.get("gain"), call.arguments["kind"]
    width, given, third = tokens.shape[-1], known(tokens), r.unit**2 / 3
    centred, worst, variance = tokens, given.worst + 0 * tokens, given.variance
    if kind == "layer":
        mean = tokens.mean(axis=-1, keepdims=True)
        centred, size = tokens - mean, np.abs(tokens).mean(axis=-1, keepdims=True)
        off = worst.mean(axis=-1, keepdims=True)
        worst = worst + off + growth(width + 1, r.unit) * (size + off) + r.unit * (np.abs(centred) + worst + off)
        variance = variance + np.mean(variance + third * (width + 1) * size**2, axis=-1, keepdims=True) / width + third * centred**2
    terms = width if kind == "l2" else 1  # the root is that of a sum, or of a mean
    square = (centred**2).mean(axis=-1, keepdims=True) * terms + (0 if kind == "l2" else call.arguments.get("epsilon", 1e-6))
    root = np.sqrt(np.where(square == 0, 1.0, square))
    normal, off = np.abs(centred) / root, np.sqrt((worst**2).mean(axis=-1, keepdims=True) * terms)  # a root moves no more than a norm
    carried = (worst + normal * off) / np.where(off < root, root - off, np.nan)
    limit = normal + np.sqrt(width / terms)
    carried = np.fmin(carried, limit)
    ratio = 1 + ((tokens**2).mean(axis=-1, keepdims=True) * terms / root**2 if kind == "layer" else 0)  # a variance of one pass
    worst = carried + growth(width + 10, r.unit) * ratio * (normal + carried)
    shared = np.mean(normal**2 * variance, axis=-1, keepdims=True) * terms / width * terms if not isinstance(variance, float) else 0.0
    variance = (variance + normal**2 * shared) / root**2 + third * (width / 4 + 5) * (ratio * normal) ** 2
    plain = normal if gain is None else normal * np.abs(gain[:, None, :])
    worst, variance = r.store(worst, variance, normal, r.projected)
    if gain is None:
        return Errors(worst, variance)
    size = np.abs(gain[:, None, :])
    worst = size * worst
    return Errors(*r.store(worst + r.unit * (plain + worst), size**2 * variance + third * plain**2, plain, r.projected))


def _rotate(r: Rounding, call: Call, known: Known) -> Errors:
    tokens, positions = call.arguments["tokens"], call.arguments["positions"]
    given, width = known(tokens), call.arguments.get("width") or tokens.shape[-1]
    log_rate = -2 * np.arange(width // 2) / width * np.log(call.arguments.get("base", 10_000.0))
    angle = positions[:, None, :, None] * np.exp(log_rate)
    cos, sin, slope = np.abs(np.cos(angle)), np.abs(np.sin(angle)), np.abs(angle) * r.unit
    halves = call.arguments.get("pairing", "half") == "half"
    pick = (slice(0, width // 2), slice(width // 2, width)) if halves else (slice(0, width, 2), slice(1, width, 2))
    worst, variance = (e + np.zeros(tokens.shape) for e in (given.worst, given.variance))
    before, scattered = worst.copy(), variance.copy()
    for own, other in (pick, pick[::-1]):
        a, b, error_a, error_b = np.abs(tokens[..., own]), np.abs(tokens[..., other]), before[..., own], before[..., other]
        size, turned = cos * (a + error_a) + sin * (b + error_b), sin * (a + error_a) + cos * (b + error_b)
        off = slope * (4 + 3 * np.abs(log_rate)) + 4 * r.unit  # of the angle, from its power on; and of sine and cosine
        rounded = (growth(2, r.unit) + 2 * r.projected) * size  # stored narrow, sine and cosine and their products are so too
        worst[..., own] = cos * error_a + sin * error_b + off * (size + turned) + rounded
        steep = (slope * (2 + np.abs(log_rate))) ** 2 / 3 * (sin * a + cos * b) ** 2
        flat = ((cos * a) ** 2 + (sin * b) ** 2) * (4 * r.unit**2 + 2 * r.projected**2) / 3
        variance[..., own] = cos**2 * scattered[..., own] + sin**2 * scattered[..., other] + steep + flat
    return Errors(*r.store(worst, variance, call.result, r.projected))


def _share(_: Rounding, call: Call, known: Known) -> Errors:
    heads, h = next(a for a in call.arguments.values() if isinstance(a, np.ndarray)), call.arguments["h"]
    contiguous = call.arguments.get("grouping", "contiguous") == "contiguous"
    index = np.arange(h) // (h // heads.shape[1]) if contiguous else np.arange(h) % heads.shape[1]
    return known(heads).map(lambda e: e[..., index, :, :])


def _join(_: Rounding, call: Call, known: Known) -> Errors:
    parts = [a for a in call.arguments.values() if isinstance(a, np.ndarray)]
    given, batch = [known(part) for part in parts], call.result.shape[0]
    if all(isinstance(of.worst, float) for of in given):
        return Errors()
    shapes = [(batch, *part.shape[-3:]) for part in parts]
    worst = [np.broadcast_to(of.worst, shape) for of, shape in zip(given, shapes, strict=True)]
    variance = [np.broadcast_to(of.variance, (2, *shape)) for of, shape in zip(given, shapes, strict=True)]
    return Errors(np.concatenate(worst, axis=-2), np.concatenate(variance, axis=-2))


def _gate(r: Rounding, call: Call, known: Known) -> Errors:
    gates, given = call.arguments["gates"][:, None, None], known(call.arguments["blended"])
    size = np.abs(gates)
    worst = size * given.worst
    worst = worst + r.unit * (np.abs(call.result) + worst)
    variance = gates**2 * given.variance + r.unit**2 / 3 * call.result**2
    worst, variance = r.store(worst, variance, call.result, r.blended)
    if (m := given.moved) is None:
        return Errors(worst, variance)
    return Errors(worst, variance, moved=Moved(size * m.part, m.moved, m.values, m.found, m.shares, m.gates * size))


def _side_by_side(e: Any) -> Any:
    if isinstance(e, float):
        return e
    *first, h, seq_q, d_v = e.shape
    return np.swapaxes(e, -2, -3).reshape(*first, seq_q, h * d_v)


def _concatenate(_: Rounding, call: Call, known: Known) -> Errors:
    given = known(call.arguments["blended"])
    return Errors(_side_by_side(given.worst), _side_by_side(given.variance), moved=given.moved)


def _mix(r: Rounding, call: Call, known: Known) -> Errors:
    x, w, *b = (a for a in call.arguments.values() if isinstance(a, np.ndarray))
    given = known(x)
    p = product(r, (x, given), (w, known(w)), call.result, addend=b[0] if b else None)
    worst, variance = p.worst, p.first + p.rest
    if (m := given.moved) is not None:
        worst = worst + np.minimum(_mixed(m, w) - _side_by_side(m.part) @ np.abs(w), 0.0)
    return Errors(*r.store(worst, variance, call.result, r.output))


def _mixed(m: Moved, w: Array) -> Any:
    """How far scores that are off move the output: values and findings are mixed before they are compared."""
    heads = w.reshape(m.found.shape[1], m.found.shape[3], -1)
    sums, _ = m.shares.apart(m.values @ heads, m.found @ heads, m.moved[..., None])
    return (sums * m.gates).sum(axis=1)


FAN: dict[str, Rule] = {
    "project_queries": _project,
    "project_keys": _project,
    "project_values": _project,
    "normalise": _normalise,
    "rotate": _rotate,
    "append_to_cache": _join,
    "extend_keys": _join,
    "extend_values": _join,
    "share_keys": _share,
    "share_values": _share,
    "gate": _gate,
    "concatenate": _concatenate,
    "mix": _mix,
}
"""The rules of fan out and fan in, by the name of the step; positions have no errors."""
