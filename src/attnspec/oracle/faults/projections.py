"""Faults of projections: which operand or weight is used for what, biases, and how fused weights are taken apart."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import numpy as np
from einops import rearrange

from ..problem import Answer, Problem
from .fault import Fault
from .layout import is_layer, projected


def _of_operands(problem: Problem, names: tuple[str, str, str]) -> Problem | None:
    """Take another input for queries, keys or values."""
    changed = replace(problem, **{to: getattr(problem, name) for to, name in zip(("queries", "keys", "values"), names, strict=True)})
    if changed.keys.shape[:-1] != changed.values.shape[:-1] or len(changed.queries) != len(changed.keys):
        return None
    return changed if changed.queries.shape[-1] == problem.queries.shape[-1] else None


def _of_weights(problem: Problem, roles: str, *, biases: bool) -> Problem | None:
    """Take another projection for queries, keys or values."""
    parameters = problem.parameters
    if parameters is None:
        return None
    taken = {f"w_{to}": getattr(parameters, f"w_{role}") for to, role in zip("qkv", roles, strict=True)}
    if biases:
        taken |= {f"b_{to}": getattr(parameters, f"b_{role}") for to, role in zip("qkv", roles, strict=True)}
    if any(taken[f"w_{to}"].shape != getattr(parameters, f"w_{to}").shape for to in "qkv"):
        return None
    return replace(problem, parameters=replace(parameters, **taken))


def routing_faults() -> Iterator[Fault]:
    """Faults in which operand or weight is used for what."""
    names = {"q": "queries", "k": "keys", "v": "values"}
    for roles in product("qkv", repeat=3):
        if (text := "".join(roles)) == "qkv":
            continue
        takes = ", ".join(f"{names[to]} are taken from {names[role]}" for to, role in zip("qkv", roles, strict=True) if to != role)
        kind, rank = "operand_routing", sum(a != b for a, b in zip("qkv", roles, strict=True))
        operands = tuple(names[role] for role in roles)
        yield Fault(
            kind, f"the inputs are exchanged: {takes}", change=lambda p, o=operands: _of_operands(p, o), rank=rank, applies=_has_sources
        )
        for biases in (False, True):
            what = f"the projections{' and their biases' if biases else ''} are exchanged"
            does = f"{what}: the {takes.replace('taken from', 'projected as')}"
            yield Fault(kind, does, change=lambda p, t=text, b=biases: _of_weights(p, t, biases=b), rank=rank, applies=is_layer)


def _has_sources(problem: Problem) -> bool:
    return problem.keys is not problem.queries or problem.values is not problem.keys


_BIASES = [("b_q",), ("b_k",), ("b_v",), ("b_o",), ("b_q", "b_k"), ("b_k", "b_v"), ("b_q", "b_v"), ("b_q", "b_k", "b_v")]


def bias_faults() -> Iterator[Fault]:
    """Faults in the biases of projections, and activations that nobody asked for."""
    for names in [*_BIASES, ("b_q", "b_k", "b_v", "b_o")]:
        yield Fault(
            "projection_bias", f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} left out",
            change=lambda p, n=names: _drop(p, n), rank=len(names),
        )  # fmt: skip
    twice: dict[str, Any] = {"after": lambda a, p: Answer(a.y + _output_bias(p), a.weights)}
    yield Fault("projection_bias", "b_o is added twice", **twice, applies=_has_output_bias)
    yield Fault("projection_bias", "b_o is added once for each head", after=_bias_of_each_head, applies=_has_output_bias)
    for name, activate in (("relu", lambda x: np.maximum(x, 0)), ("tanh", np.tanh), ("sigmoid", lambda x: 1 / (1 + np.exp(-x)))):
        inward = projected(activate)
        outward: dict[str, Any] = {"after": lambda a, _, f=activate: Answer(f(a.y), a.weights)}
        yield Fault("activation", f"queries, keys and values go through {name}", steps=inward, applies=is_layer)
        yield Fault("activation", f"queries, keys, values and the output go through {name}", steps=inward, **outward, applies=is_layer)
        yield Fault("activation", f"the output goes through {name}", **outward)


def _drop(problem: Problem, names: tuple[str, ...]) -> Problem | None:
    if problem.parameters is None or all(getattr(problem.parameters, name) is None for name in names):
        return None
    return replace(problem, parameters=replace(problem.parameters, **dict.fromkeys(names)))  # type: ignore[arg-type]  # biases may be None


def _has_output_bias(problem: Problem) -> bool:
    return problem.parameters is not None and problem.parameters.b_o is not None


def _output_bias(problem: Problem) -> Any:
    return problem.parameters.b_o if problem.parameters is not None else 0.0


def _bias_of_each_head(answer: Answer, problem: Problem) -> Answer:
    return Answer(answer.y + (problem.sizes["h"] - 1) * _output_bias(problem), answer.weights)


def packing_faults() -> Iterator[Fault]:
    """Faults in how a fused projection is taken apart."""
    for parts, word in (("qkv", "three"), ("kv", "two")):
        for stored, read in permutations([" ".join(order) for order in permutations((word, "h", "d"))], 2):
            yield Fault(
                "qkv_pack_order", f"the fused projection of {', '.join(parts)}, stored as ({stored}), is split as ({read})",
                change=lambda p, s=stored, r=read, w=word, of=parts: _repack(p, s, r, w, of),
                rank=_pack_rank(stored, read), applies=is_layer,
            )  # fmt: skip
        for order in list(permutations(parts))[1:]:
            roles = "qkv".replace(parts, "".join(order))
            text = f"the fused projection of {', '.join(parts)} is split in the order {', '.join(order)}"
            yield Fault("qkv_pack_order", text, change=lambda p, r=roles: _of_weights(p, r, biases=True), rank=3, applies=is_layer)


def _pack_rank(stored: str, read: str) -> int:
    usual = ("three h d", "h three d", "two h d", "h two d")
    return 3 - (stored in usual) - (read in usual)


def _repack(problem: Problem, stored: str, read: str, word: str, parts: str) -> Problem | None:
    parameters = problem.parameters
    if parameters is None:
        return None
    found: dict[str, Any] = {}
    for letter in "wb":
        arrays = [getattr(parameters, f"{letter}_{part}") for part in parts]
        if any(array is None or array.shape != arrays[0].shape for array in arrays):
            if letter == "b" and all(array is None for array in arrays):
                continue
            return None
        tail = " m" if letter == "w" else ""
        stacked = np.stack([rearrange(array, "h m d -> h d m") if letter == "w" else array for array in arrays])
        sizes = {word: len(parts), "h": arrays[0].shape[0], "d": arrays[0].shape[-1]}
        flat = rearrange(stacked, f"{word} h d{tail} -> ({stored}){tail}")
        opened = rearrange(flat, f"({read}){tail} -> {word} h d{tail}", **sizes)
        found |= {f"{letter}_{part}": rearrange(a, "h d m -> h m d") if letter == "w" else a for part, a in zip(parts, opened, strict=True)}
    return replace(problem, parameters=replace(parameters, **found))
