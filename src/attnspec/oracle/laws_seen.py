"""Laws on what a query sees: what it may attend to has influence on its row, and nothing else has."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from .bench import MASKS, Bench, Failure, changed, full_rows, rows_of, separate, size_of, told
from .problem import Array, Problem

_SMALL = 1e-4
"""An influence that is so much less than that of what may be seen is a leak through a mask that is a number."""


_SEEN = 100
"""A weight of so many roundings must be seen."""


@dataclass(frozen=True, eq=False)
class Influence:
    """By how much each row of the output moves, key by key.

    Attributes:
        share: by how much.
        seen: whether that is more than rounding.
        known: where that says something.
    """

    share: Array
    seen: Array
    known: Array


def influence(bench: Bench, problem: Problem, /, inputs: tuple[str, ...] = ("keys", "values")) -> Influence:
    """Change one token after the other, and see which rows move."""
    rng, base = bench.rng, bench.ask(problem)
    share = []
    for token in range(problem.sizes["seq_k"]):

        def other(array: Array, token: int = token) -> Array:
            array[..., token, :] += 2 * rng.normal(size=array[..., token, :].shape)
            return array

        share.append(bench.gap(bench.ask(changed(problem, inputs, other)), base))
    found = np.stack(share, -1)
    known = np.broadcast_to(full_rows(problem)[..., None], found.shape).copy()
    if problem.queries is problem.keys:
        known[..., np.eye(found.shape[-1], dtype=bool)] = False  # a token moves its own row as a query
    return Influence(found, found > bench.rounding * size_of(base[full_rows(problem)]), known)


def follow_masks(bench: Bench) -> Iterator[Failure]:
    """Try each mask alone, each two together, and the first ones with what else can be asked for."""
    for name in [name for name in MASKS if bench.has(name)]:
        for word in bench.words(name)[: 1 if bench.slow else None]:
            yield from _tokens(bench, name, word=word)
    for pair in combinations([name for name in MASKS if bench.has(name)], 2):
        yield from _tokens(bench, *pair)
    others = [name for name in bench.profile.options if name not in (*MASKS, "gates", "survivors", "positions")]
    if bench.slow:
        return
    masks = [name for name in ("causal", "keep", "padding") if bench.has(name)]
    for pair in ((mask, other) for other in others for mask in (masks if other == "return_weights" else masks[:2])):
        yield from _tokens(bench, *pair)


def _tokens(bench: Bench, *names: str, word: str = "") -> Iterator[Failure]:
    for tokens in ("wide", "self", "square", "tall")[: 4 if names[0] in _BY_PLACE else 3]:
        problem = bench.draw(*names, tokens=(tokens,), word=word)
        if problem is not None:
            yield from _follows(bench, problem)
            if len(names) > 1 or bench.slow:
                return


_BY_PLACE = ("causal", "window", "window_left", "window_right")


def mix_tokens(bench: Bench) -> Iterator[Failure]:
    """Try without a mask, and with what else can be asked for."""
    for name in ("", *(name for name in bench.profile.options if name not in (*MASKS, "gates", "survivors", "offset"))):
        problem = bench.draw(*([name] if name else []))
        if problem is not None:
            yield from _follows(bench, problem)


def _follows(bench: Bench, problem: Problem) -> Iterator[Failure]:
    """Compare what has influence with what may be seen."""
    if problem.policy.cap_order == "after" and problem.effective_policy.cap is not None:
        return  # the declared order lets dropped keys in
    found, may = influence(bench, problem), rows_of(problem, problem.visible)
    found = replace(found, known=found.known & (~may | _strong(bench, problem)))
    leaks, missing = found.seen & ~may & found.known, ~found.seen & may & found.known
    if not leaks.any() and not missing.any():
        return
    strength = np.median(found.share[may & found.known & np.isfinite(found.share)])
    detail = f"{leaks.sum()} influences too many, {missing.sum()} too few, of {found.known.sum()}; {told(problem)}"
    if leaks.any() and not missing.any() and np.max(found.share[leaks]) < _SMALL * strength:
        yield Failure("mask_finite_fill", "A dropped key has a small influence: what stands for minus infinity is too small", detail)
        return
    if leaks.any() and not missing.any() and separate(problem, "values"):
        by_value = influence(bench, problem, ("values",))
        if not (by_value.seen & ~may & found.known).any():
            sentence = "A dropped key has no share itself, but changes the shares of the others: the mask comes after the softmax"
            yield Failure("mask_after_softmax", sentence, detail)
            return
    yield Failure(*_named(bench, problem, found, leaks), detail)


def _strong(bench: Bench, problem: Problem) -> Array:
    """Where a weight is so large that its influence must be seen, as far as weights are known."""
    if problem.is_layer and bench.subject.load is None:
        return rows_of(problem, problem.visible)
    weights = problem.run().weights
    if weights is None:
        return rows_of(problem, problem.visible)
    return rows_of(problem, weights[..., : problem.sizes["seq_k"]] > _SEEN * bench.rounding)


def _named(bench: Bench, problem: Problem, found: Influence, leaks: Array) -> tuple[str, str]:
    """Find what would explain the influences."""
    for kind, sentence, other in _explanations(problem):
        would = rows_of(other, other.visible)
        known = found.known & full_rows(other)[..., None]
        if known.any() and np.array_equal(would[known], found.seen[known]) and _answers_as(bench, problem, other):
            return kind, sentence
    asked = [name for name in MASKS if name in problem.options]
    if not asked and not problem.is_causal:
        return _unmixed(found)
    if "softcap" in problem.options and leaks.any():
        return "softcap_order_or_missing", "A dropped key has influence where scores are capped: the cap comes after the mask"
    what = "A key that must be dropped has influence" if leaks.any() else "A key that may be seen has no influence"
    kinds = {_DEFAULT[name] for name in asked} or {"causal_geometry"}
    return (kinds.pop() if len(kinds) == 1 else "mask_combination"), f"{what}, with {' and '.join(asked) or 'the built-in causality'}"


def _answers_as(bench: Bench, problem: Problem, other: Problem) -> bool:
    """Tell whether options that are said not to be applied make no difference indeed."""
    if other.options.keys() >= problem.options.keys() or other.causal != problem.causal:
        return True
    rows = full_rows(problem) & full_rows(other)
    return not (bench.moved(bench.ask(other), bench.ask(problem)) & rows).any()


def _unmixed(found: Influence) -> tuple[str, str]:
    seq_q, seq_k = found.seen.shape[-2:]
    if seq_q == seq_k and np.array_equal(found.seen & found.known, found.known & np.eye(seq_q, dtype=bool)):
        return "head_seq_axis_swap", "A query sees no token but its own: tokens do not attend to each other"
    if not (found.seen & found.known).any():
        return "operand_routing", "No key has any influence"
    return "head_split_merge_order", "A query does not see every key, though nothing is dropped"


_DEFAULT = {
    **dict.fromkeys(("keep", "padding", "lengths"), "mask_construction"),
    **dict.fromkeys(("window", "window_left", "window_right"), "window_wrong_region"),
    **dict.fromkeys(("documents", "cumulative"), "ragged_packing"),
    "causal": "causal_geometry",
}
_IGNORED = {
    **dict.fromkeys(("keep", "padding", "lengths"), "mask_not_applied"),
    **dict.fromkeys(("window", "window_left", "window_right"), "window_wrong_region"),
    **dict.fromkeys(("documents", "cumulative"), "ragged_packing"),
    **dict.fromkeys(("causal", "offset"), "causal_dropped_or_forced"),
}


def _explanations(problem: Problem) -> Iterator[tuple[str, str, Problem]]:
    """What else may be computed, as another problem."""
    options, policy = problem.options, problem.policy
    asked = [name for name in MASKS if name in options]
    if problem.is_causal:
        plain = replace(problem.change(causal=False), options={n: v for n, v in options.items() if n not in ("causal", "offset")})
        yield "causal_dropped_or_forced", "The future has influence: causality is not applied", plain
        anchor: Any = {"top_left": "bottom_right", "bottom_right": "top_left"}[policy.causal_anchor]
        unplaced = replace(problem, options={n: v for n, v in options.items() if n != "offset"})
        for other, sentence in (
            (unplaced, "The offset of the queries is not applied to causality"),
            (replace(unplaced, policy=replace(policy, causal_anchor=anchor)), f"Causality is counted from {anchor.replace('_', ' ')}"),
        ):
            yield "causal_alignment", sentence, other
    else:
        yield "causal_dropped_or_forced", "The future has no influence, though causality was not asked for", problem.change(causal=True)
    for name in asked:
        if name != "causal":
            kind = "mask_combination" if len(asked) > 1 and _IGNORED[name] == "mask_not_applied" else _IGNORED[name]
            others = f" together with {', '.join(set(asked) - {name})}" if len(asked) > 1 else ""
            yield kind, f"What {name} drops has influence: it is not applied{others}", problem.change(**{name: None})
    yield from _other_masks(problem)
    for name in ("window", "window_left", "window_right"):
        for step in (-1, 1) if name in options else ():
            sentence = f"The window is {'narrower' if step < 0 else 'wider'} by one key than asked for"
            yield "window_off_by_one", sentence, problem.change(**{name: max(options[name] + step, 0)})


def _other_masks(problem: Problem) -> Iterator[tuple[str, str, Problem]]:
    sizes = problem.sizes
    for name in ("keep", "padding"):
        if name in problem.options:
            inverted = problem.change(**{name: ~problem.options[name]})
            yield "mask_polarity_inverted", f"{name} has the opposite meaning: what should be kept is dropped", inverted
    if "padding" in problem.options and sizes["seq_q"] == sizes["seq_k"]:
        drops = replace(problem.change(keep=problem.options["padding"][:, None, :, None] & np.ones((1, 1, 1, sizes["seq_k"]), bool)))
        yield "mask_wrong_axis", "Padding drops queries, not keys", drops.change(padding=None)
    if "keep" not in problem.options:
        return
    keep = np.broadcast_to(problem.options["keep"], (sizes["batch"], sizes["h"], sizes["seq_q"], sizes["seq_k"]))
    if sizes["seq_q"] == sizes["seq_k"]:
        yield "mask_wrong_axis", "The mask is read with queries and keys exchanged", problem.change(keep=keep.swapaxes(2, 3))
    order = np.arange(sizes["batch"] * sizes["h"])
    flat = keep[:, 0][order % sizes["batch"]].reshape(keep.shape)
    yield "mask_batch_head_tiling", "Heads use the masks of other samples", problem.change(keep=flat)


def ignore_dropped_sizes(bench: Bench) -> Iterator[Failure]:
    """Try values and scores of dropped keys that are huge."""
    for problem in _masked(bench, 1.0):
        if separate(problem, "values"):
            yield from _huge_values(bench, problem, 1e30, "")
        strong = 1e30 if bench.rounding < 1e-7 else 1e12  # in float32 a product of two must not overflow
        yield from _huge_keys(bench, problem, strong)
    for problem in _masked(bench, 1e5) if bench.profile.policy.cap is None else ():
        if separate(problem, "values"):
            yield from _huge_values(bench, problem, 1.0, " where scores are large")


def _masked(bench: Bench, spread: float) -> Iterator[Problem]:
    """Problems in which a key is dropped, one for each mask."""
    names = [(name,) for name in MASKS if bench.has(name)] + ([()] if bench.profile.causal else [])
    for asked in names:
        problem = bench.draw(*asked, spread=spread)
        revived = problem is not None and problem.policy.cap_order == "after" and problem.effective_policy.cap is not None
        if problem is not None and not revived:
            yield problem


def _poisoned(problem: Problem, token: int, inputs: tuple[str, ...], poison: float) -> Problem:
    def filled(array: Array) -> Array:
        array[..., token, :] = poison * (1 + np.arange(array.shape[-1]) % 3) * (-1) ** np.arange(array.shape[-1])
        return array

    return changed(problem, inputs, filled)


def _unseen(problem: Problem, token: int) -> Array:
    """The rows that may not see a token."""
    rows = ~rows_of(problem, problem.visible)[..., token] & full_rows(problem)
    if problem.queries is problem.keys:
        rows[..., token] = False
    return np.asarray(rows)


def _huge_values(bench: Bench, problem: Problem, poison: float, where: str) -> Iterator[Failure]:
    base = bench.ask(problem)
    for token in range(problem.sizes["seq_k"]):
        rows = _unseen(problem, token)
        if not rows.any():
            continue
        share = np.max(bench.gap(bench.ask(_poisoned(problem, token, ("values",), poison)), base)[rows]) / poison
        if share > bench.rounding * size_of(base[rows]) / poison:
            kind = "mask_finite_fill" if share < 1e-2 or where else "mask_not_applied"
            sentence = f"The value of a dropped key has a share of {share:.1g} in the output{where}"
            yield Failure(kind, sentence, told(problem), "wrong" if np.isfinite(share) else "warning")
            return


def _huge_keys(bench: Bench, problem: Problem, poison: float) -> Iterator[Failure]:
    base = bench.ask(problem)
    for token in range(problem.sizes["seq_k"]):
        rows = _unseen(problem, token)
        inputs = ("keys",) if separate(problem, "keys") else ("keys", "values")
        if rows.any() and bench.moved(bench.ask(_poisoned(problem, token, inputs, poison)), base)[rows].any():
            sentence = f"A dropped key of the size {poison:.0e} has influence: it is beyond what stands for minus infinity"
            yield Failure("mask_finite_fill", sentence, told(problem), "warning")
            return


def ignore_dropped_nan(bench: Bench) -> Iterator[Failure]:
    """Try dropped keys and values that are NaN."""
    for problem in _masked(bench, 1.0):
        base = bench.ask(problem)
        for token in range(problem.sizes["seq_k"]):
            rows = _unseen(problem, token)
            found = bench.ask(_poisoned(problem, token, ("keys", "values"), np.nan))
            if rows.any() and bench.moved(found, base)[rows].any():
                sentence = "NaN in a dropped key or its value reaches the output; implementations differ in that"
                yield Failure("nonfinite_propagation", sentence, told(problem), "warning")
                return


def pass_on_nan(bench: Bench) -> Iterator[Failure]:
    """Try NaN in what is seen."""
    for name in ("", *(name for name in MASKS if bench.has(name))):
        problem = bench.draw(*([name] if name else []))
        if problem is None:
            continue
        for given in ("queries", "keys", "values"):
            rows = rows_of(problem, problem.visible)[..., 0] & full_rows(problem)
            if given == "queries":
                rows = full_rows(problem) & (np.arange(problem.sizes["seq_q"]) == 0)
            found = bench.ask(_poisoned(problem, 0, (given,), np.nan))
            if not np.isnan(found[rows]).all():
                sentence = f"NaN in {given} that are seen does not reach the output: it is swallowed"
                yield Failure("nonfinite_propagation", sentence, told(problem), "warning")
                return
