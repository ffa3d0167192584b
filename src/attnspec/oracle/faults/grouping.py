"""Faults in which key/value head a query head reads, in how many heads there are, and in factors of heads."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from einops import rearrange

from ..problem import Array, Problem
from .fault import Fault, asks
from .layout import is_layer

RULES_ON_KEYS = ("keep", "padding", "lengths", "documents", "cumulative", "survivors", "slopes")


def grouping_faults() -> Iterator[Fault]:
    """Faults in which key/value head a query head reads."""
    yield Fault(
        "gqa_head_mapping", "query head i reads key/value head i % h_kv, not i // group (or the other way round)",
        change=_otherwise_grouped, applies=_is_grouped,
        declare='policy=Policy(grouping="strided")',
    )  # fmt: skip
    for text, pick in (
        ("every query head reads the first key/value head", lambda i, h, h_kv: 0 * (i + h + h_kv)),
        ("the groups are read in reverse order", lambda i, h, h_kv: h_kv - 1 - i // (h // h_kv)),
        ("query head i reads key/value head min(i, h_kv - 1)", lambda i, h, h_kv: np.minimum(i, h_kv - 1) + 0 * h),
    ):
        yield Fault("gqa_head_mapping", text, steps=lambda p, f=pick: _picked(p, f), applies=_is_grouped)
    for count in range(2, 17):
        for own_scale in (True, False):
            text = f"the width is cut into {count} heads, not into h: the number of heads is that of another time"
            yield Fault(
                "head_mask_prune", text, change=lambda p, n=count, o=own_scale: _recut(p, n, own_scale=o), applies=is_layer, rank=3
            )  # fmt: skip
    text = "keys and values are repeated along the sequence, not along the heads"
    yield Fault("gqa_head_mapping", text, change=_in_time, applies=_is_grouped)
    text = "keys are shared by i % h_kv, but values by i // group"
    yield Fault("gqa_head_mapping", text, steps=lambda p: {"share_keys": _strided(p)}, applies=_is_grouped)


def _is_grouped(problem: Problem) -> bool:
    return 1 < problem.sizes["h_kv"] < problem.sizes["h"]


def _otherwise_grouped(problem: Problem) -> Problem:
    policy = problem.policy
    return replace(problem, policy=replace(policy, grouping="strided" if policy.grouping == "contiguous" else "contiguous"))


def _in_time(problem: Problem) -> Problem | None:
    group = problem.sizes["h"] // problem.sizes["h_kv"]
    if not {"bias", *RULES_ON_KEYS}.isdisjoint(problem.options):
        return None
    keys, values = (np.repeat(array, group, -2) for array in (problem.keys, problem.values))
    return replace(problem, keys=keys, values=values)


def _recut(problem: Problem, count: int, *, own_scale: bool) -> Problem | None:
    """Cut the same width into another number of heads."""
    parameters, sizes = problem.parameters, problem.sizes
    width = sizes["h"] * sizes["d_k"]
    if parameters is None or count == sizes["h"] or width % count or sizes["h"] != sizes["h_kv"] or sizes["d_k"] != sizes["d_v"]:
        return None
    cut = {}
    for name in ("w_q", "w_k", "w_v"):
        cut[name] = rearrange(rearrange(getattr(parameters, name), "h m d -> m (h d)"), "m (h d) -> h m d", h=count)
    for name in ("b_q", "b_k", "b_v"):
        if getattr(parameters, name) is not None:
            cut[name] = getattr(parameters, name).reshape(count, -1)
    again = replace(problem, parameters=replace(parameters, **cut))
    return again if own_scale or "scale" in problem.options else again.change(scale=sizes["d_k"] ** -0.5)


def _picked(problem: Problem, pick: Callable[..., Array]) -> dict[str, Any]:
    heads = pick(np.arange(problem.sizes["h"]), problem.sizes["h"], problem.sizes["h_kv"])
    return {name: lambda _, heads_kv, **__: heads_kv[:, heads] for name in ("share_keys", "share_values")}


def _strided(problem: Problem) -> Any:
    return lambda _, keys, **__: keys[:, np.arange(problem.sizes["h"]) % problem.sizes["h_kv"]]


def head_faults() -> Iterator[Fault]:
    """Faults in factors of heads."""
    for text, change in (
        ("the factors of the heads are ignored", np.ones_like),
        ("the factors of the heads are off by one head", lambda g: np.roll(g, 1)),
        ("the factors of the heads are off by one head, the other way", lambda g: np.roll(g, -1)),
        ("the factors of the heads stand in reverse order", lambda g: g[::-1]),
        ("a head is kept where its factor says to ablate it", lambda g: 1 - g),
        ("a head is ablated or kept, whatever its factor", lambda g: (g != 0) * 1.0),
    ):
        yield Fault(
            "head_mask_prune", text, change=lambda p, f=change: p.change(gates=f(p.options["gates"])), applies=asks("gates"),
        )  # fmt: skip
