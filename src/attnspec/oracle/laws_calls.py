"""Laws on calls: what is given, what comes back, and what stays behind."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from .bench import Bench, Failure, changed, full_rows, shape_of, size_of, told
from .problem import Answer, Array, Crash, Problem

_CALLS = 200


def right_shape(bench: Bench) -> Iterator[Failure]:
    """Ask for each option by itself, with every number of queries and keys."""
    for name in ("", *bench.profile.options):
        for tokens in bench.profile.tokens:
            for word in bench.words(name) if name else [""]:
                problem = bench.draw(*([name] if name else []), tokens=(tokens,), word=word)
                for asked in [] if problem is None else [problem, *_shorter(problem)]:
                    found = bench.answer(asked)
                    if isinstance(found, Crash):
                        yield Failure("crash", f"It raises {found.error}", told(asked))
                        return
                    if found.y.shape != shape_of(asked):
                        yield Failure("output_shape", f"The output has the shape {found.y.shape}, not {shape_of(asked)}", told(asked))
                        return


def _shorter(problem: Problem) -> Iterator[Problem]:
    """Problems in which the last keys of every sample are no real ones."""
    if problem.sizes["seq_k"] < 3:
        return
    if "lengths" in problem.options:
        yield problem.change(lengths=np.clip(problem.options["lengths"] - 2, 1, None))
    if "padding" in problem.options and problem.options["padding"][:, :-2].any(1).all():
        padding = problem.options["padding"].copy()
        padding[:, -2:] = False
        yield problem.change(padding=padding)


def right_dtype(bench: Bench) -> Iterator[Failure]:
    """Ask in each precision."""
    problem = bench.draw()
    for precision in bench.subject.library.precisions if problem is not None else ():
        found = bench.answer(problem, precision=precision)  # type: ignore[arg-type]  # it is drawn
        if isinstance(found, Answer) and found.dtype != precision:
            yield Failure("result_dtype", f"It is given {precision} and returns {found.dtype}", "", "warning")


def same_twice(bench: Bench) -> Iterator[Failure]:
    """Ask twice: copies of the implementation, then the same one."""
    for name in ("", *bench.profile.options):
        problem = bench.draw(*([name] if name else []))
        if problem is None:
            continue
        first, rows = bench.ask(problem), full_rows(problem)
        if (bench.moved(bench.ask(problem), first) & rows).any():
            sentence = "Two calls with the same inputs, not in training, give different outputs: something is random or remembered"
            yield Failure("dropout_mode", sentence, told(problem))
            return
        if (bench.moved(_after_another(bench, problem), first) & rows).any():
            yield Failure("state", "The output depends on the calls before: something is remembered", told(problem))
            return


def _after_another(bench: Bench, problem: Problem) -> Array:
    """Ask one and the same implementation for something else first."""
    other = changed(problem, ("queries", "keys", "values"), lambda array: array[::-1] * 0.5 + 1)
    subject = bench.subject
    shared = replace(subject, target=_Shared(subject.prepared(problem, "float64")), in_precision=lambda t, _: t, load=None)
    shared.training = lambda *_: None
    shared.call = lambda target, **arguments: subject.call(target.inner, **arguments)
    bench_of_one = replace(bench, subject=shared)
    for asked in (other, problem, problem):
        found = bench_of_one.ask(asked)
    return found


class _Shared:
    """An implementation that is not copied before a call."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __deepcopy__(self, _: Any) -> "_Shared":
        return self


def drops_in_training(bench: Bench) -> Iterator[Failure]:
    """Ask in training: only dropout may make a difference."""
    problem = bench.draw()
    if problem is None:
        return
    base, rates = bench.ask(problem), "dropout" in bench.subject.signature.roles and "survivors" not in bench.subject.signature.roles
    if rates:
        zero = bench.ask(problem.change(dropout=0.0), train=True)
        if bench.moved(zero, base).any():
            yield Failure("dropout_mode", "In training, with a rate of 0, the output is another than outside of training", told(problem))
            return
        if "training" in bench.subject.signature.roles and bench.moved(bench.ask(problem.change(dropout=0.4)), base).any():
            yield Failure("dropout_mode", "Weights are dropped though it is not in training", told(problem))
            return
    asked = problem.change(dropout=0.4) if rates else problem
    yield from _trained(bench, asked, base, must=rates)


