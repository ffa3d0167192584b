"""Faults in how heads are split, merged and told apart."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from einops import rearrange

from ...spec.fan_in import concatenate, mix
from ...spec.fan_out import project_keys, project_queries, project_values
from ..problem import Answer, Array, Problem
from .fault import Fault

PROJECTIONS = ("project_queries", "project_keys", "project_values")


def is_layer(problem: Problem, /) -> bool:
    """Tell whether a problem asks for a whole layer."""
    return problem.is_layer


def _has_heads(problem: Problem) -> bool:
    return problem.sizes["h"] > 1


def projected(change: Callable[..., Any]) -> Callable[[Problem], dict[str, Any]]:
    """Do something to what projections give."""
    return lambda _: {name: lambda step, *arrays, **options: change(step(*arrays, **options)) for name in PROJECTIONS}


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
        queries, keys, values = (np.swapaxes(x, first, second) for x in (problem.queries, problem.keys, problem.values))
        if queries.shape[:-2] != keys.shape[:-2]:
            return None
        swapped = replace(problem, queries=queries, keys=keys, values=values, options=_without_masks(problem))
        return Answer(swapped.run().y.swapaxes(first, second))

    return answer


def _without_masks(problem: Problem) -> dict[str, Any]:
    lost = ("keep", "padding", "lengths", "bias", "documents", "survivors", "return_weights", "dropout", "positions")
    return {name: value for name, value in problem.options.items() if name not in lost}


def _over_heads(problem: Problem) -> Answer | None:
    """Let each token of a layer attend over its own heads."""
    parameters = problem.parameters
    if parameters is None or parameters.heads.h != parameters.heads.h_kv:
        return None
    queries = project_queries(problem.queries, parameters.w_q, parameters.b_q)
    keys = project_keys(problem.keys, parameters.w_k, parameters.b_k)
    values = project_values(problem.values, parameters.w_v, parameters.b_v)
    heads = replace(problem, queries=queries, keys=keys, values=values, parameters=None)
    found = _swapped(1, 2)(heads)
    return None if found is None else Answer(mix(concatenate(found.y), parameters.w_o, parameters.b_o))


def _joint_softmax(_: Any, scores: Array, *__: Any, **___: Any) -> Any:
    shares = np.exp(scores - scores.max(axis=(1, 3), keepdims=True))
    return shares / shares.sum(axis=(1, 3), keepdims=True)


def _one_map(factor: Callable[..., float]) -> Callable[[Problem], dict[str, Any]]:
    """Compare over the full width: one map of scores for all heads."""

    def steps(problem: Problem) -> dict[str, Any]:
        def score(step: Any, queries: Array, keys: Array, **options: Any) -> Any:
            found = step(queries, keys, **options)
            return np.broadcast_to(found.sum(1, keepdims=True), found.shape)

        return {"score": score, "scale": lambda _, scores, **__: scores * factor(problem)}

    return steps


def layout_faults() -> Iterator[Fault]:
    """Faults in how heads are split, merged and told apart."""
    kind = "head_split_merge_order"
    text = "the heads are cut from the sequence, not from the width: the axes are not swapped before the split"
    yield Fault(kind, text, steps=projected(_viewed), applies=_has_order)
    text = "the heads are joined without swapping their axis with that of the sequence"
    yield Fault(kind, text, steps=lambda _: {"concatenate": _merged_as_view}, applies=_has_order)
    text = "the heads are cut from the sequence and joined likewise: the axes are swapped on neither side"
    yield Fault(kind, text, steps=lambda p: {**projected(_viewed)(p), "concatenate": _merged_as_view}, applies=_has_order)
    yield Fault(
        kind, "what a head found is read with its two axes exchanged: it is reshaped where it should be transposed",
        steps=_blended(_untransposed), applies=is_layer,
    )  # fmt: skip
    yield Fault(kind, "head i takes every h-th channel, not a block of its own", steps=projected(_interleaved), applies=_has_order, rank=2)
    text = "the heads are joined channel by channel, not block by block"
    yield Fault(kind, text, steps=lambda _: {"concatenate": _merged_interleaved}, applies=_has_order)
    yield Fault(
        kind, "head i takes every h-th channel, on the way in and out",
        steps=lambda p: {**projected(_interleaved)(p), "concatenate": _merged_interleaved}, applies=_has_order,
    )  # fmt: skip
    yield from _axis_faults()


def _has_order(problem: Problem) -> bool:
    return problem.is_layer and _has_heads(problem) and problem.sizes["seq_k"] > 1


def _has_several(problem: Problem) -> bool:
    return _has_heads(problem) and problem.sizes["batch"] > 1


def _axis_faults() -> Iterator[Fault]:
    """Samples, heads and tokens are taken for each other, or heads are not told apart."""
    for name, change in (("samples first is read as heads first", _head_major), ("heads first is read as samples first", _head_major_back)):
        text = f"where samples and heads are flattened into one axis, {name}"
        yield Fault("batch_axis_mixup", text + ", behind the heads", steps=_after_heads(change), applies=_has_several)
        yield Fault("batch_axis_mixup", text + ", before the heads", steps=projected(change), applies=_has_several)
    yield Fault("batch_axis_mixup", "it attends along the batch, sample to sample, not along the sequence", answer=_across_batch)
    text = "each token attends over its own heads: heads and sequence are exchanged"
    yield Fault("head_seq_axis_swap", text, answer=_swapped(1, 2), applies=lambda p: not p.is_layer)
    yield Fault("head_seq_axis_swap", text, answer=_over_heads, applies=lambda p: p.is_layer and p.sizes["seq_q"] == p.sizes["seq_k"])
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
