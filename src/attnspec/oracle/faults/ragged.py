"""Faults of packed documents and padding."""

from collections.abc import Iterator

import numpy as np

from ..problem import Answer, Array, Problem
from .fault import Fault, asks


def ragged_faults() -> Iterator[Fault]:
    """Faults of packed documents."""
    kind, packed = "ragged_packing", asks("cumulative")
    for text, move in (
        ("each document begins one token too early", lambda c: np.concatenate([c[:1], c[1:-1] - 1, c[-1:]])),
        ("each document begins one token too late", lambda c: np.concatenate([c[:1], c[1:-1] + 1, c[-1:]])),
        ("the last document is forgotten: it is one with that before", lambda c: np.delete(c, -2) if len(c) > 2 else c),
        ("the first document is one with that behind it", lambda c: np.delete(c, 1) if len(c) > 2 else c),
    ):
        yield Fault(kind, text, change=lambda p, f=move: p.change(cumulative=f(p.options["cumulative"])), applies=packed)
    text = "the samples behind the first get zeros, as if they had no keys"
    yield Fault(kind, text, after=_only_first, applies=lambda p: p.sizes["batch"] > 1)
    text = "the documents of the first sample are used for all"
    yield Fault(kind, text, change=_first_documents, applies=asks("documents"))
    padded = asks("padding", "lengths")
    yield Fault(kind, "queries are thrown out by the padding of the keys, and come back as zeros", after=_unpadded, applies=padded)
    text = "queries at the end are thrown out by the padding of the keys, and come back as zeros"
    yield Fault(kind, text, after=_unpadded_end, applies=padded)


def _first_documents(problem: Problem) -> Problem:
    documents = problem.options["documents"]
    return problem.change(documents=documents * 0 + documents[:1])


def _only_first(answer: Answer, problem: Problem) -> Answer:
    kept = (np.arange(len(answer.y)) == 0).reshape(-1, *[1] * (answer.y.ndim - 1))
    nothing = problem.parameters.b_o if problem.parameters is not None and problem.parameters.b_o is not None else 0.0
    return Answer(np.where(kept, answer.y, nothing), answer.weights)


def _real(problem: Problem) -> Array:
    if "padding" in problem.options:
        return np.asarray(problem.options["padding"])
    return np.asarray(problem.options["lengths"])[:, None] > np.arange(problem.sizes["seq_k"])


def _zeroed(answer: Answer, problem: Problem, rows: Array) -> Answer:
    shape = rows[:, :, None] if problem.is_layer else rows[:, None, :, None]
    return Answer(np.where(shape, answer.y, 0.0), answer.weights)


def _unpadded(answer: Answer, problem: Problem) -> Answer:
    seq_q, real = problem.sizes["seq_q"], _real(problem)
    rows = np.zeros((len(real), seq_q), bool)
    rows[:, : min(seq_q, real.shape[1])] = real[:, :seq_q]
    return _zeroed(answer, problem, rows)


def _unpadded_end(answer: Answer, problem: Problem) -> Answer:
    seq_q, real = problem.sizes["seq_q"], _real(problem)
    return _zeroed(answer, problem, real[:, -seq_q:]) if real.shape[1] >= seq_q else answer
