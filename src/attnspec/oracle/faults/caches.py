"""Faults of caches: slots that are empty, missing or shifted, and tokens that are taken for others."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..problem import Array, Problem
from .fault import Fault

CAPACITIES = (*range(8, 33), 40, 48, 64, 96, 100, 128, 256, 512, 1024)


def _is_cached(problem: Problem) -> bool:
    return problem.history is not None


def _holds(problem: Problem) -> bool:
    return bool(problem.past)


def _both(change: Callable[..., Array]) -> Callable[[Problem], Problem]:
    """Change keys and values alike, as they lie in the cache; if there are fewer then, the new tokens are still the last of them."""

    def changed(problem: Problem) -> Problem:
        keys, values = change(problem.keys, problem), change(problem.values, problem)
        fewer = keys.shape[-2] < problem.keys.shape[-2] and not {"keep", "padding", "bias"} & set(problem.options)
        history = (keys.shape[-2] - problem.sizes["seq_q"],) if fewer else problem.history
        return replace(problem, keys=keys, values=values, history=history)

    return changed


def _of_past(change: Callable[..., Array]) -> Callable[..., Array]:
    """Change what was in the cache before, and leave the new tokens."""
    return lambda array, p: np.concatenate([change(array[..., : p.past, :], p), array[..., p.past :, :]], -2)


def _shifted(array: Array, _: Problem) -> Array:
    return np.concatenate([array[..., 1:, :], 0 * array[..., :1, :]], -2)


def _shifted_back(array: Array, _: Problem) -> Array:
    return np.concatenate([0 * array[..., :1, :], array[..., :-1, :]], -2)


def _blind(keep: Callable[..., Any]) -> Callable[[Problem], dict[str, Any]]:
    """See only some of the slots of the cache."""

    def steps(problem: Problem) -> dict[str, Any]:
        seen = keep(problem)
        return {"keep_causal": lambda step, q, k: step(q, k) & (np.arange(k.shape[-1]) < seen)}

    return steps


def cache_faults() -> Iterator[Fault]:
    """All of these."""
    extent = "cache_extent"
    text = "what the cache held before is not seen: only the new tokens are"
    yield Fault(extent, text, change=_both(lambda a, p: a[..., p.past :, :]), applies=_holds)
    text = "the new tokens are not seen: keys are counted before they are written"
    yield Fault(extent, text, steps=_blind(lambda p: p.past), applies=_is_cached)
    yield Fault(extent, "the newest token is not seen", steps=_blind(lambda p: p.sizes["seq_k"] - 1), applies=_is_cached)
    text = "the cache is read one slot late: the oldest key is lost, and an empty slot is seen"
    yield Fault(extent, text, change=_both(_shifted), applies=_is_cached)
    text = "the cache is read one slot early: an empty slot is seen, and the newest key is not"
    yield Fault(extent, text, change=_both(_shifted_back), applies=_is_cached)
    for text, change in (
        ("the oldest token is forgotten", lambda a, _: a[..., 1:, :] if a.shape[-2] > 1 else a),
        ("what the cache held before reads as zeros", _of_past(lambda a, _: 0 * a)),
    ):
        yield Fault(extent, text, change=_both(change), applies=_holds)
    for capacity in CAPACITIES:
        yield Fault(
            extent, f"the cache has room for {capacity} tokens, and its empty slots are seen, with a score of 0", rank=2,
            steps=lambda _, c=capacity: _empty_slots(c), applies=lambda p, c=capacity: _is_cached(p) and p.sizes["seq_k"] < c,
        )  # fmt: skip
    yield from _structure_faults()
    yield from _place_faults()


def _structure_faults() -> Iterator[Fault]:
    structure = "cache_structure"
    for text, change in (
        ("the new tokens stand before those that the cache held", lambda a, p: np.roll(a, p.sizes["seq_q"], -2)),
        ("the cache holds the tokens in reverse order", _of_past(lambda a, _: a[..., ::-1, :])),
        ("the cache holds other sequences: the batch is reversed", _of_past(lambda a, _: a[::-1])),
        ("all sequences have the cache of the first", _of_past(lambda a, _: np.broadcast_to(a[:1], a.shape))),
        ("the newest call's tokens overwrite those of the call before", _overwritten),
        ("the cache keeps the first call's tokens only, and the new ones", _first_only),
    ):
        yield Fault(structure, text, change=_both(change), applies=_holds)
    text = "keys are thrown out of the cache, and causality takes those that are left for the latest in a row"
    yield Fault(structure, text, change=_evicted, applies=lambda p: _is_cached(p) and "padding" in p.options)
    yield from _part_faults(structure)
    yield from _reorder_faults(structure)


def _evicted(problem: Problem) -> Problem:
    """Count queries and keys from behind among the keys that are left."""
    real, new = problem.options["padding"], problem.sizes["seq_q"]
    place = np.cumsum(real, 1) - 1  # of each key among those that are left
    left = real.sum(1)[:, None, None]
    seen = real[:, None, :] & (place[:, None, :] <= np.arange(new)[:, None] + left - new)
    return replace(problem.change(padding=None, keep=seen[:, None]), causal=False)


def _part_faults(kind: str) -> Iterator[Fault]:
    for name in ("keys", "values"):
        for text, change in (("read as zeros", lambda a, _: 0 * a), ("are those of other sequences", lambda a, _: a[::-1])):
            yield Fault(
                kind, f"the {name} that the cache held before {text}",
                change=lambda p, n=name, f=change: replace(p, **{n: _of_past(f)(getattr(p, n), p)}), applies=_holds,
            )  # fmt: skip


def _empty_slots(capacity: int) -> dict[str, Any]:
    """Let empty slots take their share, where the softmax sees them."""

    def softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Any:
        peak = np.maximum(scores.max(-1, keepdims=True), 0.0)
        shares = np.exp(scores - peak)
        return shares / (shares.sum(-1, keepdims=True) + (capacity - scores.shape[-1]) * np.exp(-peak))

    return {"softmax": softmax}


def _overwritten(array: Array, problem: Problem) -> Array:
    past, history = problem.past or 0, problem.history or ()
    last = history[-1] if history else 0
    return np.concatenate([array[..., : past - last, :], array[..., past:, :]], -2)


def _first_only(array: Array, problem: Problem) -> Array:
    first = (problem.history or (0,))[0]
    return np.concatenate([array[..., :first, :], array[..., problem.past :, :]], -2)


def _reorder_faults(kind: str) -> Iterator[Fault]:
    for text, names in (
        ("the sequences of the cache are not picked anew", ("keys", "values")),
        ("the keys of the cache are not picked anew, only the values", ("keys",)),
        ("the values of the cache are not picked anew, only the keys", ("values",)),
    ):
        yield Fault(
            kind, text, change=lambda p, n=names: replace(p, **{name: _put_back(getattr(p, name), p) for name in n}), applies=_is_reordered
        )  # fmt: skip
    twice = _both(_of_past(lambda a, p: a[p.reordered]))
    yield Fault(kind, "the sequences of the cache are picked anew twice", change=twice, applies=_is_reordered)


def _is_reordered(problem: Problem) -> bool:
    return problem.reordered is not None


def _put_back(array: Array, problem: Problem) -> Array:
    return _of_past(lambda a, p: a[np.argsort(p.reordered)])(array, problem)


_OFFSETS: tuple[tuple[str, Callable[[tuple[int, ...]], list[int]]], ...] = (
    ("positions count from 0 in every call", lambda sizes: [0 for _ in sizes]),
    ("positions count calls, not tokens", lambda sizes: list(range(len(sizes)))),
    ("the position of a call is the length of the prompt, ever after", lambda sizes: [sizes[0] * (i > 0) for i in range(len(sizes))]),
    ("positions grow by the length of the prompt with each call", lambda sizes: [sizes[0] * i for i in range(len(sizes))]),
    ("positions jump by the length of the prompt after the first call behind it", lambda sizes: _jump(sizes, jump=True)),
    ("positions are one too high behind the first call", lambda sizes: [sum(sizes[:i]) + (i > 0) for i in range(len(sizes))]),
    ("positions are one too low behind the first call", lambda sizes: [sum(sizes[:i]) - (i > 0) for i in range(len(sizes))]),
    ("positions count the tokens before twice", lambda sizes: [2 * sum(sizes[:i]) for i in range(len(sizes))]),
    ("positions count the new tokens too", lambda sizes: [sum(sizes[: i + 1]) for i in range(len(sizes))]),
    ("positions count the new tokens too, behind the first call", lambda sizes: [sum(sizes[: i + 1]) * (i > 0) for i in range(len(sizes))]),
)


def _jump(sizes: tuple[int, ...], *, jump: bool) -> list[int]:
    """0, then the prompt; then the prompt once more, and from there on what is new."""
    found = [0]
    for index, size in enumerate(sizes[:-1]):
        found.append(found[-1] + (sizes[0] if jump and index < 2 else size))
    return found


def _place_faults() -> Iterator[Fault]:
    for text, offsets in _OFFSETS:
        yield Fault("rope_position", text, steps=lambda p, f=offsets: {"rotate": _displaced(p, f)}, applies=_is_rotated)
    text = "a token that comes alone has its turned channels in another order than those of a prompt: all even ones first"
    yield Fault("rope_pairing", text, steps=_alone_apart, applies=_is_rotated)
    text = "the new tokens alone turn by their position: the cache holds the others unturned"
    yield Fault("rope_position", text, steps=_past_unturned, applies=_is_rotated)


def _is_rotated(problem: Problem) -> bool:
    return _is_cached(problem) and problem.policy.rotation is not None


def _alone_apart(problem: Problem) -> dict[str, Any]:
    """Put even channels before odd ones where a token came alone."""
    sizes = _sizes(problem)
    calls: list[int] = []
    alone = np.repeat([size == 1 for size in sizes], sizes)

    def rotate(step: Any, tokens: Array, positions: Array, **options: Any) -> Any:
        calls.append(1)
        turned = step(tokens, positions, **options)
        apart = np.concatenate([turned[..., ::2], turned[..., 1::2]], -1)
        return np.where((alone[-turned.shape[2] :] if len(calls) % 2 == 1 else alone)[:, None], apart, turned)

    return {"rotate": rotate}


def _sizes(problem: Problem) -> tuple[int, ...]:
    return (*(problem.history or ()), problem.sizes["seq_q"])


def _displaced(problem: Problem, offsets: Callable[[tuple[int, ...]], list[int]]) -> Callable[..., Array]:
    """Turn each call's tokens from another offset on; queries come first, then keys."""
    sizes = _sizes(problem)
    calls: list[int] = []
    starts = [np.arange(size) + start for size, start in zip(sizes, offsets(sizes), strict=True)]

    def rotate(step: Any, tokens: Array, _: Array, **options: Any) -> Any:
        calls.append(1)
        places = starts[-1] if len(calls) % 2 == 1 else np.concatenate(starts)
        return step(tokens, places[None], **options)

    return rotate


def _past_unturned(problem: Problem) -> dict[str, Any]:
    calls: list[int] = []

    def rotate(step: Any, tokens: Array, positions: Array, **options: Any) -> Any:
        calls.append(1)
        if len(calls) % 2 == 1:
            return step(tokens, positions, **options)
        past = problem.past or 0
        turned = step(tokens[:, :, past:], positions[:, past:], **options)
        return np.concatenate([tokens[:, :, :past], turned], 2)

    return {"rotate": rotate}
