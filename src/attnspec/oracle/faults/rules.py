"""Rules: which options say what a query may attend to, and faults where one is ignored or set over another."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations

from ..problem import Problem
from .fault import Fault, asks

MASKS = ("keep", "padding", "lengths", "documents")


RULES = (*MASKS, "causal", "window", "window_left", "window_right", "cumulative")


NAMES = {
    "keep": "the mask", "padding": "the padding", "lengths": "the lengths", "documents": "the documents", "causal": "causality",
    "window": "the window", "window_left": "the left end of the window", "window_right": "the right end of the window",
    "cumulative": "the packing",
}  # fmt: skip


def masked(*, also_causal: bool = False) -> Callable[[Problem], bool]:
    """Tell whether a problem has a mask; or, if that is asked, causality or a window too."""
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
        yield Fault(kinds[rule], f"{NAMES[rule]} is ignored", change=_without(rule), applies=asks(rule))
    for kept, lost in permutations(RULES, 2):
        kind = "mask_combination" if kinds[lost] == "mask_not_applied" else kinds[lost]
        yield Fault(
            kind, f"{NAMES[lost]} is ignored where {NAMES[kept]} is given", change=_without(lost), rank=2, applies=_asks_both(kept, lost)
        )
    for rule in MASKS:
        for count in range(1, 5):
            text = f"what {NAMES[rule]} drops among the first {count} keys is seen again: another rule is set over it"
            yield Fault(
                "mask_combination", text, change=_prefixed(rule, count), rank=3,
                applies=lambda p, r=rule, n=count: asks(r)(p) and p.sizes["seq_k"] > n,
            )  # fmt: skip
    for rule in RULES:
        yield Fault(
            "mask_combination", f"a key is kept if {NAMES[rule]} or any other rule keeps it, not only if all do", rank=3,
            steps=lambda _: {"keep_both": lambda _, a, b: a | b},
            applies=lambda p, a=rule: asks(a)(p) and sum(asks(other)(p) for other in RULES) > 1,
        )  # fmt: skip
    yield Fault("mask_not_applied", "all masks are ignored", change=_without_all, applies=masked(also_causal=True), rank=2)
    text = "it is causal, though that was not asked for"
    yield Fault("causal_dropped_or_forced", text, change=lambda p: p.change(causal=True), applies=lambda p: not p.is_causal)


def _asks_both(one: str, other: str) -> Callable[[Problem], bool]:
    return lambda problem: asks(one)(problem) and asks(other)(problem)


def _prefixed(rule: str, count: int) -> Callable[[Problem], Problem]:
    """Ignore a rule for the first keys."""

    def change(problem: Problem) -> Problem:
        alone = only(problem, rule).visible.copy()
        alone[..., :count] = True
        if "keep" in problem.options and rule != "keep":
            alone &= problem.options["keep"]
        return problem.change(**{rule: None, "keep": alone})

    return change


def only(problem: Problem, rule: str, /) -> Problem:
    """Leave out all other rules."""
    options = {name: value for name, value in problem.options.items() if name not in RULES or name == rule}
    return replace(problem, causal=problem.causal and rule == "causal", options=options)


def _without_all(problem: Problem) -> Problem:
    return replace(problem, causal=False, options={n: v for n, v in problem.options.items() if n not in (*RULES, "offset")})
