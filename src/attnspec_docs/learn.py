"""What the pages for learners show: the heads of a real model, budgets, and masks."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

import attnspec
from attnspec.heads.figures import heatmap, mask_grid
from attnspec.heads.habits import habit, place_name
from attnspec.heads.replay import Replay, replay
from attnspec.heads.run import Run
from attnspec.heads.shipped import shipped

from .blocks import block
from .writing import figure, table

_WORD = "sat"


@cache
def _real() -> tuple[Run, dict[int, Replay]]:
    run = shipped()
    return run, {layer.index: replay(layer) for layer in run.layers}


def _head(name: str) -> tuple[Replay, int]:
    """A head by `layer.head`."""
    layer, _, head = name.partition(".")
    return _real()[1][int(layer)], int(head)


@block
def head(name: str) -> str:
    """All weights of a real head: `[[head 0.2]]`."""
    run, (replayed, number) = _real()[0], _head(name)
    weights = replayed.weights[number]
    caption = f"Layer {replayed.layer.index}, head {number}. Most words look at: {habit(weights, replayed.keep[number], run.tokens)}."
    title = f"Head {name}: each word (row) shares its attention among the words"
    return figure(heatmap(weights, run.tokens, run.tokens, title=title), caption=caption)


@block
def looks(*names: str) -> str:
    """What one word looks at in several heads, and how much they would spend together: `[[looks 5.11 5.3]]`."""
    run, found = _real()[0], [_head(name) for name in names]
    rows = np.array([replayed.weights[number, run.tokens.index(_WORD)] for replayed, number in found])
    habits = [f"in head {name} {habit(at.weights[i], at.keep[i], run.tokens)}" for name, (at, i) in zip(names, found, strict=True)]
    caption = (
        f"What “{_WORD}” looks at, head by head. The largest shares add up to {rows.max(axis=1).sum():.2f}: {len(names)} budgets were "
        f"spent, not one. Most words look at: {'; '.join(habits)}."
    )
    title = f"What {_WORD} looks at in heads {', '.join(names)}"
    return figure(heatmap(rows, [f"head {name}" for name in names], run.tokens, title=title), caption=caption)


@block
def one_softmax(layer: str, *wanted: str) -> str:
    """What one word looks at if all heads of a layer are merged into one, and what is left for some: `[[one_softmax 5 cat mat]]`."""
    run, replayed = _real()[0], _real()[1][int(layer)]
    queries, keys = ((np.concatenate(replayed.steps[step].result[0], axis=-1)[None, None]) for step in ("project_queries", "project_keys"))
    scores = attnspec.scale(attnspec.score(queries, keys), d_k=queries.shape[3])
    word = run.tokens.index(_WORD)
    rows = np.stack([attnspec.softmax(scores)[0, 0, word], replayed.weights[:, word].mean(axis=0)])
    left = rows[0, [run.tokens.index(name) for name in wanted]].sum()
    caption = (
        f"“{_WORD}” in layer {layer}: all its queries and keys compared at once, in one softmax; the mean of its heads. "
        f"In the one softmax, {' and '.join(f'“{name}”' for name in wanted)} together get {left:.3f}."
    )
    title = f"One softmax in the place of the heads of layer {layer}"
    return figure(heatmap(rows, ["one softmax", "mean"], run.tokens, title=title), caption=caption)


@block
def resting() -> str:
    """In how many heads most words look most at the first mark, and how little they find there."""
    run, layers = _real()
    mark = place_name(0, run.tokens)
    heads = [(at, head) for at in layers.values() for head in range(len(at.weights))]
    resting = [(at, head) for at, head in heads if habit(at.weights[head], at.keep[head], run.tokens).name == mark]
    lengths = [np.linalg.norm(at.steps["project_values"].result[0, head], axis=-1) for at, head in resting]
    most = max(found[0] / np.median(found[1:]) for found in lengths)
    return (
        f"In {len(resting)} of the {len(heads)} heads that come with attnspec, most words look most at `{run.tokens[0]}`. They find little "
        f"there: in each of these heads, the value there is at most {most:.2f} times as long as the median of the others"
    )


@block
def budget(**sizes: str) -> str:
    """The totals of many heads beside those of one head of full width: `[[budget d_model=512 h=8 batch=2 seq=6]]`."""
    given: dict[str, Any] = {name: int(size) for name, size in sizes.items()}
    at = {name: given.pop(name) for name in ("batch", "seq")}
    heads = attnspec.Heads(**given)
    many, one = (attnspec.ledger(layer, **at).totals() for layer in (heads, heads.merged()))
    rows = [(name.replace("_", "-"), f"{total:,}", f"{one[name]:,}", f"{total / one[name]:.3f}") for name, total in many.items()]
    return table(("", f"{heads.h} heads of width {heads.d_k}", f"1 head of width {heads.merged().d_k}", "ratio"), rows)


@block
def lost(layer: str) -> str:
    """How much of a word's output goes with each head: what the gates of the specification take away."""
    replayed = _real()[1][int(layer)]
    word = _real()[0].tokens.index(_WORD)
    parameters, x = replayed.layer.parameters, replayed.layer.x
    if parameters is None or x is None:
        raise ValueError(f"[[lost {layer}]]: this layer has no parameters.")
    h = len(replayed.weights)
    whole = attnspec.multi_head_attention(x, parameters)[0, word]
    without = [
        attnspec.multi_head_attention(x, replace(parameters, gates=1 - np.eye(h, dtype=x.dtype)[head]))[0, word] for head in range(h)
    ]
    shares = np.array([np.linalg.norm(whole - rest) / np.linalg.norm(whole) for rest in without])
    caption = (
        f"How far the output of “{_WORD}” moves when one head of layer {layer} is switched off, as a share of its length. "
        "These shares do not add up to 1: what heads write may cancel."
    )
    names = [f"{layer}.{head}" for head in range(h)]
    return figure(heatmap(shares[None], ["moves by"], names, title=f"What the output of layer {layer} loses"), caption=caption)


_TOKENS = ("the", "cat", "sat", "on", "the", "mat")
_PADDED = ("the", "cat", "sat", "on", "[PAD]", "[PAD]")


@block
def mask_picture(kind: str) -> str:
    """A mask on six words, worked out by the steps that make masks: `[[mask_picture causal]]`."""
    keys = np.zeros((1, 1, len(_TOKENS), 1))
    places, last = attnspec.count_positions(keys), attnspec.count_positions(keys[:, :, :2], len(_TOKENS) - 2)
    causal, real = attnspec.keep_causal(places, places), attnspec.keep_lengths(keys, np.array([_PADDED.index("[PAD]")]))
    documents = np.array([[0, 0, 0, 1, 1, 1]])
    masks = {
        "causal": (causal, _TOKENS),
        "decoding": (attnspec.keep_causal(last, places), _TOKENS),
        "window": (attnspec.keep_window(places, places, left=1, right=1), _TOKENS),
        "padding": (real, _PADDED),
        "causal and padding": (attnspec.keep_both(causal, real), _PADDED),
        "documents": (attnspec.keep_documents(documents, documents), _TOKENS),
    }
    keep, words = masks[kind]
    queries = last.shape[1] if kind == "decoding" else len(words)
    shown = np.broadcast_to(keep, (1, 1, queries, len(words)))[0, 0]
    return figure(mask_grid(shown, words[-queries:], words, title=f"Mask: {kind}"))
