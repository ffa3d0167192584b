"""The complete operator once more, in ball arithmetic: a proof of where the exact result lies.

Written from the formulas, with lists and loops, and with nothing of the library but the data of a problem: parameters,
options, policy, and the rules of a mask. A ball is a number of `DIGITS` digits with a radius that provably holds the
exact result (FLINT's `arb`, from python-flint); float64 numbers enter exactly, so the ball encloses the operator on
the very arrays that the specification gets. The softmax is taken as it is written, without the shift by the largest score.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flint import arb, ctx

DIGITS = 100
ARRAYS = ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o", "gain_q", "gain_k", "extra_k", "extra_v", "sinks", "gates")


@dataclass
class Stages:
    """Centres of the balls on the way to the result; the names are those of the specification's arrays."""

    projected: dict[str, np.ndarray] = field(default_factory=dict)
    normal: dict[str, np.ndarray] = field(default_factory=dict)
    turned: dict[str, np.ndarray] = field(default_factory=dict)
    values: np.ndarray | None = None
    scaled: np.ndarray | None = None
    live: np.ndarray | None = None
    scores: np.ndarray | None = None
    weights: np.ndarray | None = None
    sink_share: np.ndarray | None = None
    blended: np.ndarray | None = None


@dataclass(frozen=True)
class Enclosure:
    """Balls that hold the exact output, of the problem from which they come."""

    problem: "Problem"
    balls: list[list[list[arb]]]
    stages: Stages

    @property
    def radius(self) -> float:
        """The largest radius of a ball; those of NaN have none."""
        return max((float(ball.rad()) for ball in leaves(self.balls) if ball.is_finite()), default=0.0)


def enclose(x: np.ndarray, parameters: Any, options: dict[str, Any]) -> Enclosure:
    """Evaluate multi-head attention on float64 arrays, taken exactly."""
    with ctx.workdps(DIGITS):
        problem, stages = Problem(x, parameters, **options), Stages()
        return Enclosure(problem, _evaluate(problem, stages), stages)


class Problem:
    """The numbers of a problem as balls, and its choices."""

    def __init__(self, x: np.ndarray, parameters: Any, **options: Any) -> None:
        self.policy, self.options = options["policy"], options
        for name in ARRAYS:
            setattr(self, name, _exact(getattr(parameters, name)))
        context, context_v = options.get("context"), options.get("context_v")
        self.x = _exact(x)
        self.context = self.x if context is None else _exact(context)
        self.context_v = self.context if context_v is None else _exact(context_v)
        self.bias = _exact(options.get("bias"))
        self.batch, self.seq_q, self.seq_k = len(self.x), len(self.x[0]), len(self.context[0])
        self.h, self.h_kv, self.d_k, self.d_v = len(self.w_q), len(self.w_k), len(self.w_q[0][0]), len(self.w_v[0][0])
        self.extra = 0 if self.extra_k is None else len(self.extra_k[0])
        self.count = self.seq_k + self.extra
        self.places = self._places()
        self.survives = self._survivors()

    def head_read_by(self, n: int) -> int:
        """Which key/value head a query head reads."""
        return n % self.h_kv if self.policy.grouping == "strided" else n // (self.h // self.h_kv)

    @property
    def alpha(self) -> arb:
        """What scores are multiplied by."""
        given = self.options.get("scale")
        given = self.policy.scale if given is None else given
        return 1 / arb(self.d_k).sqrt() if given is None else arb(given)

    def bias_at(self, b: int, n: int, i: int, j: int) -> arb:
        """What is added to a score; nothing to that of an extra key."""
        return arb(0) if self.bias is None or j >= self.seq_k else _at(self.bias, (b, n, i, j))

    def keeps(self, b: int, n: int, i: int, j: int) -> bool:
        """Whether a query may attend to a key; extra keys are seen by all."""
        if j >= self.seq_k:
            return True
        ahead = self.places["k"][b][j] - self.places["q"][b][i]
        left, right = self.policy.window
        if self.options.get("causal") and ahead > 0:
            return False
        if (left is not None and -ahead > left) or (right is not None and ahead > right):
            return False
        keep = self.options.get("keep")
        if hasattr(keep, "rules"):
            return all(_rule_keeps(rule, {"batch": b, "h": n, "seq_q": i, "seq_k": j}, ahead) for rule in keep.rules)
        return keep is None or bool(_at(keep, (b, n, i, j)))

    def _places(self) -> dict[str, list[list[int]]]:
        given, offset = self.options.get("positions"), self.options.get("offset")
        if given is not None:
            rows = {"q": given.queries.tolist(), "k": given.keys.tolist()}
            return {side: row * self.batch if len(row) == 1 else row for side, row in rows.items()}
        if offset is None:
            offset = self.seq_k - self.seq_q if self.policy.causal_anchor == "bottom_right" else 0
        return {"q": [[offset + i for i in range(self.seq_q)]] * self.batch, "k": [list(range(self.seq_k))] * self.batch}

    def _survivors(self) -> Any:
        dropout = self.options.get("dropout")
        if dropout is None:
            return None
        return each(dropout.generator((self.batch, self.h, self.seq_q, self.count)).tolist(), lambda u: u >= dropout.rate)


