"""Faults of causality."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..problem import Array, Problem
from .fault import Fault, asks


def _seen(change: Callable[..., Array]) -> Callable[[Problem], dict[str, Any]]:
    """Another rule of causality, given the positions of queries and keys."""
    return lambda _: {"keep_causal": lambda _, q, k: change(q[:, None, :, None], k[:, None, None, :])}


def causal_faults() -> Iterator[Fault]:
    """Faults of causality."""
    kind, causal = "causal_geometry", asks("causal")
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
        yield Fault(kind, text, steps=_seen(rule), applies=causal)
    for block in (2, 3, 4, 8, 16):
        text = f"causality holds for blocks of {block} queries, not for each query"
        yield Fault(kind, text, steps=_seen(lambda q, k, b=block: k <= q // b * b + b - 1), applies=causal, rank=2)
        text = f"causality holds for blocks of {block} queries: each sees only what lies before its block"
        yield Fault(kind, text, steps=_seen(lambda q, k, b=block: k <= q // b * b), applies=causal, rank=3)
    yield from _alignment_faults()


def _alignment_faults() -> Iterator[Fault]:
    kind, causal = "causal_alignment", asks("causal")
    corner = {"top_left": "the first query stands beside the first key", "bottom_right": "the last query stands beside the last key"}
    for anchor, text in corner.items():
        yield Fault(
            kind, f"causality is anchored where {text}", change=lambda p, a=anchor: anchored(p, a), applies=causal,
            declare=f'policy=Policy(causal_anchor="{anchor}")',
        )  # fmt: skip
    yield Fault(
        kind, "the last query stands beside the last key where there are fewer queries than keys, else the first beside the first",
        change=lambda p: anchored(p, "bottom_right" if p.sizes["seq_q"] < p.sizes["seq_k"] else "top_left"), applies=causal, rank=2,
    )  # fmt: skip
    for text, change in (
        ("the position of the first query is ignored", lambda _: 0),
        ("the position of the first query counts twice", lambda o: 2 * o),
        ("the position of the first query is one too high", lambda o: o + 1),
        ("the position of the first query is one too low", lambda o: o - 1),
        ("the position of the first query is subtracted", lambda o: -o),
    ):
        yield Fault(kind, text, change=lambda p, f=change: _moved(p, f), rank=2, applies=_has_offset)


def _has_offset(problem: Problem) -> bool:
    return "offset" in problem.options or bool(problem.past)


def anchored(problem: Problem, anchor: Any, /) -> Problem:
    """Anchor causality and windows at another corner, whatever the offset."""
    policy = replace(problem.policy, causal_anchor=anchor)
    return replace(problem, policy=policy, history=None, options={n: v for n, v in problem.options.items() if n != "offset"})


def _moved(problem: Problem, change: Callable[[int], int]) -> Problem:
    return replace(problem.change(offset=change(problem.options.get("offset", problem.past))), history=None)
