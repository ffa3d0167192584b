"""Faults in what a mask means and where it goes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..problem import Array, Problem
from .fault import Fault, asks
from .rules import NAMES, RULES, masked, only


def _around_mask(change: Callable[..., Any]) -> Callable[[Problem], dict[str, Any]]:
    """Mask in another way, given scores and what is kept."""
    return lambda p: {"mask": lambda _, scores, keep, **__: change(scores, np.broadcast_to(keep, scores.shape), p)}


def _other_keep(change: Callable[..., Array]) -> Callable[[Problem], dict[str, Any]]:
    return lambda p: {
        "mask": lambda step, scores, keep, **o: step(scores, change(np.broadcast_to(keep, scores.shape), p), **o),
    }


def mask_faults() -> Iterator[Fault]:
    """Faults in what a mask means and where it goes."""
    for rule in ("keep", "padding"):
        text = f"{NAMES[rule]} means the opposite: the keys that it should drop are kept, and those that it should keep are dropped"
        yield Fault(
            "mask_polarity_inverted", text, change=lambda p, r=rule: p.change(**{r: ~p.options[r]}), applies=asks(rule),
            declare='mask="drop"',
        )  # fmt: skip
    yield Fault("mask_polarity_inverted", "all masks mean the opposite", steps=_other_keep(lambda k, _: ~k), applies=masked(), rank=2)
    kind = "mask_type_confusion"
    for text, add in (
        ("the mask is added to the scores as numbers: 1 for a kept key", lambda s, k, _: s + k),
        ("the mask is added to the scores as numbers: 1 for a dropped key", lambda s, k, _: s + ~k),
        ("the mask is subtracted from the scores as numbers", lambda s, k, _: s - ~k),
        ("the scores are multiplied by the mask, so that a dropped key gets a score of 0", lambda s, k, _: s * k),
        ("the scores are multiplied by the inverted mask", lambda s, k, _: s * ~k),
    ):
        yield Fault(kind, text, steps=_around_mask(add), applies=masked())
    yield from _behind_softmax()
    yield from _block_faults()
    yield from _axis_faults()
    yield from _fill_faults()


def _block_faults() -> Iterator[Fault]:
    """Masks that hold for blocks of keys, and are lost inside of them."""
    for size in (2, 3, 4, 8, 16):
        for rows, over in ((1, "each query"), (size, f"blocks of {size} queries")):
            text = f"the mask holds for blocks of {size} keys and {over}: inside of a block of which any key is kept, all are"
            steps = _other_keep(lambda k, _, n=size, m=rows: _blocked(k, m, n))
            yield Fault("mask_not_applied", text, steps=steps, applies=masked(), rank=3)


def _blocked(keep: Array, rows: int, columns: int) -> Array:
    """Keep every key of a block of which any is kept."""
    found = keep
    for axis, size in ((2, rows), (3, columns)):
        starts = np.arange(0, found.shape[axis], size)
        found = np.repeat(np.logical_or.reduceat(found, starts, axis=axis), size, axis=axis)
    whole: Array = found[:, :, : keep.shape[2], : keep.shape[3]]
    return whole


def _behind_softmax() -> Iterator[Fault]:
    kind, where = "mask_after_softmax", masked(also_causal=True)
    for text, late in (
        ("the weights of dropped keys are set to 0 behind the softmax, so that the others do not add up to 1", lambda w, k: w * k),
        ("minus infinity is written over the weights of dropped keys, behind the softmax", lambda w, k: np.where(k, w, -np.inf)),
        ("a large negative number is written over the weights of dropped keys, behind the softmax", lambda w, k: np.where(k, w, -1e9)),
        ("infinity is written over the scores of dropped keys", None),
    ):
        if late is None:
            yield Fault(kind, text, steps=_around_mask(lambda s, k, _: np.where(k, s, np.inf)), applies=where)
        else:
            yield Fault(kind, text, steps=lambda _, f=late: _late(f), applies=where)


def _late(change: Callable[..., Array]) -> dict[str, Any]:
    kept: list[Array] = []

    def mask(_: Any, scores: Array, keep: Array, **__: Any) -> Array:
        kept.append(np.broadcast_to(keep, scores.shape))
        return scores

    def softmax(step: Any, *arrays: Any, **options: Any) -> Any:
        weights = step(*arrays, **options)
        return change(weights, kept[-1]) if kept else weights

    return {"mask": mask, "softmax": softmax}


def _axis_faults() -> Iterator[Fault]:
    for text, index in (
        ("the mask is repeated over the heads sample by sample (M0, M1, M0, M1), where the heads of one sample stand together", _tiled),
        ("the mask is repeated over the heads (M0, M0, M1, M1), where the samples of one head stand together", _repeated),
    ):
        yield Fault("mask_batch_head_tiling", text, steps=_other_keep(index), applies=lambda p: _several(p) and p.sizes["h"] > 1)
    yield Fault(
        "mask_wrong_axis", "the mask drops queries, not keys: its last two axes are exchanged",
        steps=_other_keep(lambda k, _: k.swapaxes(2, 3)), applies=lambda p: masked()(p) and _is_square(p),
    )  # fmt: skip
    for rule in ("padding", "lengths"):
        yield Fault(
            "mask_wrong_axis", f"{NAMES[rule]} drops queries, not keys", change=lambda p, r=rule: _padded_queries(p, r),
            applies=lambda p, r=rule: asks(r)(p) and _is_square(p),
        )  # fmt: skip
    yield from _place_faults()
    for name, reduce in (("any", np.any), ("all", np.all)):
        for axis, over in ((0, "sample"), (1, "head"), (2, "query")):
            found = _other_keep(lambda k, _, f=reduce, a=axis: np.broadcast_to(f(k, axis=a, keepdims=True), k.shape))
            text = f"a key is kept for a {over} if it is kept for {name} of them"
            yield Fault("mask_construction", text, steps=found, applies=_masked_on(axis), rank=2)
    exchanged = _other_keep(_exchanged)
    yield Fault("mask_batch_head_tiling", "samples and heads are exchanged in the mask", steps=exchanged, applies=_several)


def _several(problem: Problem) -> bool:
    return masked()(problem) and problem.sizes["batch"] > 1


def _is_square(problem: Problem) -> bool:
    return problem.sizes["seq_q"] == problem.sizes["seq_k"]


def _place_faults() -> Iterator[Fault]:
    """The mask of another sample, head, query or key is used."""
    kind = "mask_construction"
    for axis, name in ((0, "sample"), (1, "head"), (2, "query")):
        first = _other_keep(lambda k, _, a=axis: np.broadcast_to(np.take(k, [0], a), k.shape))
        yield Fault(kind, f"the mask of the first {name} is used for all", steps=first, applies=_masked_on(axis))
        last = _other_keep(lambda k, _, a=axis: np.broadcast_to(np.take(k, [-1], a), k.shape))
        yield Fault(kind, f"the mask of the last {name} is used for all", steps=last, applies=_masked_on(axis), rank=2)
        for step in (1, -1):
            rolled = _other_keep(lambda k, _, a=axis, s=step: np.roll(k, s, a))
            yield Fault(kind, f"the mask is off by one {name}", steps=rolled, applies=_masked_on(axis), rank=2)
    for step in (1, -1):
        yield Fault(kind, "the mask is off by one key", steps=_other_keep(lambda k, _, s=step: np.roll(k, s, 3)), applies=masked())
    for more, text in ((1, "one key too many is kept"), (-1, "one key too few is kept")):
        yield Fault(kind, f"of each length, {text}", change=lambda p, m=more: _lengthened(p, m), applies=asks("lengths"))


def _masked_on(axis: int) -> Callable[[Problem], bool]:
    return lambda p: masked()(p) and p.sizes[("batch", "h", "seq_q")[axis]] > 1


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
    kind, where = "mask_finite_fill", masked(also_causal=True)
    for fill in FILLS:
        rank = 1 if fill in (-1e4, -65504.0) else 2
        text = f"dropped keys get a score of {fill:g}, not minus infinity, and true scores can be lower"
        yield Fault(kind, text, steps=_around_mask(lambda s, k, _, f=fill: np.where(k, s, f)), applies=where, rank=rank)
        if fill:
            text = f"{fill:g} is added to the scores of dropped keys, and true scores can differ by more"
            yield Fault(kind, text, steps=_around_mask(lambda s, k, _, f=fill: s + f * ~k), applies=where, rank=rank)
            text = f"dropped keys get a score of {fill:g} before the scale"
            yield Fault(kind, text, steps=lambda p, f=fill: _early(p, lambda s, k: np.where(k, s, f)), applies=where, rank=3)
            yield Fault(
                kind,
                f"{fill:g} is added to the scores of keys for each rule that drops them, so that those that one rule drops win over others",
                steps=lambda p, f=fill: _stacked(p, f), applies=where, rank=rank + 1,
            )  # fmt: skip
    lowest = np.finfo(np.float32).min
    for low in (lowest, np.finfo(np.float64).min):
        text = "dropped keys get the lowest finite score, so that a query without keys gets the mean of all"
        yield Fault("fully_masked_row", text, steps=_around_mask(lambda s, k, _, f=low: np.where(k, s, f)), applies=where, rank=3)


def _early(problem: Problem, change: Callable[[Array, Array], Array]) -> dict[str, Any]:
    """Mask before the scale."""
    kept = problem.visible
    return {"scale": lambda step, scores, **o: step(change(scores, kept), **o), "mask": lambda _, scores, *__, **___: scores}


def _stacked(problem: Problem, fill: float) -> dict[str, Any]:
    rules = [rule for rule in RULES if asks(rule)(problem)]
    alone = [only(problem, rule).visible for rule in rules]
    dropped = sum((~kept).astype(float) for kept in alone)
    return {"mask": lambda _, scores, *__, **___: scores + fill * dropped}
