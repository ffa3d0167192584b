"""Faults of layout, projection and grouping."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import numpy as np
from einops import rearrange

from ..problem import Answer, Array, Problem
from .fault import Fault, asks

RULES_ON_KEYS = ("keep", "padding", "lengths", "documents", "cumulative", "survivors", "slopes")
PROJECTIONS = ("project_queries", "project_keys", "project_values")


def _is_layer(problem: Problem) -> bool:
    return problem.is_layer


def _has_heads(problem: Problem) -> bool:
    return problem.sizes["h"] > 1


def _projected(change: Callable[[Array], Array], names: tuple[str, ...] = PROJECTIONS) -> Callable[[Problem], dict[str, Any]]:
    """Do something to what projections give."""
    return lambda _: {name: lambda step, *arrays, **options: change(step(*arrays, **options)) for name in names}


def _blended(change: Callable[[Array], Array]) -> Callable[[Problem], dict[str, Any]]:
    return lambda _: {"concatenate": lambda step, blended: step(change(blended))}


def _viewed(heads: Array) -> Array:
    """Cut heads from time instead of from width."""
    batch, h, seq, d = heads.shape
    return rearrange(heads, "b h s d -> b s (h d)").reshape(batch, h, seq, d)


def _interleaved(heads: Array) -> Array:
    return rearrange(rearrange(heads, "b h s d -> b s (h d)"), "b s (d h) -> b h s d", h=heads.shape[1])


def _merged_as_view(_: Any, blended: Array) -> Array:
    batch, h, seq, d = blended.shape
    return np.ascontiguousarray(blended).reshape(batch, seq, h * d)


def _merged_interleaved(_: Any, blended: Array) -> Array:
    return rearrange(blended, "b h s d -> b s (d h)")


def _untransposed(blended: Array) -> Array:
    batch, h, seq, d = blended.shape
    return np.ascontiguousarray(blended).reshape(batch, h, d, seq).swapaxes(2, 3)


def _head_major(heads: Array) -> Array:
    """Read what was flattened sample by sample as if it had been flattened head by head."""
    batch, h = heads.shape[:2]
    return heads.reshape(batch * h, *heads.shape[2:]).reshape(h, batch, *heads.shape[2:]).swapaxes(0, 1)


def _head_major_back(heads: Array) -> Array:
    batch, h = heads.shape[:2]
    return heads.swapaxes(0, 1).reshape(batch, h, *heads.shape[2:])


def _swapped(first: int, second: int) -> Callable[[Problem], Answer | None]:
    """Attend along another axis: exchange it with that of the tokens, and back at the end."""

    def answer(problem: Problem) -> Answer | None:
        if problem.is_layer and first == 1:
            return None
        sources = (np.swapaxes(getattr(problem, name), first, second) for name in ("queries", "keys", "values"))
        queries, keys, values = sources
        if queries.shape[:-2] != keys.shape[:-2]:
            return None
        swapped = replace(problem, queries=queries, keys=keys, values=values, options=_without_masks(problem))
        return Answer(swapped.run().y.swapaxes(first, second))

    return answer


def _without_masks(problem: Problem) -> dict[str, Any]:
    lost = ("keep", "padding", "lengths", "bias", "documents", "survivors", "return_weights", "dropout", "positions")
    return {name: value for name, value in problem.options.items() if name not in lost}


def _over_heads(problem: Problem) -> dict[str, Any]:
    """Let each token attend over its own heads."""
    del problem
    return {
        **{name: lambda step, *arrays, **options: step(*arrays, **options).swapaxes(1, 2) for name in PROJECTIONS},
        "concatenate": lambda step, blended: step(blended.swapaxes(1, 2)),
    }


def _joint_softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Array:
    shares = np.exp(scores - scores.max(axis=(1, 3), keepdims=True))
    return shares / shares.sum(axis=(1, 3), keepdims=True)


def _one_map(factor: Callable[[Problem], float]) -> Callable[[Problem], dict[str, Any]]:
    """Compare over the full width: one map of scores for all heads."""

    def steps(problem: Problem) -> dict[str, Any]:
        def score(step: Any, queries: Array, keys: Array, **options: Any) -> Array:
            found = step(queries, keys, **options)
            return np.broadcast_to(found.sum(1, keepdims=True), found.shape)

        return {"score": score, "scale": lambda _, scores, **__: scores * factor(problem)}

    return steps


def layout_faults() -> Iterator[Fault]:
    """Faults in how heads are split, merged and told apart."""
    kind = "head_split_merge_order"
    split, merged = {"steps": _projected(_viewed)}, {"steps": lambda _: {"concatenate": _merged_as_view}}
    both = {"steps": lambda p: {**_projected(_viewed)(p), "concatenate": _merged_as_view}}
    layer = {"applies": lambda p: p.is_layer and _has_heads(p) and p.sizes["seq_k"] > 1}
    yield Fault(kind, "the heads are cut from the sequence, not from the width: the axes are not swapped before the split", **split, **layer)
    yield Fault(kind, "the heads are joined without swapping their axis with that of the sequence", **merged, **layer)
    yield Fault(kind, "the heads are cut from the sequence and joined likewise: the axes are swapped on neither side", **both, **layer)
    yield Fault(
        kind, "what a head found is read with its two axes exchanged: it is reshaped where it should be transposed",
        steps=_blended(_untransposed), applies=_is_layer,
    )  # fmt: skip
    yield Fault(kind, "head i takes every h-th channel, not a block of its own", steps=_projected(_interleaved), **layer, rank=2)
    yield Fault(kind, "the heads are joined channel by channel, not block by block", steps=lambda _: {"concatenate": _merged_interleaved}, **layer)
    yield Fault(
        kind, "head i takes every h-th channel, on the way in and out",
        steps=lambda p: {**_projected(_interleaved)(p), "concatenate": _merged_interleaved}, **layer,
    )  # fmt: skip
    several = {"applies": lambda p: _has_heads(p) and p.sizes["batch"] > 1}
    for name, change in (("samples first is read as heads first", _head_major), ("heads first is read as samples first", _head_major_back)):
        text = f"where samples and heads are flattened into one axis, {name}"
        yield Fault("batch_axis_mixup", text + ", behind the heads", steps=_after_heads(change), **several)
        yield Fault("batch_axis_mixup", text + ", before the heads", steps=_projected(change), **several)
    yield Fault("batch_axis_mixup", "it attends along the batch, sample to sample, not along the sequence", answer=_across_batch)
    text = "each token attends over its own heads: heads and sequence are exchanged"
    yield Fault("head_seq_axis_swap", text, answer=_swapped(1, 2), applies=lambda p: not p.is_layer)
    yield Fault("head_seq_axis_swap", text, steps=_over_heads, applies=lambda p: p.is_layer and p.sizes["seq_q"] == p.sizes["seq_k"])
    yield Fault("heads_not_separated", "one softmax runs over the keys of all heads together", steps=lambda _: {"softmax": _joint_softmax})
    for name, factor in (("1/sqrt(d_k)", "d_k"), ("1/sqrt(h * d_k)", "width"), ("1", "")):
        yield Fault(
            "heads_not_separated", f"all heads share one map of scores, taken over the full width and scaled by {name}",
            steps=_one_map(lambda p, factor=factor: _width(p, factor) ** -0.5), applies=_has_heads,
        )  # fmt: skip


def _after_heads(change: Callable[[Array], Array]) -> Callable[[Problem], dict[str, Any]]:
    return lambda _: {"blend": lambda step, *arrays, **options: change(step(*arrays, **options))}


def _width(problem: Problem, factor: str) -> int:
    return {"d_k": problem.sizes["d_k"], "width": problem.sizes["h"] * problem.sizes["d_k"], "": 1}[factor]


def _across_batch(problem: Problem) -> Answer | None:
    if problem.is_layer:
        return _swapped(0, 1)(problem)
    return _swapped(0, 2)(problem)


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
        where = {"applies": lambda p: p.keys is not p.queries or p.values is not p.keys}
        yield Fault(kind, f"the inputs are exchanged: {takes}", change=lambda p, o=operands: _of_operands(p, o), rank=rank, **where)
        for biases in (False, True):
            does = f"the projections{' and their biases' if biases else ''} are exchanged: the {takes.replace('taken from', 'projected as')}"
            yield Fault(kind, does, change=lambda p, t=text, b=biases: _of_weights(p, t, biases=b), rank=rank, applies=_is_layer)


_BIASES = [("b_q",), ("b_k",), ("b_v",), ("b_o",), ("b_q", "b_k"), ("b_k", "b_v"), ("b_q", "b_v"), ("b_q", "b_k", "b_v")]


def bias_faults() -> Iterator[Fault]:
    """Faults in the biases of projections, and activations that nobody asked for."""
    for names in [*_BIASES, ("b_q", "b_k", "b_v", "b_o")]:
        yield Fault(
            "projection_bias", f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} left out",
            change=lambda p, n=names: _drop(p, n), rank=len(names),
        )  # fmt: skip
    yield Fault("projection_bias", "b_o is added twice", after=lambda a, p: Answer(a.y + _output_bias(p), a.weights), applies=_has_output_bias)
    yield Fault("projection_bias", "b_o is added once for each head", after=_bias_of_each_head, applies=_has_output_bias)
    for name, activate in (("relu", lambda x: np.maximum(x, 0)), ("tanh", np.tanh), ("sigmoid", lambda x: 1 / (1 + np.exp(-x)))):
        inward = _projected(activate)
        both = {"steps": inward, "after": lambda a, _, f=activate: Answer(f(a.y), a.weights), "applies": _is_layer}
        yield Fault("activation", f"queries, keys and values go through {name}", steps=inward, applies=_is_layer)
        yield Fault("activation", f"queries, keys, values and the output go through {name}", **both)
        yield Fault("activation", f"the output goes through {name}", after=lambda a, _, f=activate: Answer(f(a.y), a.weights))


def _drop(problem: Problem, names: tuple[str, ...]) -> Problem | None:
    if problem.parameters is None or all(getattr(problem.parameters, name) is None for name in names):
        return None
    return replace(problem, parameters=replace(problem.parameters, **dict.fromkeys(names)))


def _has_output_bias(problem: Problem) -> bool:
    return problem.parameters is not None and problem.parameters.b_o is not None


def _output_bias(problem: Problem) -> Any:
    return problem.parameters.b_o if problem.parameters is not None else 0.0


def _bias_of_each_head(answer: Answer, problem: Problem) -> Answer:
    return Answer(answer.y + (problem.sizes["h"] - 1) * _output_bias(problem), answer.weights)


def packing_faults() -> Iterator[Fault]:
    """Faults in how a fused projection is taken apart."""
    for count, parts, word in ((3, "qkv", "three"), (2, "kv", "two")):
        for stored, read in permutations([" ".join(order) for order in permutations((word, "h", "d"))], 2):
            yield Fault(
                "qkv_pack_order", f"the fused projection of {', '.join(parts)}, stored as ({stored}), is split as ({read})",
                change=lambda p, s=stored, r=read, n=count, w=parts: _repack(p, s, r, n, w), rank=_pack_rank(stored, read), applies=_is_layer,
            )  # fmt: skip
        for order in permutations(parts):
            if "".join(order) != parts:
                yield Fault(
                    "qkv_pack_order", f"the fused projection of {', '.join(parts)} is split in the order {', '.join(order)}",
                    change=lambda p, o="".join(order), w=parts: _of_weights(p, "qkv".replace(w, o), biases=True), rank=3, applies=_is_layer,
                )  # fmt: skip


def _pack_rank(stored: str, read: str) -> int:
    usual = ("three h d", "h three d", "two h d", "h two d")
    return 3 - (stored in usual) - (read in usual)


def _repack(problem: Problem, stored: str, read: str, count: int, parts: str) -> Problem | None:
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
        word = {3: "three", 2: "two"}[count]
        tail = " m" if letter == "w" else ""
        stacked = np.stack([rearrange(array, "h m d -> h d m") if letter == "w" else array for array in arrays])
        sizes = {word: count, "h": arrays[0].shape[0], "d": arrays[0].shape[-1]}
        flat = rearrange(stacked, f"{word} h d{tail} -> ({stored}){tail}")
        opened = rearrange(flat, f"({read}){tail} -> {word} h d{tail}", **sizes)
        found |= {f"{letter}_{part}": rearrange(a, "h d m -> h m d") if letter == "w" else a for part, a in zip(parts, opened, strict=True)}
    return replace(problem, parameters=replace(parameters, **found))


def grouping_faults() -> Iterator[Fault]:
    """Faults in which key/value head a query head reads."""

    def grouped(problem: Problem) -> bool:
        return 1 < problem.sizes["h_kv"] < problem.sizes["h"]

    other = {"contiguous": "strided", "strided": "contiguous"}
    yield Fault(
        "gqa_head_mapping", "query head i reads key/value head i % h_kv, not i // group (or the other way round)",
        change=lambda p: replace(p, policy=replace(p.policy, grouping=other[p.policy.grouping])), applies=grouped,
        declare='policy=Policy(grouping="strided")',
    )  # fmt: skip
    for text, pick in (
        ("every query head reads the first key/value head", lambda i, h, h_kv: 0 * (i + h + h_kv)),
        ("the groups are read in reverse order", lambda i, h, h_kv: h_kv - 1 - i // (h // h_kv)),
        ("query head i reads key/value head min(i, h_kv - 1)", lambda i, h, h_kv: np.minimum(i, h_kv - 1) + 0 * h),
    ):
        yield Fault("gqa_head_mapping", text, steps=lambda p, f=pick: _picked(p, f), applies=grouped)
    for count in range(2, 17):
        for own_scale in (True, False):
            text = f"the width is cut into {count} heads, not into h: the number of heads is that of another time"
            change = {"change": lambda p, n=count, o=own_scale: _recut(p, n, own_scale=o)}
            yield Fault("head_mask_prune", text, **change, applies=_is_layer, rank=3)
    yield Fault("gqa_head_mapping", "keys and values are repeated along the sequence, not along the heads", change=_in_time, applies=grouped)
    keys_only = {"steps": lambda p: {"share_keys": _strided(p)}, "applies": grouped}
    yield Fault("gqa_head_mapping", "keys are shared by i % h_kv, but values by i // group", **keys_only)


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


def _picked(problem: Problem, pick: Callable[[Array, int, int], Array]) -> dict[str, Any]:
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


def structure_faults() -> list[Fault]:
    """All of these."""
    makers = (layout_faults, routing_faults, bias_faults, packing_faults, grouping_faults, head_faults)
    return [fault for maker in makers for fault in maker()]


