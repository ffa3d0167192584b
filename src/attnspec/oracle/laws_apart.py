"""Laws on what is independent of what: samples, heads, queries, and the order of keys."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from .bench import MASKS, Bench, Failure, changed, full_rows, part_of, separate, size_of, told
from .problem import Array, Problem

_OF_SAMPLES = {
    **dict.fromkeys(("keep", "padding", "lengths"), "mask_batch_head_tiling"),
    "bias": "additive_position_bias",
    "documents": "ragged_packing",
    "positions": "rope_position",
}
"""The options that differ between samples, and the kind of fault where a sample has those of another."""

_OF_HEADS = {
    "keep": "mask_batch_head_tiling",
    "bias": "additive_position_bias",
    "slopes": "additive_position_bias",
    "sinks": "softmax_denominator",
    "gates": "head_mask_prune",
}
"""The options that differ between heads, likewise."""


def renewed(bench: Bench, inputs: tuple[str, ...], problem: Problem, index: Any, /) -> Problem:
    """Draw a part of some inputs anew."""

    def new(array: Array) -> Array:
        array[index] += 2 * bench.rng.normal(size=array[index].shape)
        return array

    return changed(problem, inputs, new)


def separate_samples(bench: Bench) -> Iterator[Failure]:
    """Change one sample, then one sample's mask."""
    for name in ("", *(name for name in bench.profile.options if name not in ("gates", "survivors", "offset"))):
        problem = bench.draw(*([name] if name else []))
        if problem is None or problem.sizes["batch"] == 1:
            continue
        base, kept = bench.ask(problem), full_rows(problem)
        moved = bench.moved(bench.ask(renewed(bench, ("queries", "keys", "values"), problem, 0)), base)
        if (moved & kept)[1:].any():
            yield Failure("batch_axis_mixup", "A change of one sample changes another", told(problem))
        if name in _OF_SAMPLES:
            yield from _own_option(bench, problem, base, name)


def _own_option(bench: Bench, problem: Problem, base: Array, name: str) -> Iterator[Failure]:
    other = bench.draw(name, again=10) or problem
    mine, its = problem.options[name], other.options[name]
    if len(mine) == 1 or its.shape != mine.shape:
        return
    exchanged = problem.change(**{name: np.concatenate([its[:1], mine[1:]])})
    kept = full_rows(problem) & full_rows(exchanged)
    if (bench.moved(bench.ask(exchanged), base) & kept)[1:].any():
        yield Failure(_OF_SAMPLES[name], f"The {name} of one sample changes the output of another", told(problem))


def separate_heads(bench: Bench) -> Iterator[Failure]:
    """Change one head's queries, keys or values, then what else differs between heads."""
    problem = bench.draw(tokens=("square", "wide", "tall"))
    if problem is None:
        return
    base, sizes = bench.ask(problem), problem.sizes
    group = sizes["h"] // sizes["h_kv"]
    for given in ("queries", "keys", "values"):
        moved = bench.moved(bench.ask(renewed(bench, (given,), problem, np.s_[:, 0])), base).any((0, 2))
        heads = np.arange(sizes["h"])
        mine = heads % sizes["h_kv"] if problem.policy.grouping == "strided" else heads // group
        expected = (heads if given == "queries" else mine) == 0
        if not np.array_equal(moved, expected):
            yield _mixed_heads(bench, problem, base, given, moved & ~expected)
            return
    for name, kind in _OF_HEADS.items():
        yield from _own_of_head(bench, name, kind)


def _mixed_heads(bench: Bench, problem: Problem, base: Array, given: str, wrong: Array) -> Failure:
    if given != "queries" and problem.sizes["h_kv"] < problem.sizes["h"]:
        return Failure("gqa_head_mapping", f"Query heads read the {given} of other key/value heads than declared", told(problem))
    if not wrong.any():
        return Failure("operand_routing", f"The {given} of a head have no influence on its output", told(problem))
    sentence = f"A change of the {given} of head 0 changes head {', '.join(map(str, np.flatnonzero(wrong)))}"
    rows = bench.moved(bench.ask(renewed(bench, ("values",), problem, np.s_[:, 0, 0])), base).any((0, 1))
    if problem.sizes["seq_q"] == problem.sizes["seq_k"] and np.array_equal(np.flatnonzero(rows), [0]):
        return Failure("head_seq_axis_swap", f"{sentence}, but only in the row of the token itself: heads attend to heads", told(problem))
    return Failure("heads_not_separated", sentence, told(problem))