def _trained(bench: Bench, problem: Problem, base: Array, *, must: bool) -> Iterator[Failure]:
    first, second = (bench.ask(problem, train=True) for _ in range(2))
    if not bench.moved(second, first).any():
        if must and not bench.moved(first, base).any():
            yield Failure("dropout_mode", "In training nothing is dropped, though there is a rate", told(problem))
        elif not must and bench.moved(first, base).any():
            yield Failure("dropout_mode", "Training changes the output, though not at random", told(problem))
        return
    drawn = np.stack([bench.ask(problem, train=True) for _ in range(_CALLS)])
    error = np.std(drawn, 0, ddof=1) / _CALLS**0.5
    off = np.abs(drawn.mean(0) - base)
    # a normal of 200 calls: 7 of its deviations, and a share of the outputs, since a rare survivor weighs much
    if np.sqrt(np.mean(off**2)) > 2 * np.sqrt(np.mean(error**2)) and (off > 7 * error + 1e-9 * size_of(base)).any():
        ratio = float(np.sum(drawn.mean(0) * base) / np.sum(base * base))
        sentence = f"The mean of the outputs in training is {ratio:.3g} times that outside of training: what stays is not scaled up rightly"
        yield Failure("dropout_arithmetic", sentence, told(problem))


def inputs_stay(bench: Bench) -> Iterator[Failure]:
    """Look at the arrays after the call."""
    for name in ("", *bench.profile.options):
        problem = bench.draw(*([name] if name else []))
        if problem is None:
            continue
        given: list[tuple[str, Any, Array]] = []

        def remember(role: str, array: Any, given: list[tuple[str, Any, Array]] = given) -> Any:
            given.append((role, array, bench.subject.library.take(array)))
            return array

        bench.ask(problem, change=remember)
        roles = [role for role, array, before in given if not np.array_equal(bench.subject.library.take(array), before, equal_nan=True)]
        if roles:
            yield Failure("inputs_modified", f"It changes what it was given: {', '.join(roles)}", told(problem))


def strides_do_not_matter(bench: Bench) -> Iterator[Failure]:
    """Hand over the same numbers as views."""
    if bench.subject.library.name not in _VIEWS:
        return
    for name in ("", *bench.profile.options):
        problem = bench.draw(*([name] if name else []))
        if problem is None:
            continue
        base, rows = bench.ask(problem), full_rows(problem)
        for word, view in _VIEWS[bench.subject.library.name].items():
            found = bench.answer(problem, change=lambda _, array, view=view: view(array) if array.ndim else array)
            if isinstance(found, Crash):
                yield Failure("refuses_views", f"It refuses inputs that are {word}: {found.error}", told(problem), "warning")
            elif found.y.shape != base.shape or (bench.moved(found.y, base) & rows).any():
                yield Failure("noncontiguous_misread", f"Inputs that are {word} are misread", told(problem))
                return


def _reversed(x: Any) -> tuple[int, ...]:
    return tuple(range(x.ndim))[::-1]


def _numpy_expanded(x: Any) -> Any:
    same = x.ndim > 1 and bool((x == x[:1]).all())
    return np.broadcast_to(x[:1], x.shape) if same else x


def _torch_expanded(x: Any) -> Any:
    return x[:1].expand_as(x) if x.ndim > 1 and bool((x == x[:1]).all()) else x


def _frozen(x: Any) -> Any:
    x.flags.writeable = False
    return x


_VIEWS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "numpy": {
        "transposed": np.asfortranarray,
        "every second of more": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        "stored backwards": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        "expanded": _numpy_expanded,
        "read-only": _frozen,
    },
    "torch": {
        "transposed": lambda x: x.permute(_reversed(x)).contiguous().permute(_reversed(x)),
        "every second of more": lambda x: x.repeat_interleave(2, -1)[..., ::2],
        "expanded": _torch_expanded,
    },
}


def refuses_bad_shapes(bench: Bench) -> Iterator[Failure]:
    """Give what does not fit together."""
    for what, problem, change in _misfits(bench):
        if isinstance(bench.answer(problem, change=change), Answer):
            yield Failure("bad_shape_accepted", f"It accepts {what}", told(problem), "warning")


def _misfits(bench: Bench) -> Iterator[tuple[str, Problem, Any]]:
    problem = bench.draw(tokens=("wide", "square", "tall"))
    if problem is None:
        return
    bench.ask(problem)
    sizes, roles = problem.sizes, bench.subject.signature.roles
    if "values" in roles:
        yield "keys and values of different length", replace(problem, values=problem.values[..., :-1, :].copy()), None
    if not problem.is_layer and sizes["h_kv"] > 1:
        yield "values of fewer heads than keys", replace(problem, values=problem.values[:, :1].copy()), None
    if "keys" in roles and sizes["batch"] > 1:
        yield "another batch for keys than for queries", changed(problem, ("keys", "values"), lambda array: array[:1]), None
    masked = bench.draw("keep", tokens=("wide", "square", "tall", "self")) if bench.has("keep") else None
    if masked is not None and bench.subject.mask != "lengths":
        last = np.minimum(np.arange(sizes["seq_k"] + 1), sizes["seq_k"] - 1)
        yield "a mask that is one key too long", masked, lambda role, array: array[..., last] if role == "keep" else array
