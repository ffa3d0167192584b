"""Operators that are near to attention: a step more than was declared, or one less. They may be meant; then they are to be declared."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ...spec.policy import Rotation
from ...spec.positions import alibi_slopes
from ..problem import Answer, Array, Problem
from .fault import Fault

KIND = "variant"


def variant_faults() -> Iterator[Fault]:
    """All of these."""
    yield from _undeclared()
    yield from _other_weights()
    yield from _other_outputs()
    yield from _left_out()


def _with_policy(**fields: Any) -> Callable[[Problem], Problem]:
    return lambda p: replace(p, policy=replace(p.policy, **fields))


def _undeclared() -> Iterator[Fault]:
    """Steps that a policy could have declared."""
    for norm, word in (
        ("l2", "brought to length 1"),
        ("rms", "divided by their root mean square"),
        ("layer", "normalised, mean 0 and spread 1"),
    ):
        yield Fault(
            KIND, f"each head's queries and keys are {word}", change=_with_policy(normalise=norm), rank=2,
            applies=lambda p: p.policy.normalise is None, declare=f'policy=Policy(normalise="{norm}")',
        )  # fmt: skip
    for pairing in ("half", "interleaved"):
        yield Fault(
            KIND, f"queries and keys are turned by their position, in pairs of channels ({pairing})", rank=2,
            change=_with_policy(rotation=Rotation(pairing=pairing)), declare=f'policy=Policy(rotation=Rotation(pairing="{pairing}"))',
            applies=lambda p: p.policy.rotation is None and p.sizes["d_k"] % 2 == 0,
        )  # fmt: skip
    for cap in (1.0, 5.0, 10.0, 20.0, 30.0, 50.0):
        yield Fault(
            KIND, f"the scores are bent to within {cap:g}", change=_with_policy(cap=cap), declare=f"policy=Policy(cap={cap:g})",
            applies=lambda p: p.effective_policy.cap is None, rank=3,
        )  # fmt: skip
    for left in range(6):
        for right, text in ((0, "and none behind it"), (left, "and as many behind it"), (None, "and all behind it")):
            yield Fault(
                KIND, f"each query sees a window: {left} keys before its own position {text}", change=_with_policy(window=(left, right)),
                applies=lambda p: p.effective_policy.window == (None, None), declare=f"policy=Policy(window=({left}, {right}))", rank=3,
            )  # fmt: skip
    yield Fault(
        KIND, "a bias is added that falls with the distance of query and key, with the usual slopes", change=_sloped, rank=2,
        applies=lambda p: "slopes" not in p.options,
    )  # fmt: skip


def _sloped(problem: Problem) -> Problem:
    return problem.change(slopes=np.array(alibi_slopes(problem.sizes["h"])))


def _weighing(weigh: Callable[[Array], Array]) -> Callable[[Problem], dict[str, Any]]:
    """Make weights of scores in another way; a dropped key gets none."""

    def softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Array:
        kept = np.isfinite(scores)
        return np.where(kept, weigh(np.where(kept, scores, 0.0)), 0.0)

    return lambda _: {"softmax": softmax}


def _shared_out(shares: Array) -> Array:
    total = shares.sum(-1, keepdims=True)
    return shares / np.where(total == 0, 1.0, total)


def _other_weights() -> Iterator[Fault]:
    for text, weigh in (
        ("there is no softmax: the scores themselves are the weights", lambda s: s),
        ("there is no softmax: what is positive of the scores is the weights", lambda s: np.maximum(s, 0)),
        ("there is no softmax: each score goes through a sigmoid", lambda s: 1 / (1 + np.exp(-s))),
        ("there is no softmax: the scores are divided by their sum", _shared_out),
        ("there is no softmax: what is positive of the scores is divided by its sum", lambda s: _shared_out(np.maximum(s, 0))),
        ("there is no softmax: the squares of the scores are divided by their sum", lambda s: _shared_out(s**2)),
        ("there is no softmax: all keys have the same weight", lambda s: np.full_like(s, 1 / s.shape[-1])),
        ("there is no softmax: the key with the largest score has all the weight", lambda s: (s == s.max(-1, keepdims=True)) * 1.0),
    ):
        yield Fault("softmax_denominator", text, steps=_weighing(weigh), rank=2)
    flat: dict[str, Any] = {"steps": lambda _: {"softmax": lambda step, s, *a, **o: step(np.where(np.isfinite(s), 0.0, s), *a, **o)}}
    yield Fault("softmax_denominator", "the scores have no influence: all keys that are kept have the same weight", **flat, rank=2)
    yield Fault("softmax_denominator", "the softmax is taken twice", steps=lambda _: {"softmax": _twice}, rank=2)


def _twice(step: Any, scores: Array, *arrays: Any, **options: Any) -> Array:
    kept = np.isfinite(scores)
    found: Array = step(np.where(kept, step(scores, *arrays, **options), -np.inf), *arrays, **options)
    return found


def _permuted(change: Callable[[Array], Array]) -> dict[str, Any]:
    """Permute what the heads found: before they are joined, or at the end where attention alone is asked for."""
    return {
        "steps": lambda p: {"concatenate": lambda step, blended: step(change(blended))} if p.is_layer else {},
        "after": lambda a, p: a if p.is_layer else Answer(change(a.y), a.weights),
        "applies": lambda p: p.sizes["h"] > 1,
    }


def _other_outputs() -> Iterator[Fault]:
    order = "head_split_merge_order"
    yield Fault(order, "the heads stand in reverse order", **_permuted(lambda z: z[:, ::-1]), rank=2)
    yield Fault(order, "the heads are off by one", **_permuted(lambda z: np.roll(z, 1, 1)), rank=2)
    yield Fault(order, "the heads are off by one, the other way", **_permuted(lambda z: np.roll(z, -1, 1)), rank=2)
    mean = _permuted(lambda z: np.broadcast_to(z.mean(1, keepdims=True), z.shape))
    yield Fault("heads_not_separated", "what the heads found is averaged over them", **mean, rank=2)
    total = _permuted(lambda z: np.broadcast_to(z.sum(1, keepdims=True), z.shape))
    yield Fault("heads_not_separated", "what the heads found is added up over them", **total, rank=2)
    added: dict[str, Any] = {"applies": lambda p: p.is_layer or p.sizes["d_k"] == p.sizes["d_v"], "rank": 2}
    yield Fault(
        KIND, "its input is added to the output (a residual connection)", after=lambda a, p: Answer(a.y + p.queries, a.weights), **added
    )
    yield Fault(
        "output_shape", "the tokens of the output stand in reverse order", after=lambda a, _: Answer(a.y[..., ::-1, :], a.weights), rank=2
    )
    yield Fault("operand_routing", "the output projection is applied twice", after=_mixed_again, applies=lambda p: p.is_layer, rank=2)
    normed: dict[str, Any] = {"after": lambda a, _: Answer(_normed(a.y), a.weights), "rank": 2}
    yield Fault(KIND, "the output is normalised, mean 0 and spread 1 (a layer norm behind it)", **normed)
    both: dict[str, Any] = {"after": lambda a, p: Answer(_normed(a.y + p.queries), a.weights), **added}
    yield Fault(KIND, "its input is added to the output and the sum normalised (residual connection and layer norm behind it)", **both)
    yield Fault(KIND, "its inputs are normalised, mean 0 and spread 1 (a layer norm before it)", change=_normed_before, rank=2)


def _mixed_again(answer: Answer, problem: Problem) -> Answer:
    parameters = problem.parameters
    if parameters is None or parameters.w_o.shape[0] != parameters.w_o.shape[1]:
        return answer
    y = answer.y @ parameters.w_o
    return Answer(y if parameters.b_o is None else y + parameters.b_o, answer.weights)


def _normed(x: Array) -> Array:
    centred: Array = x - x.mean(-1, keepdims=True)
    found: Array = centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-5)
    return found


def _normed_before(problem: Problem) -> Problem:
    known: dict[int, Array] = {}
    sources = {name: getattr(problem, name) for name in ("queries", "keys", "values")}
    return problem.change(**{name: known.setdefault(id(x), _normed(x)) for name, x in sources.items()})


def _left_out() -> Iterator[Fault]:
    """Projections that are left out: what they should project is cut into heads as it is."""
    for names in (("q",), ("k",), ("v",), ("q", "k"), ("q", "k", "v")):
        words = " and ".join({"q": "queries", "k": "keys", "v": "values"}[name] for name in names)
        yield Fault("operand_routing", f"{words} are not projected", change=lambda p, n=names: _unprojected(p, n), rank=2)
    for biased, more in ((True, ""), (False, ", nor its bias")):
        text = f"the heads side by side are the output: the output projection is not applied{more}"
        yield Fault("operand_routing", text, change=lambda p, b=biased: _unmixed(p, biased=b), rank=2)


def _unprojected(problem: Problem, names: tuple[str, ...]) -> Problem | None:
    parameters = problem.parameters
    if parameters is None:
        return None
    cut: dict[str, Any] = {}
    for name in names:
        h, width, d = getattr(parameters, f"w_{name}").shape
        if h * d != width:
            return None
        cut |= {f"w_{name}": np.eye(width).reshape(width, h, d).swapaxes(0, 1), f"b_{name}": None}
    return replace(problem, parameters=replace(parameters, **cut))


def _unmixed(problem: Problem, *, biased: bool) -> Problem | None:
    parameters = problem.parameters
    if parameters is None or parameters.w_o.shape[0] != parameters.w_o.shape[1]:
        return None
    b_o = parameters.b_o if biased else None
    return replace(problem, parameters=replace(parameters, w_o=np.eye(len(parameters.w_o)), b_o=b_o))