def _own_of_head(bench: Bench, name: str, kind: str) -> Iterator[Failure]:
    problem, other = bench.draw(name), bench.draw(name, again=10)
    if problem is None or other is None:
        return
    mine, its = (np.moveaxis(p.options[name], 1, 0) if p.options[name].ndim > 1 else p.options[name] for p in (problem, other))
    if len(mine) == 1 or mine.shape != its.shape:
        return
    mixed = np.concatenate([its[:1] + (0.5 if its.dtype == np.float64 else False), mine[1:]])
    exchanged = problem.change(**{name: np.moveaxis(mixed, 0, 1) if mixed.ndim > 1 else mixed})
    moved = bench.moved(bench.ask(exchanged), bench.ask(problem)) & full_rows(problem) & full_rows(exchanged)
    if moved[:, 1:].any():
        yield Failure(kind, f"The {name} of head 0 changes other heads", told(problem))


def separate_queries(bench: Bench) -> Iterator[Failure]:
    """Change one query: its row moves, and no other."""
    for name in ("", *(name for name in bench.profile.options if name not in ("gates", "survivors", "offset"))):
        problem = bench.draw(*([name] if name else []), tokens=("wide", "tall", "square"))
        if problem is None or not separate(problem, "queries"):
            continue
        last = problem.sizes["seq_q"] - 1
        moved = bench.moved(bench.ask(renewed(bench, ("queries",), problem, np.s_[..., last, :])), bench.ask(problem))
        others = (moved & full_rows(problem))[..., :last]
        if others.any():
            whole = others.all() and moved[..., last].all()
            kind = "softmax_wrong_axis" if whole else "head_split_merge_order"
            yield Failure(kind, "A change of one query changes the output of another", told(problem))


def separate_chunks(bench: Bench) -> Iterator[Failure]:
    """Put the queries in two calls."""
    placed = bench.profile.policy.rotation is not None or bench.profile.policy.window != (None, None)
    asked: list[tuple[str, ...]] = [(), *((name,) for name in ("keep", "padding", "lengths", "bias", "slopes", "window", "causal"))]
    asked += [("causal", "offset"), ("keep", "causal")]
    for names in asked:
        problem = bench.draw(*names, tokens=("wide", "tall", "square"))
        if problem is None or not separate(problem, "queries"):
            continue
        first, rest = np.split(np.arange(problem.sizes["seq_q"]), [2])
        by_place = placed or problem.is_causal or bool({"slopes", "window"} & set(names))
        parts = [first, rest]
        if by_place and not bench.has("offset"):
            parts = [first] if problem.policy.causal_anchor == "top_left" else []
        base = bench.ask(problem)
        start = problem.options.get("offset", 0) if problem.policy.causal_anchor == "top_left" or "offset" in problem.options else (
            problem.sizes["seq_k"] - problem.sizes["seq_q"]
        )  # fmt: skip
        for part in parts:
            chunk = part_of(problem, "seq_q", part)
            if by_place and bench.has("offset") and problem.is_causal:
                chunk = chunk.change(offset=int(start + part[0]))
            elif by_place and part[0]:
                continue
            off = bench.moved(bench.ask(chunk), base[..., part, :]) & full_rows(problem)[..., part]
            if off.any():
                kind = "causal_alignment" if problem.is_causal else "softmax_wrong_axis"
                yield Failure(kind, "Some queries alone get another answer than in one call with the others", told(problem))
                break