def _rule_keeps(rule: Any, place: dict[str, int], ahead: int) -> bool:
    b, i, j = place["batch"], place["seq_q"], place["seq_k"]
    match type(rule).__name__:
        case "Flags":
            flag = _at(rule.array, tuple(place[axis] for axis in rule.axes))
            return {"keep": bool(flag), "drop": not flag, "additive": flag != -np.inf}[rule.polarity]
        case "Lengths":
            return j < int(rule.lengths[b])
        case "Documents":
            return _at(rule.queries, (b, i)) == _at(rule.keys, (b, j))
        case "Causal":
            return ahead <= 0
        case "Window":
            return (rule.left is None or -ahead <= rule.left) and (rule.right is None or ahead <= rule.right)
    raise NotImplementedError(type(rule).__name__)


def _evaluate(p: Problem, stages: Stages) -> list[list[list[arb]]]:
    queries, keys = _tokens(p, "q", p.x, stages), _tokens(p, "k", p.context, stages)
    values = _project(p.context_v, p.w_v, p.b_v)
    stages.values = centre(values)
    if p.extra:
        keys, values = (_with_extra(heads, extra) for heads, extra in ((keys, p.extra_k), (values, p.extra_v)))
    rows = [[[_attend(p, (b, n, i), queries, keys, values) for i in range(p.seq_q)] for n in range(p.h)] for b in range(p.batch)]
    for name in rows[0][0][0]:
        setattr(stages, name, centre([[[row[name] for row in head] for head in sequence] for sequence in rows]))
    return [[_mix(p, [sequence[n][i]["blended"] for n in range(p.h)]) for i in range(p.seq_q)] for sequence in rows]


def _tokens(p: Problem, side: str, source: Any, stages: Stages) -> Any:
    """Project, normalise and turn the queries (`q`) or the keys (`k`) of every head."""
    weights, biases, gains = (getattr(p, f"{name}_{side}") for name in ("w", "b", "gain"))
    gains = [None] * len(weights) if gains is None else gains * len(weights) if len(gains) == 1 else gains
    projected = normal = turned = _project(source, weights, biases)
    if p.policy.normalise is not None:
        normal = turned = [[[_normalise(t, gains[n], p.policy) for t in head] for n, head in enumerate(heads)] for heads in projected]
    if p.policy.rotation is not None:
        turn, places = p.policy.rotation, p.places[side]
        turned = [[[_turn(t, places[b][i], turn) for i, t in enumerate(head)] for head in heads] for b, heads in enumerate(normal)]
    for stage, tokens in ((stages.projected, projected), (stages.normal, normal), (stages.turned, turned)):
        stage[side] = centre(tokens)
    return turned


def _project(source: Any, weights: Any, biases: Any) -> Any:
    """Every token of every sequence, for every head."""
    return [[[_affine(t, w, None if biases is None else biases[n]) for t in tokens] for n, w in enumerate(weights)] for tokens in source]


def _affine(token: list[arb], matrix: list[list[arb]], shift: list[arb] | None) -> list[arb]:
    """y_k = sum_c x_c W_ck + b_k."""
    sums = [_dot(token, [row[k] for row in matrix]) for k in range(len(matrix[0]))]
    return sums if shift is None else [total + s for total, s in zip(sums, shift, strict=True)]


def _normalise(token: list[arb], gain: list[arb] | None, policy: Any) -> list[arb]:
    """t / sqrt(mean t^2 + epsilon), (t - mean t) / sqrt(var t + epsilon), or t / sqrt(sum t^2); times a gain."""
    if policy.normalise == "layer":
        mean = sum(token, arb(0)) / len(token)
        token = [t - mean for t in token]
    square = _dot(token, token)
    if policy.normalise != "l2":
        square = square / len(token) + arb(policy.epsilon)
    if square.is_zero():
        return token
    normal = [t / square.sqrt() for t in token]
    return normal if gain is None else [t * g for t, g in zip(normal, gain, strict=True)]


def _turn(token: list[arb], place: int, rotation: Any) -> list[arb]:
    """(a, b) -> (a cos - b sin, a sin + b cos), the angle of pair c being place * base^(-2c/width)."""
    turned, width = list(token), len(token) if rotation.width is None else rotation.width
    for c, first, second in pairs(rotation, len(token)):
        angle = place / arb(rotation.base) ** (arb(2 * c) / width)
        sin, cos = angle.sin_cos()
        turned[first] = token[first] * cos - token[second] * sin
        turned[second] = token[first] * sin + token[second] * cos
    return turned


