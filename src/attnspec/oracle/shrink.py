"""The smallest counterexample: a failing problem made smaller as long as it fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..errors import AttnspecError
from .problem import Array, Crash, Problem
from .report import Counterexample
from .snippet import snippet
from .subject import Store, Subject
from .verdict import Verdict, answered, ask

_OF_OPTIONS = {
    **dict.fromkeys(("keep", "bias", "survivors"), ("batch", "h", "seq_q", "seq_k")),
    **dict.fromkeys(("padding", "documents", "positions"), ("batch", "seq_k")),
    "lengths": ("batch",),
    **dict.fromkeys(("sinks", "slopes", "gates"), ("h",)),
}
_CORE = {"queries": ("batch", "h", "seq_q", "d_k"), "keys": ("batch", "h_kv", "seq_k", "d_k"), "values": ("batch", "h_kv", "seq_k", "d_v")}
_LAYER = {"queries": ("batch", "seq_q", ""), "keys": ("batch", "seq_k", ""), "values": ("batch", "seq_k", "")}
_SQUARE = {"positions", "documents", "cumulative"}


def cut(problem: Problem, axis: str, size: int, /) -> Problem:
    """Keep the first elements of an axis, wherever it occurs."""
    axes = _LAYER if problem.is_layer else _CORE
    known: dict[int, Array] = {}

    def of(array: Any, names: tuple[str, ...]) -> Any:
        index = tuple(slice(size) if name == axis and length > 1 else slice(None) for name, length in zip(names, array.shape, strict=True))
        return known.setdefault(id(array), array[index].copy())

    sources = {name: of(getattr(problem, name), names) for name, names in axes.items()}
    options = {n: of(value, _OF_OPTIONS[n]) if n in _OF_OPTIONS else value for n, value in problem.options.items()}
    if axis == "seq_k" and "lengths" in options:
        options["lengths"] = np.minimum(options["lengths"], size)
    if axis == "seq_k" and "cumulative" in options:
        options["cumulative"] = np.unique(np.minimum(options["cumulative"], size))
    return replace(problem, **sources, options=options)


def smaller(problem: Problem, /) -> Iterator[Problem]:
    """Yield problems that are smaller in one respect."""
    for name in problem.options:
        if name != "dropout":
            yield problem.change(**{name: None}, **({"dropout": None} if name == "survivors" else {}))
    sizes = problem.sizes
    square = problem.keys is problem.queries or bool(_SQUARE & set(problem.options))
    axes = ["batch", "seq_k", "seq_q", *(() if problem.is_layer else ("d_v", "d_k", "h"))]
    for axis in axes:
        least = 2 if axis == "d_k" and problem.policy.rotation is not None else 1
        for size in dict.fromkeys((least, sizes[axis] // 2, sizes[axis] - 1)):
            if least <= size < sizes[axis]:
                yield from _cuts(problem, axis, size, square=square)
    yield from (_simpler(problem, partial(_rounded, digits)) for digits in (0, 1, 2))


def _rounded(digits: int, x: Array) -> Array:
    found: Array = np.round(x, digits)
    return found


def _cuts(problem: Problem, axis: str, size: int, *, square: bool) -> Iterator[Problem]:
    if axis == "h":
        if problem.sizes["h"] == problem.sizes["h_kv"]:
            yield cut(cut(problem, "h", size), "h_kv", size)
    elif square and axis.startswith("seq"):
        if axis == "seq_k":
            yield cut(cut(problem, "seq_k", size), "seq_q", size)
    else:
        yield cut(problem, axis, size)


def _simpler(problem: Problem, change: Callable[[Array], Array]) -> Problem:
    known: dict[int, Array] = {}

    def of(x: Any) -> Any:
        return known.setdefault(id(x), change(x)) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x

    parameters = None if problem.parameters is None else problem.parameters.map(of)
    sources = {name: of(getattr(problem, name)) for name in ("queries", "keys", "values")}
    options = {name: of(value) if name != "gates" else value for name, value in problem.options.items()}
    return replace(problem, **sources, parameters=parameters, options=options)


def shrink(verdict: Verdict, fails: Callable[[Problem], Verdict | None], /, *, tries: int = 300) -> Verdict:
    """Make a failing problem smaller as long as it fails.

    Args:
        verdict: the verdict on it.
        fails: gives the verdict on a problem if it fails in the same way, else None.
        tries: how many problems to try.

    Returns:
        The verdict on the smallest problem found.
    """
    found = True
    while found and tries > 0:
        found = False
        for problem in smaller(verdict.question.problem):
            tries -= 1
            if same(problem, verdict.question.problem) or tries < 0:
                continue
            try:
                other = fails(problem)
            except (AttnspecError, ValueError, IndexError, KeyError):
                continue
            if other is not None:
                verdict, found = other, True
                break
    return verdict


def same(problem: Problem, other: Problem, /) -> bool:
    """Tell whether two problems are the same."""
    if problem.options.keys() != other.options.keys() or problem.sizes != other.sizes:
        return False
    mine, its = (vars(p.parameters) if p.parameters is not None else {} for p in (problem, other))
    arrays = [(mine[name], its[name]) for name in mine] + [(getattr(problem, n), getattr(other, n)) for n in ("queries", "keys", "values")]
    return all(a is b or np.array_equal(a, b) for a, b in arrays)


def recipe_of(problem: Problem, store: Store, /) -> tuple[Problem, dict[str, str]]:
    """Draw the tensors of an implementation anew, each by one line of NumPy that can be written down."""
    recipes: dict[str, str] = {}

    def drawn(name: str, shape: tuple[int, ...]) -> Array:
        seed = len(recipes)
        recipes[name] = f"np.random.default_rng({seed}).normal(size={shape}).round(1)"
        return np.random.default_rng(seed).normal(size=shape).round(1)

    return replace(problem, parameters=store.redrawn(problem.parameters, drawn)), recipes


def counterexample(subject: Subject, verdict: Verdict, /) -> Counterexample:
    """Find the smallest problem that fails as this one does, and say it as code."""
    precision, roundings, crashed = verdict.question.precision, verdict.question.roundings, isinstance(verdict.answer, Crash)

    def fails(problem: Problem) -> Verdict | None:
        other = answered(subject, ask(problem, precision=precision, roundings=roundings))
        return other if other.status == "wrong" and isinstance(other.answer, Crash) == crashed else None

    found = shrink(verdict, fails)
    recipes: dict[str, str] = {}
    if subject.load is not None and found.question.problem.parameters is not None:
        drawn, recipes = recipe_of(found.question.problem, subject.load)
        again = fails(drawn)
        found, recipes = (again, recipes) if again is not None else (found, {})
    question, answer = found.question, found.answer
    got = found.reason if isinstance(answer, Crash) or answer.y.shape != question.expected.y.shape else answer.y
    return Counterexample(question.problem, precision, question.expected.y, got, question.limit, snippet(subject, found, recipes))