def any_order_of_keys(bench: Bench) -> Iterator[Failure]:
    """Put the keys and what belongs to them in another order."""
    policy = bench.profile.policy
    if bench.profile.causal or policy.rotation is not None or policy.window != (None, None):
        return
    for name in ("", *(name for name in ("keep", "padding", "bias", "scale", "softcap", "sinks") if bench.has(name))):
        problem = bench.draw(*([name] if name else []))
        if problem is None:
            continue
        order = bench.rng.permutation(problem.sizes["seq_k"])
        if np.array_equal(order, np.sort(order)):
            order = order[::-1]
        permuted, base = part_of(problem, "seq_k", order), bench.ask(problem)
        if problem.queries is problem.keys:
            permuted = replace(part_of(problem, "seq_q", order), options=part_of(permuted, "seq_q", order).options)
            base = base[..., order, :]
        rows = full_rows(permuted)
        if (bench.moved(bench.ask(permuted), base) & rows).any():
            kind = "mask_wrong_axis" if name in MASKS else "order_of_keys"
            yield Failure(kind, "The order of the keys matters, though nothing says where they stand", told(problem))


def ignore_more_samples(bench: Bench) -> Iterator[Failure]:
    """Leave a sample out."""
    for name in ("", *(name for name in bench.profile.options if name != "cumulative")):
        problem = bench.draw(*([name] if name else []))
        if problem is None or problem.sizes["batch"] == 1:
            continue
        fewer = part_of(problem, "batch", np.arange(problem.sizes["batch"] - 1))
        off = bench.moved(bench.ask(fewer), bench.ask(problem)[:-1]) & full_rows(problem)[:-1]
        if off.any():
            yield Failure("batch_axis_mixup", "One more sample in the batch changes the others", told(problem))


def linear_in_values(bench: Bench) -> Iterator[Failure]:
    """Blend two sets of values."""
    for name in ("", *(name for name in bench.profile.options if name != "survivors")):
        problem = bench.draw(*([name] if name else []))
        if problem is None or not separate(problem, "values"):
            continue
        other = renewed(bench, ("values",), problem, np.s_[:])
        a, b = (0.5, 0.5) if problem.is_layer else (1.5, -0.75)  # a layer adds its biases once
        blended = replace(problem, values=a * problem.values + b * other.values)
        wanted = a * bench.ask(problem) + b * bench.ask(other)
        if (bench.moved(bench.ask(blended), wanted) & full_rows(problem)).any():
            yield Failure("operand_routing", "The output is not linear in the values: they are not only blended", told(problem))


def constant_values(bench: Bench) -> Iterator[Failure]:
    """Give every token the same value: every blend of them is that value."""
    without = ("sinks", "gates", "survivors")
    for name in ("", *(name for name in bench.profile.options if name not in without)):
        problem = bench.draw(*([name] if name else []))
        if problem is None or not separate(problem, "values"):
            continue
        parameters = problem.parameters
        if parameters is not None and any(extra is not None for extra in (parameters.extra_v, parameters.sinks)):
            return
        values = np.broadcast_to(problem.values[:1, ..., :1, :], problem.values.shape).copy()
        if not problem.is_layer:
            values = np.broadcast_to(values[:, :1], values.shape).copy()
        constant = replace(problem, values=values)
        rows, y = full_rows(problem), bench.ask(constant)
        wanted = np.broadcast_to(y[rows][0] if problem.is_layer else values[0, 0, 0], y.shape)
        if (bench.moved(y, wanted) & rows).any():
            yield _unnormalised(bench, constant, y, wanted)
            return


def _unnormalised(bench: Bench, problem: Problem, y: Array, wanted: Array) -> Failure:
    """Say what the weights of a row add up to, if not to one."""
    sums = y / wanted
    if problem.is_layer:
        return Failure("softmax_denominator", "The weights of a row do not add up to one", told(problem))
    if np.ptp(sums) < bench.rounding * size_of(sums):
        sentence = f"The weights of every row add up to {sums.flat[0]:.6g}, not to one"
        return Failure("scale_wrong_place", sentence, told(problem))
    by_query = sums[..., 0].sum(-1)
    if np.allclose(by_query, problem.sizes["seq_k"]):
        return Failure("softmax_wrong_axis", "The weights of a key add up to one, not those of a query", told(problem))
    masked = bool(set(MASKS) & set(problem.options)) or problem.is_causal
    kind = "mask_after_softmax" if masked else "softmax_denominator"
    spread = f"from {sums.min():.3g} to {sums.max():.3g}"
    return Failure(kind, f"The weights of a row add up to something {spread}, not to one", told(problem))