def pairs(rotation: Any, d_k: int) -> list[tuple[int, int, int]]:
    """The number of each pair that turns, and its two channels."""
    half = (d_k if rotation.width is None else rotation.width) // 2
    return [(c, 2 * c, 2 * c + 1) if rotation.pairing == "interleaved" else (c, c, c + half) for c in range(half)]


def _with_extra(heads: Any, extra: Any) -> Any:
    return [[tokens + extra[n] for n, tokens in enumerate(sequence)] for sequence in heads]


def _attend(p: Problem, place: tuple[int, int, int], queries: Any, keys: Any, values: Any) -> dict[str, Any]:
    """What one query of one head does: all stages of its row."""
    (b, n, i), source = place, p.head_read_by(place[1])
    scaled = [p.alpha * _dot(queries[b][n][i], key) for key in keys[b][source]]
    scores = [_cap(s, p.policy.cap) if p.policy.cap_order == "before" else s for s in scaled]
    scores = [s + p.bias_at(b, n, i, j) for j, s in enumerate(scores)]
    kept = live = [p.keeps(b, n, i, j) for j in range(p.count)]  # live: the score that is used comes from query and key
    if not any(kept) and p.policy.empty_row == "unmasked":
        kept = live = [True] * p.count
    if not any(kept) and p.policy.empty_row == "uniform":
        kept, scores = [True] * p.count, [arb(0)] * p.count
    if p.policy.cap is not None and p.policy.cap_order == "after":  # the cap of minus infinity is finite: dropped keys come back
        scores = [_cap(s, p.policy.cap) if k else -arb(p.policy.cap) for s, k in zip(scores, kept, strict=True)]
        kept = [True] * p.count
    weights, sink_share = _softmax(scores, kept, None if p.sinks is None else p.sinks[n], p.policy.empty_row)
    used = weights
    if p.survives is not None:
        share = 1 - arb(p.options["dropout"].rate)
        used = [w / share if s else arb(0) for w, s in zip(weights, p.survives[b][n][i], strict=True)]
    blended = [_dot(used, [value[c] for value in values[b][source]]) for c in range(p.d_v)]
    return {"scaled": scaled, "live": live, "scores": scores, "weights": weights, "sink_share": sink_share, "blended": blended}


def _cap(score: arb, limit: float | None) -> arb:
    """c tanh(s / c)."""
    return score if limit is None else arb(limit) * (score / arb(limit)).tanh()


def _softmax(scores: list[arb], kept: list[bool], sink: arb | None, empty_row: str) -> tuple[list[arb], arb]:
    """e^s_j / (sum_i e^s_i + e^sink); a sum of nothing at all is the convention's business."""
    shares = [s.exp() if k else arb(0) for s, k in zip(scores, kept, strict=True)]
    sunk = arb(0) if sink is None else sink.exp()
    total = sum(shares, sunk)
    if total.is_zero():
        return [arb.nan() if empty_row == "nan" else arb(0)] * len(scores), arb(0)
    return [share / total for share in shares], sunk / total


def _mix(p: Problem, heads: list[list[arb]]) -> list[arb]:
    """y_m = sum over heads n and channels c of g_n O_nc W_(n d_v + c)m, plus b_m."""
    gates = [arb(1)] * p.h if p.gates is None else p.gates
    return _affine([gates[n] * heads[n][c] for n in range(p.h) for c in range(p.d_v)], p.w_o, p.b_o)


def _dot(left: list[arb], right: list[arb]) -> arb:
    assert len(left) == len(right)
    return sum(map(arb.__mul__, left, right), arb(0))


def _exact(array: Any) -> Any:
    """Take float64 numbers as balls of radius 0, in nested lists."""
    assert array is None or array.dtype == np.float64
    return None if array is None else each(array.tolist(), arb)


def _at(array: Any, place: tuple[int, ...]) -> Any:
    """Read one element, where an axis of size 1 stands for all."""
    for index in place:
        array = array[0 if len(array) == 1 else index]
    return array


def each(nested: Any, function: Any) -> Any:
    """Apply a function to every leaf of nested lists."""
    return [each(item, function) for item in nested] if isinstance(nested, list) else function(nested)


def leaves(nested: Any) -> list[Any]:
    """List the leaves of nested lists, in order."""
    return [leaf for item in nested for leaf in leaves(item)] if isinstance(nested, list) else [nested]


def centre(nested: Any) -> np.ndarray:
    """Round balls to float64."""
    return np.array(each(nested, float))
