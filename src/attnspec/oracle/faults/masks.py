"""Faults of masks, causality, windows, rows without keys, positions and packed documents."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np

from ...spec.policy import Rotation
from ..problem import Answer, Array, Problem
from .fault import Fault, asks

MASKS = ("keep", "padding", "lengths", "documents")
RULES = (*MASKS, "causal", "window", "window_left", "window_right", "cumulative")
_NAMES = {
    "keep": "the mask", "padding": "the padding", "lengths": "the lengths", "documents": "the documents", "causal": "causality",
    "window": "the window", "window_left": "the left end of the window", "window_right": "the right end of the window",
    "cumulative": "the packing",
}  # fmt: skip


def named(rule: str, /) -> str:
    """Say a rule in words."""
    return _NAMES[rule]


def _masked(*, also_causal: bool = False) -> Callable[[Problem], bool]:
    return asks(*MASKS, *(("causal", "window") if also_causal else ()))


def _without(rule: str) -> Callable[[Problem], Problem | None]:
    if rule == "causal":
        return lambda p: replace(p.change(causal=False), options={n: v for n, v in p.options.items() if n not in ("causal", "offset")})
    return lambda p: p.change(**{rule: None})


def ignored_faults() -> Iterator[Fault]:
    """Rules that are ignored, alone or where another is given."""
    kinds = dict.fromkeys(RULES, "mask_not_applied") | {
        "causal": "causal_dropped_or_forced", **dict.fromkeys(("cumulative", "documents"), "ragged_packing")
    }  # fmt: skip
    for rule in RULES:
        yield Fault(kinds[rule], f"{_NAMES[rule]} is ignored", change=_without(rule), applies=asks(rule))
    for kept, lost in permutations(RULES, 2):
        both = {"applies": lambda p, a=kept, b=lost: asks(a)(p) and asks(b)(p)}
        kind = "mask_combination" if kinds[lost] == "mask_not_applied" else kinds[lost]
        yield Fault(kind, f"{_NAMES[lost]} is ignored where {_NAMES[kept]} is given", change=_without(lost), rank=2, **both)
    for rule in MASKS:
        for count in range(1, 5):
            text = f"what {_NAMES[rule]} drops among the first {count} keys is seen again: another rule is set over it"
            steps = _prefixed(rule, count)
            yield Fault("mask_combination", text, change=steps, applies=lambda p, r=rule, n=count: asks(r)(p) and p.sizes["seq_k"] > n, rank=3)
    for rule in RULES:
        joined = {"applies": lambda p, a=rule: asks(a)(p) and sum(asks(other)(p) for other in RULES) > 1, "rank": 3}
        text = f"a key is kept if {_NAMES[rule]} or any other rule keeps it, not only if all do"
        yield Fault("mask_combination", text, steps=lambda _: {"keep_both": lambda _, a, b: a | b}, **joined)
    yield Fault("mask_not_applied", "all masks are ignored", change=_without_all, applies=_masked(also_causal=True), rank=2)
    causal = {"change": lambda p: p.change(causal=True), "applies": lambda p: not p.is_causal}
    yield Fault("causal_dropped_or_forced", "it is causal, though that was not asked for", **causal)


def _prefixed(rule: str, count: int) -> Callable[[Problem], Problem]:
    """Ignore a rule for the first keys."""

    def change(problem: Problem) -> Problem:
        alone = _only(problem, rule).visible.copy()
        alone[..., :count] = True
        if "keep" in problem.options and rule != "keep":
            alone &= problem.options["keep"]
        return problem.change(**{rule: None, "keep": alone})

    return change


def _without_all(problem: Problem) -> Problem:
    return replace(problem, causal=False, options={n: v for n, v in problem.options.items() if n not in (*RULES, "offset")})


def _around_mask(change: Callable[[Array, Array, Problem], Array]) -> Callable[[Problem], dict[str, Any]]:
    """Mask in another way, given scores and what is kept."""
    return lambda p: {"mask": lambda _, scores, keep, **__: change(scores, np.broadcast_to(keep, scores.shape), p)}


def _other_keep(change: Callable[[Array, Problem], Array]) -> Callable[[Problem], dict[str, Any]]:
    return lambda p: {
        "mask": lambda step, scores, keep, **o: step(scores, change(np.broadcast_to(keep, scores.shape), p), **o),
    }


def mask_faults() -> Iterator[Fault]:
    """Faults in what a mask means and where it goes."""
    for rule in ("keep", "padding"):
        text = f"{_NAMES[rule]} means the opposite: the keys that it should drop are kept, and those that it should keep are dropped"
        yield Fault(
            "mask_polarity_inverted", text, change=lambda p, r=rule: p.change(**{r: ~p.options[r]}), applies=asks(rule), declare='mask="drop"',
        )  # fmt: skip
    yield Fault("mask_polarity_inverted", "all masks mean the opposite", steps=_other_keep(lambda k, _: ~k), applies=_masked(), rank=2)
    masked = {"applies": _masked()}
    kind = "mask_type_confusion"
    for text, add in (
        ("the mask is added to the scores as numbers: 1 for a kept key", lambda s, k, _: s + k),
        ("the mask is added to the scores as numbers: 1 for a dropped key", lambda s, k, _: s + ~k),
        ("the mask is subtracted from the scores as numbers", lambda s, k, _: s - ~k),
        ("the scores are multiplied by the mask, so that a dropped key gets a score of 0", lambda s, k, _: s * k),
        ("the scores are multiplied by the inverted mask", lambda s, k, _: s * ~k),
    ):
        yield Fault(kind, text, steps=_around_mask(add), **masked)
    yield from _behind_softmax()
    yield from _axis_faults()
    yield from _fill_faults()


def _behind_softmax() -> Iterator[Fault]:
    kind, masked = "mask_after_softmax", {"applies": _masked(also_causal=True)}
    for text, late in (
        ("the weights of dropped keys are set to 0 behind the softmax, so that the others do not add up to 1", lambda w, k: w * k),
        ("minus infinity is written over the weights of dropped keys, behind the softmax", lambda w, k: np.where(k, w, -np.inf)),
        ("a large negative number is written over the weights of dropped keys, behind the softmax", lambda w, k: np.where(k, w, -1e9)),
        ("infinity is written over the scores of dropped keys", None),
    ):
        if late is None:
            yield Fault(kind, text, steps=_around_mask(lambda s, k, _: np.where(k, s, np.inf)), **masked)
        else:
            yield Fault(kind, text, steps=lambda _, f=late: _late(f), **masked)


def _late(change: Callable[[Array, Array], Array]) -> dict[str, Any]:
    kept: list[Array] = []

    def mask(_: Any, scores: Array, keep: Array, **__: Any) -> Array:
        kept.append(np.broadcast_to(keep, scores.shape))
        return scores

    return {"mask": mask, "softmax": lambda step, scores, *a, **o: change(step(scores, *a, **o), kept[-1]) if kept else step(scores, *a, **o)}


def _axis_faults() -> Iterator[Fault]:
    several = {"applies": lambda p: _masked()(p) and p.sizes["batch"] > 1}
    for text, index in (
        ("the mask is repeated over the heads sample by sample (M0, M1, M0, M1), where the heads of one sample stand together", _tiled),
        ("the mask is repeated over the heads (M0, M0, M1, M1), where the samples of one head stand together", _repeated),
    ):
        yield Fault("mask_batch_head_tiling", text, steps=_other_keep(index), applies=lambda p: several["applies"](p) and p.sizes["h"] > 1)
    square = {"applies": lambda p: _masked()(p) and p.sizes["seq_q"] == p.sizes["seq_k"]}
    turned = _other_keep(lambda k, _: k.swapaxes(2, 3))
    yield Fault("mask_wrong_axis", "the mask drops queries, not keys: its last two axes are exchanged", steps=turned, **square)
    for rule in ("padding", "lengths"):
        yield Fault(
            "mask_wrong_axis", f"{_NAMES[rule]} drops queries, not keys", change=lambda p, r=rule: _padded_queries(p, r),
            applies=lambda p, r=rule: asks(r)(p) and p.sizes["seq_q"] == p.sizes["seq_k"],
        )  # fmt: skip
    kind = "mask_construction"
    for axis, name in ((0, "sample"), (1, "head"), (2, "query")):
        first = _other_keep(lambda k, _, a=axis: np.broadcast_to(np.take(k, [0], a), k.shape))
        yield Fault(kind, f"the mask of the first {name} is used for all", steps=first, **masked_on(axis))
        last = _other_keep(lambda k, _, a=axis: np.broadcast_to(np.take(k, [-1], a), k.shape))
        yield Fault(kind, f"the mask of the last {name} is used for all", steps=last, **masked_on(axis), rank=2)
        for step in (1, -1):
            rolled = _other_keep(lambda k, _, a=axis, s=step: np.roll(k, s, a))
            yield Fault(kind, f"the mask is off by one {name}", steps=rolled, **masked_on(axis), rank=2)
    for step in (1, -1):
        yield Fault(kind, "the mask is off by one key", steps=_other_keep(lambda k, _, s=step: np.roll(k, s, 3)), applies=_masked())
    for more, text in ((1, "one key too many is kept"), (-1, "one key too few is kept")):
        yield Fault(kind, f"of each length, {text}", change=lambda p, m=more: _lengthened(p, m), applies=asks("lengths"))
    for name, reduce in (("any", np.any), ("all", np.all)):
        for axis, over in ((0, "sample"), (1, "head"), (2, "query")):
            found = _other_keep(lambda k, _, f=reduce, a=axis: np.broadcast_to(f(k, axis=a, keepdims=True), k.shape))
            yield Fault(kind, f"a key is kept for a {over} if it is kept for {name} of them", steps=found, **masked_on(axis), rank=2)
    batch_head = _other_keep(lambda k, p: _exchanged(k, p))
    yield Fault("mask_batch_head_tiling", "samples and heads are exchanged in the mask", steps=batch_head, **several)


def masked_on(axis: int, /) -> dict[str, Any]:
    """Where a mask differs along an axis."""
    return {"applies": lambda p: _masked()(p) and p.sizes[("batch", "h", "seq_q")[axis]] > 1}


def _flat(keep: Array, order: Callable[[Array, Array, int, int], tuple[Array, Array]], problem: Problem) -> Array:
    batch, h = problem.sizes["batch"], problem.sizes["h"]
    sample, head = np.divmod(np.arange(batch * h), h)
    return keep[order(sample, head, batch, h)].reshape(keep.shape)


def _tiled(keep: Array, problem: Problem) -> Array:
    return _flat(keep, lambda sample, head, batch, h: ((sample * h + head) % batch, head), problem)


def _repeated(keep: Array, problem: Problem) -> Array:
    return _flat(keep, lambda sample, head, batch, h: ((head * batch + sample) // h, head), problem)


def _exchanged(keep: Array, problem: Problem) -> Array:
    return _flat(keep, lambda sample, head, batch, h: np.divmod(head * batch + sample, h), problem)


def _padded_queries(problem: Problem, rule: str) -> Problem:
    real = problem.options["padding"] if rule == "padding" else problem.options["lengths"][:, None] > np.arange(problem.sizes["seq_k"])
    rows = np.broadcast_to(real[:, None, :, None], (len(real), 1, problem.sizes["seq_q"], problem.sizes["seq_k"]))
    keep = rows & problem.options["keep"] if "keep" in problem.options else rows
    return problem.change(**{rule: None, "keep": keep})


def _lengthened(problem: Problem, more: int) -> Problem:
    return problem.change(lengths=np.clip(problem.options["lengths"] + more, 0, problem.sizes["seq_k"]))


FILLS = (0.0, -1.0, -2.0, -3.0, -5.0, -8.0, -10.0, -15.0, -20.0, -30.0, -50.0, -100.0, -1e3, -1e4, -32767.0, -65504.0, -1e5)


def _fill_faults() -> Iterator[Fault]:
    """Dropped keys get a finite score, by each way that is seen."""
    kind, masked = "mask_finite_fill", {"applies": _masked(also_causal=True)}
    for fill in FILLS:
        rank = 1 if fill in (-1e4, -65504.0) else 2
        text = f"dropped keys get a score of {fill:g}, not minus infinity, and true scores can be lower"
        yield Fault(kind, text, steps=_around_mask(lambda s, k, _, f=fill: np.where(k, s, f)), **masked, rank=rank)
        if fill:
            text = f"{fill:g} is added to the scores of dropped keys, and true scores can differ by more"
            yield Fault(kind, text, steps=_around_mask(lambda s, k, _, f=fill: s + f * ~k), **masked, rank=rank)
            text = f"dropped keys get a score of {fill:g} before the scale"
            yield Fault(kind, text, steps=lambda p, f=fill: _early(p, lambda s, k: np.where(k, s, f)), **masked, rank=3)
            text = f"{fill:g} is added to the scores of keys for each rule that drops them, so that those that one rule drops win over others"
            yield Fault(kind, text, steps=lambda p, f=fill: _stacked(p, f), **masked, rank=rank + 1)
    lowest = np.finfo(np.float32).min
    for low in (lowest, np.finfo(np.float64).min):
        text = "dropped keys get the lowest finite score, so that a query without keys gets the mean of all"
        yield Fault("fully_masked_row", text, steps=_around_mask(lambda s, k, _, f=low: np.where(k, s, f)), **masked, rank=3)


def _early(problem: Problem, change: Callable[[Array, Array], Array]) -> dict[str, Any]:
    """Mask before the scale."""
    kept = problem.visible
    return {"scale": lambda step, scores, **o: step(change(scores, kept), **o), "mask": lambda _, scores, *__, **___: scores}


def _stacked(problem: Problem, fill: float) -> dict[str, Any]:
    rules = [rule for rule in RULES if asks(rule)(problem)]
    alone = [_only(problem, rule).visible for rule in rules]
    dropped = sum((~kept).astype(float) for kept in alone)
    return {"mask": lambda _, scores, *__, **___: scores + fill * dropped}


def _only(problem: Problem, rule: str) -> Problem:
    options = {name: value for name, value in problem.options.items() if name not in RULES or name == rule}
    return replace(problem, causal=problem.causal and rule == "causal", options=options)


def _seen(change: Callable[[Array, Array], Array]) -> Callable[[Problem], dict[str, Any]]:
    """Another rule of causality, given the positions of queries and keys."""
    return lambda _: {"keep_causal": lambda _, q, k: change(q[:, None, :, None], k[:, None, None, :])}


def causal_faults() -> Iterator[Fault]:
    """Faults of causality."""
    kind, causal = "causal_geometry", {"applies": asks("causal")}
    for text, rule in (
        ("a query sees the keys from its own position on: the triangle is transposed", lambda q, k: k >= q),
        ("a query sees the keys behind its own position only", lambda q, k: k > q),
        ("a query does not see the key at its own position", lambda q, k: k < q),
        ("a query sees one key behind its own position", lambda q, k: k <= q + 1),
        ("a query sees two keys behind its own position", lambda q, k: k <= q + 2),
        ("a query sees only the key at its own position", lambda q, k: k == q),
        ("a query sees all keys but that at its own position", lambda q, k: k != q),
        ("the triangle is turned round: the first query sees all keys", lambda q, k: k <= q[:, :, ::-1]),
    ):
        yield Fault(kind, text, steps=_seen(rule), **causal)
    for block in (2, 3, 4, 8, 16):
        text = f"causality holds for blocks of {block} queries, not for each query"
        yield Fault(kind, text, steps=_seen(lambda q, k, b=block: k <= q // b * b + b - 1), **causal, rank=2)
        text = f"causality holds for blocks of {block} queries: each sees only what lies before its block"
        yield Fault(kind, text, steps=_seen(lambda q, k, b=block: k <= q // b * b), **causal, rank=3)
    yield from _alignment_faults()


def _alignment_faults() -> Iterator[Fault]:
    kind, causal = "causal_alignment", {"applies": asks("causal")}
    corner = {"top_left": "the first query stands beside the first key", "bottom_right": "the last query stands beside the last key"}
    for anchor, text in corner.items():
        yield Fault(
            kind, f"causality is anchored where {text}", change=lambda p, a=anchor: _anchored(p, a), **causal,
            declare=f'policy=Policy(causal_anchor="{anchor}")',
        )  # fmt: skip
    yield Fault(
        kind, "the last query stands beside the last key where there are fewer queries than keys, else the first beside the first",
        change=lambda p: _anchored(p, "bottom_right" if p.sizes["seq_q"] < p.sizes["seq_k"] else "top_left"), **causal, rank=2,
    )  # fmt: skip
    offset = {"applies": lambda p: "offset" in p.options or bool(p.past)}
    for text, change in (
        ("the position of the first query is ignored", lambda o: 0),
        ("the position of the first query counts twice", lambda o: 2 * o),
        ("the position of the first query is one too high", lambda o: o + 1),
        ("the position of the first query is one too low", lambda o: o - 1),
        ("the position of the first query is subtracted", lambda o: -o),
    ):
        yield Fault(kind, text, change=lambda p, f=change: _moved(p, f), **offset, rank=2)


def _anchored(problem: Problem, anchor: str) -> Problem:
    policy = replace(problem.policy, causal_anchor=anchor)
    return replace(problem, policy=policy, history=None, options={n: v for n, v in problem.options.items() if n != "offset"})


def _moved(problem: Problem, change: Callable[[int], int]) -> Problem:
    return replace(problem.change(offset=change(problem.options.get("offset", problem.past))), history=None)


def window_faults() -> Iterator[Fault]:
    """Faults of windows."""

    def windowed(problem: Problem) -> bool:
        return problem.effective_policy.window != (None, None)

    for text, left, right in (
        ("the window is one key too wide", 1, 0),
        ("the window is one key too narrow", -1, 0),
        ("the window is one key too wide on the right", 0, 1),
        ("the window is one key too narrow on the right", 0, -1),
        ("the window is one key too wide on both sides", 1, 1),
        ("the window is one key too narrow on both sides", -1, -1),
    ):
        yield Fault("window_off_by_one", text, change=lambda p, a=left, b=right: _widened(p, a, b), applies=windowed)
    kind = "window_wrong_region"
    for text, change in (
        ("the window lies on the other side of the query", lambda left, right: (right, left)),
        ("the window reaches as far to the right as to the left", lambda left, right: (left, left)),
        ("the window has no end on the right", lambda left, _: (left, None)),
        ("the window has no end on the left", lambda _, right: (None, right)),
        ("the window is twice as wide", lambda left, right: (_twice(left), _twice(right))),
        ("the window is half as wide on both sides", lambda left, right: (_half(left), _half(left))),
        ("the window is half as wide", lambda left, right: (_half(left), _half(right))),
    ):
        yield Fault(kind, text, change=lambda p, f=change: _with_window(p, f), applies=windowed)
    for text, rule in (
        ("a query sees what lies outside its window", lambda a, left, right: ~((-a <= left) & (a <= right))),
        ("a query sees the keys before its window, not those in it", lambda a, left, right: -a >= left),
        ("a query sees the keys up to its own position, whatever the window", lambda a, left, right: a <= 0),
        ("the lower end of the window has the wrong sign", lambda a, left, right: (a >= left) & (a <= right)),
        ("the sign of the lower end of the window is wrong, so that old keys stay visible", lambda a, left, right: a <= left),
    ):
        yield Fault(kind, text, steps=lambda _, f=rule: {"keep_window": _other_window(f)}, applies=windowed, rank=2)
    text = "the window is anchored at the last query and key, not at the first"
    yield Fault(kind, text, change=lambda p: _anchored(p, "bottom_right"), applies=windowed, rank=2)
    yield Fault(kind, "the window is anchored at the first query and key", change=lambda p: _anchored(p, "top_left"), applies=windowed, rank=2)
    union = {"steps": lambda _: {"keep_both": lambda _, a, b: a | b}}
    yield Fault(kind, "a key is seen if it is in the window or another rule keeps it", **union, applies=windowed, rank=2)
    for clamp in ("seq_q", "seq_k"):
        text = f"the window is counted from queries that are clamped to {clamp}"
        yield Fault(kind, text, steps=lambda p, c=clamp: {"keep_window": _clamped(p.sizes[c])}, applies=windowed, rank=3)


def _twice(side: int | None) -> int | None:
    return None if side is None else 2 * side


def _half(side: int | None) -> int | None:
    return None if side is None else side // 2


def _with_window(problem: Problem, change: Callable[[Any, Any], tuple[Any, Any]]) -> Problem | None:
    left, right = change(*problem.effective_policy.window)
    if any(side is not None and side < 0 for side in (left, right)):
        return None
    options = {name: value for name, value in problem.options.items() if name not in ("window", "window_left", "window_right")}
    return replace(problem, options=options, policy=replace(problem.policy, window=(left, right)))


def _widened(problem: Problem, left: int, right: int) -> Problem | None:
    return _with_window(problem, lambda a, b: (None if a is None else a + left, None if b is None else b + right))


def _other_window(rule: Callable[[Array, float, float], Array]) -> Callable[..., Array]:
    def keep_window(_: Any, q: Array, k: Array, *, left: int | None, right: int | None) -> Array:
        ahead = k[:, None, None, :] - q[:, None, :, None]
        return rule(ahead, math.inf if left is None else left, math.inf if right is None else right)

    return keep_window


def _clamped(size: int) -> Callable[..., Array]:
    return lambda step, q, k, **sides: step(np.minimum(q, size - 1), k, **sides)


def row_faults() -> Iterator[Fault]:
    """What a query without keys gets."""
    texts = {
        "nan": "a query that may attend to no key gets NaN",
        "uniform": "a query that may attend to no key gets the mean of all values",
        "unmasked": "a query that may attend to no key attends to all of them, as if there were no mask",
        "zero": "a query that may attend to no key gets zeros",
    }
    for row, text in texts.items():
        yield Fault(
            "fully_masked_row", text, change=lambda p, r=row: replace(p, policy=replace(p.policy, empty_row=r)), applies=_has_empty_row,
            declare=f'policy=Policy(empty_row="{row}"), or "any"',
        )  # fmt: skip
    spread = {"applies": _has_empty_row, "rank": 2}
    yield Fault("fully_masked_row", "a query that may attend to no key makes the whole output NaN", after=_all_nan, **spread)
    zeros = {"after": lambda a, p: Answer(np.where(_rows(p), 0.0, a.y), a.weights), **spread}
    yield Fault("fully_masked_row", "a query that may attend to no key gets zeros behind the output projection, without its bias", **zeros)


def _has_empty_row(problem: Problem) -> bool:
    return not bool(problem.visible.any(-1).all())


def _rows(problem: Problem) -> Array:
    return problem.empty_rows[:, :, None] if problem.is_layer else problem.empty_rows[:, None, :, None]


def _all_nan(answer: Answer, problem: Problem) -> Answer:
    del problem
    return Answer(np.full_like(answer.y, np.nan), answer.weights)


def rotation_faults() -> Iterator[Fault]:
    """Faults of rotary positions."""

    def rotated(problem: Problem) -> bool:
        return problem.policy.rotation is not None

    def other(change: Callable[[Rotation, Problem], Rotation]) -> dict[str, Any]:
        return {"change": lambda p: replace(p, policy=replace(p.policy, rotation=change(p.policy.rotation, p))), "applies": rotated}

    kind = "rope_pairing"
    exchanged = other(lambda r, _: replace(r, pairing="interleaved" if r.pairing == "half" else "half"))
    yield Fault(kind, "channels are paired in the other way: i with i + width/2, or 2i with 2i + 1", **exchanged)
    still = "positions have no influence: nothing turns, or all tokens of a head turn by the same angle, which comes to the same"
    yield Fault("rope_wrong_axis", still, change=lambda p: replace(p, policy=replace(p.policy, rotation=None)), applies=rotated)
    yield Fault(kind, "all channels turn, not only the first ones", **other(lambda r, _: replace(r, width=None)))
    yield Fault(kind, "half of the channels turn", **other(lambda r, p: replace(r, width=max(2, p.sizes["d_k"] // 4 * 2))))
    for base in (100.0, 1e3, 1e4, 1e5, 5e5, 1e6):
        yield Fault(kind, f"the base of the angles is {base:g}", **other(lambda r, _, b=base: replace(r, base=b)))
    for text, turn in _TURNS:
        yield Fault(kind, text, steps=lambda p, f=turn: {"rotate": f(p)}, applies=rotated)
    yield Fault("rope_wrong_axis", "the angle grows with the number of the head, not with the position", steps=_by_head, applies=rotated)
    for text, where in _WHERE:
        yield Fault("rope_position", text, steps=lambda p, f=where: {"rotate": _placed(p, f)}, applies=rotated)


def _turned_far(tokens: Array, positions: Array, options: dict[str, Any]) -> Array:
    """Turn as many channels as are said to, but pair them over the whole width."""
    whole = tokens.shape[-1]
    half = (options.get("width") or whole) // 2
    theta = positions[:, None, :, None] * options.get("base", 1e4) ** -(np.arange(half) * 2 / whole)
    first, second, found = tokens[..., :half], tokens[..., whole // 2 : whole // 2 + half], tokens.copy()
    found[..., :half] = first * np.cos(theta) - second * np.sin(theta)
    found[..., whole // 2 : whole // 2 + half] = first * np.sin(theta) + second * np.cos(theta)
    return found


def _turned(
    tokens: Array, positions: Array, options: dict[str, Any], *, angles: str = "", sign: float = 1.0, joined: str = "", far: bool = False
) -> Array:
    """Turn pairs of channels, with the angles or the result in another order."""
    if far:
        return _turned_far(tokens, positions, options)
    width = options.get("width") or tokens.shape[-1]
    half, pairing = width // 2, options.get("pairing", "half")
    exponent = np.arange(half) * 2 / (tokens.shape[-1] if angles == "whole width" else width)
    theta = sign * positions[:, None, :, None] * options.get("base", 1e4) ** -exponent
    theta = np.repeat(theta, 2, -1) if angles == "adjacent" else np.concatenate([theta, theta], -1)
    x = tokens[..., :width]
    if pairing == "half":
        turned, first, second = np.concatenate([-x[..., half:], x[..., :half]], -1), x[..., :half], x[..., half:]
    else:
        first, second = x[..., ::2], x[..., 1::2]
        turned = np.stack([-second, first], -1).reshape(x.shape)
        theta = theta if angles == "halves" else np.repeat(theta[..., :half], 2, -1)
    found = x * np.cos(theta) + turned * np.sin(theta)
    if joined == "apart":
        found = np.concatenate([found[..., ::2], found[..., 1::2]], -1)
    return np.concatenate([found, tokens[..., width:]], -1)


def _turn(**how: Any) -> Callable[[Problem], Callable[..., Array]]:
    return lambda _: lambda _, tokens, positions, **options: _turned(tokens, positions, options, **how)


def _one_side(first: bool, change: Callable[..., Array]) -> Callable[[Problem], Callable[..., Array]]:  # noqa: FBT001
    """Do it to the queries alone, which are turned first, or to the keys alone."""

    def make(_: Problem) -> Callable[..., Array]:
        calls: list[int] = []

        def rotate(step: Any, tokens: Array, positions: Array, **options: Any) -> Array:
            calls.append(1)
            mine = (len(calls) % 2 == 1) == first
            return change(tokens, positions, options) if mine else step(tokens, positions, **options)

        return rotate

    return make


def _apart(tokens: Array, positions: Array, options: dict[str, Any]) -> Array:
    return _turned(tokens, positions, options, joined="apart")


_TURNS: tuple[tuple[str, Callable[[Problem], Callable[..., Array]]], ...] = (
    ("channels are paired i with i + width/2, but the angles stand as t0, t0, t1, t1", _turn(angles="adjacent")),
    ("channels are paired 2i with 2i + 1, but the angles stand as t0, t1, t0, t1", _turn(angles="halves")),
    ("the rates of the angles are spread over the whole width of a head, not over the channels that turn", _turn(angles="whole width")),
    ("channel i is paired with i + d_k/2, though fewer channels turn, and their rates are spread over the whole width", _turn(far=True)),
    ("queries and keys turn the other way", _turn(sign=-1.0)),
    ("only the keys turn with their position", _one_side(first=True, change=lambda tokens, *_: tokens)),
    ("only the queries turn with their position", _one_side(first=False, change=lambda tokens, *_: tokens)),
    ("the queries turn the other way", _one_side(first=True, change=lambda t, p, o: _turned(t, p, o, sign=-1.0))),
    ("the keys turn the other way", _one_side(first=False, change=lambda t, p, o: _turned(t, p, o, sign=-1.0))),
    ("the turned channels of the queries are not put back in their order", _one_side(first=True, change=_apart)),
    ("the turned channels of the keys are not put back in their order", _one_side(first=False, change=_apart)),
)


def _by_head(_: Problem) -> dict[str, Any]:
    def rotate(step: Any, tokens: Array, _: Array, **options: Any) -> Array:
        return step(tokens.swapaxes(1, 2), np.arange(tokens.shape[1])[None], **options).swapaxes(1, 2)

    return {"rotate": rotate}


_WHERE: tuple[tuple[str, Callable[[Array, bool, Problem], Array]], ...] = (
    ("the positions that are given are ignored: tokens count from 0", lambda at, _, __: np.arange(at.shape[1])[None]),
    ("the queries count from 0, whatever came before", lambda at, q, _: at - at[:, :1] if q else at),
    ("the keys count from 0, whatever came before", lambda at, q, _: at if q else at - at[:, :1]),
    ("the positions of the queries are one too high", lambda at, q, _: at + q),
    ("the positions of the queries are one too low", lambda at, q, _: at - q),
    ("the positions of the first sample are used for all", lambda at, _, __: at[:1]),
    ("queries and keys all stand at the position of the last", lambda at, _, __: at * 0 + at[:, -1:]),
    ("the positions are reversed", lambda at, _, __: at[:, ::-1]),
    ("the tokens before count twice in the positions of the queries", lambda at, q, p: at + q * (p.past or p.options.get("offset", 0))),
)


def _placed(problem: Problem, where: Callable[[Array, bool, Problem], Array]) -> Callable[..., Array]:
    calls: list[int] = []

    def rotate(step: Any, tokens: Array, positions: Array, **options: Any) -> Array:
        calls.append(1)
        return step(tokens, where(positions, len(calls) % 2 == 1, problem), **options)

    return rotate


def ragged_faults() -> Iterator[Fault]:
    """Faults of packed documents."""
    kind, packed = "ragged_packing", {"applies": asks("cumulative")}
    for text, move in (
        ("each document begins one token too early", lambda c: np.concatenate([c[:1], c[1:-1] - 1, c[-1:]])),
        ("each document begins one token too late", lambda c: np.concatenate([c[:1], c[1:-1] + 1, c[-1:]])),
        ("the last document is forgotten: it is one with that before", lambda c: np.delete(c, -2) if len(c) > 2 else c),  # noqa: PLR2004
        ("the first document is one with that behind it", lambda c: np.delete(c, 1) if len(c) > 2 else c),  # noqa: PLR2004
    ):
        yield Fault(kind, text, change=lambda p, f=move: p.change(cumulative=f(p.options["cumulative"])), **packed)
    plain = {"count_in_documents": lambda _, __, documents: np.arange(documents.shape[1])[None]}
    yield Fault(kind, "positions go on from one document to the next", steps=lambda _: plain, **packed)
    several = {"applies": lambda p: p.sizes["batch"] > 1}
    rest = {"after": lambda a, p: Answer(_only_first(a.y, p), a.weights), **several}
    yield Fault(kind, "the samples behind the first get zeros, as if they had no keys", **rest)
    numbered = {"applies": asks("documents")}
    before = {"change": lambda p: p.change(documents=p.options["documents"] * 0 + p.options["documents"][:1]), **numbered}
    yield Fault(kind, "the documents of the first sample are used for all", **before)
    padded = {"applies": lambda p: asks("padding", "lengths")(p)}
    yield Fault(kind, "queries are thrown out by the padding of the keys, and come back as zeros", after=_unpadded, **padded)
    yield Fault(kind, "queries at the end are thrown out by the padding of the keys, and come back as zeros", after=_unpadded_end, **padded)


def _only_first(y: Array, problem: Problem) -> Array:
    kept = (np.arange(len(y)) == 0).reshape(-1, *[1] * (y.ndim - 1))
    nothing = problem.parameters.b_o if problem.parameters is not None and problem.parameters.b_o is not None else 0.0
    return np.where(kept, y, nothing)


def _real(problem: Problem) -> Array:
    if "padding" in problem.options:
        return np.asarray(problem.options["padding"])
    return np.asarray(problem.options["lengths"])[:, None] > np.arange(problem.sizes["seq_k"])


def _zeroed(answer: Answer, problem: Problem, rows: Array) -> Answer:
    shape = rows[:, :, None] if problem.is_layer else rows[:, None, :, None]
    return Answer(np.where(shape, answer.y, 0.0), answer.weights)


def _unpadded(answer: Answer, problem: Problem) -> Answer:
    seq_q, real = problem.sizes["seq_q"], _real(problem)
    rows = np.zeros((len(real), seq_q), bool)
    rows[:, : min(seq_q, real.shape[1])] = real[:, :seq_q]
    return _zeroed(answer, problem, rows)


def _unpadded_end(answer: Answer, problem: Problem) -> Answer:
    seq_q, real = problem.sizes["seq_q"], _real(problem)
    return _zeroed(answer, problem, real[:, -seq_q:]) if real.shape[1] >= seq_q else answer


def overflow_faults() -> Iterator[Fault]:
    """Addresses that wrap."""
    for rule in ("bias", "keep"):
        for modulus in range(2, 48):
            yield Fault(
                "index_overflow", f"the addresses of {'the bias' if rule == 'bias' else 'the mask'} wrap after {modulus} elements",
                change=lambda p, r=rule, m=modulus: p.change(**{r: _wrapped(p.options[r], m)}), applies=asks(rule), rank=5,
            )  # fmt: skip
    for name in ("keys", "values"):
        for modulus in range(2, 24):
            yield Fault(
                "index_overflow", f"the addresses of {name} wrap after {modulus} tokens",
                change=lambda p, n=name, m=modulus: replace(p, **{n: _tokens(getattr(p, n), m)}), rank=5,
                applies=lambda p, m=modulus: p.sizes["seq_k"] > m and p.keys is not p.queries,
            )  # fmt: skip


def _wrapped(array: Array, modulus: int) -> Array:
    seq = array.shape[-1]
    flat = array.reshape(*array.shape[:-2], -1)
    starts = np.arange(array.shape[-2]) * seq % modulus
    index = np.minimum(starts[:, None] + np.arange(seq), flat.shape[-1] - 1)
    return flat[..., index]


def _tokens(array: Array, modulus: int) -> Array:
    return np.take(array, np.arange(array.shape[-2]) % modulus, axis=-2)


def mask_and_position_faults() -> list[Fault]:
    """All of these."""
    makers = (ignored_faults, mask_faults, causal_faults, window_faults, row_faults, rotation_faults, ragged_faults, overflow_faults)
    return [fault for maker in makers for fault in maker()]
