"""Gradients: those of an implementation against those of the specification, in float64."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from itertools import combinations
from typing import Any

import numpy as np

from ..spec.fan_out import share_keys, share_values
from ..spec.parameters import Parameters
from .backward import Backward, Gradients, differentiated, inputs_of, limits, slope_of, specified
from .bench import Bench, Failure, full_rows, told
from .design import Profile, draw
from .problem import Array, Crash, Problem
from .properties import Outcome
from .subject import Subject, copied
from .tensors import stored

_PAIRS = 6
_BY_DIFFERENCE = 1e-6
"""How exact a central difference is."""


@dataclass(frozen=True, eq=False)
class _Case:
    """One problem with the gradients that are right, and those that came."""

    problem: Problem
    cotangent: Array
    right: Mapping[str, Array]
    found: Gradients


def check_gradients(
    subject: Subject, profile: Profile, *, seed: int, rounding: float = 1e-9, backward: Backward | None = None
) -> list[Outcome]:
    """Compare gradients with respect to every input, every option that is a float, and every parameter.

    Args:
        subject: the implementation.
        profile: what it can be asked for.
        seed: what problems are drawn from.
        rounding: how far gradients may be off, as a share of the largest number in them.
        backward: its own backward, where its library has none.

    Returns:
        What came of it: one outcome that says all is right, or one for each fault.
    """
    if subject.library.name == "numpy" and backward is None:
        return []
    bench = Bench(subject, profile, seed, rounding)
    failures: dict[tuple[str, str], Failure] = {}
    for failure in _failures(bench, backward):
        failures.setdefault((failure.kind, failure.sentence), failure)
    if undecided := [failure for failure in failures.values() if failure.level == "note"]:
        failures = {key: failure for key, failure in failures.items() if failure.level != "note"}
    if failures:
        return [Outcome("gradients", False, f.kind, f"{f.sentence}.", f.detail, f.level) for f in failures.values()]
    if undecided:
        return [Outcome("gradients", None, "", f"{undecided[0].sentence}.", undecided[0].detail, "note")]
    return [Outcome("gradients", True, "", "The gradients are those of the specification.", f"{bench.asked} problems", "note")]


def _failures(bench: Bench, backward: Backward | None) -> Iterator[Failure]:
    wrong: list[tuple[Problem, str, str]] = []
    right: list[Problem] = []
    for problem in _problems(bench):
        cotangent = _cotangent(problem, bench.seed)
        bench.asked += 1
        try:
            found = differentiated(bench.subject, problem, cotangent, backward=backward)
        except Exception as error:  # whatever it raises is its answer
            if isinstance(error, NotImplementedError):
                yield Failure("", f"There are no gradients here: {_line(error)}", told(problem), "note")
            elif not isinstance(bench.answer(problem), Crash):
                yield Failure("gradient_wrong", f"The backward raises {type(error).__name__}: {_line(error)}", told(problem))
            continue
        case = _Case(problem, cotangent, _expected(bench, problem, cotangent), found)
        if found.y.shape != cotangent.shape or (bench.moved(found.y, problem.run().y) & full_rows(problem)).any():
            yield Failure("", "The output is wrong already, so nothing is said about gradients", told(problem), "note")
            continue
        faults = list(_compare(bench, case))
        wrong += [(problem, name, look) for name, look in faults]
        right += [] if faults else [problem]
        if backward is None and not faults and len(problem.options) <= 1:
            yield from _each_alone(bench, case)
    yield from _named(wrong, right)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _problems(bench: Bench) -> Iterator[Problem]:
    """Ask for nothing, for each option by itself, for some pairs, and for an empty row."""
    options = [name for name in bench.profile.options if name != "offset"]
    pairs = [pair for pair in combinations(options, 2) if "return_weights" not in pair]
    picked = [pairs[i] for i in bench.rng.permutation(len(pairs))[:_PAIRS]]
    for names in ((), *((name,) for name in options), *picked):
        for again in range(len(bench.profile.heads) or 1) if not names else range(1):
            for tokens in ("wide", "tall") if names == ("causal",) else ((),):
                problem = bench.draw(*names, again=again, tokens=(tokens,) if tokens else ())
                if problem is not None and full_rows(problem).all():
                    yield problem
    if not bench.profile.causal and "square" in bench.profile.tokens:  # heads and tokens can be taken for each other
        heads = bench.profile.template.heads if bench.profile.template is not None else bench.profile.heads[0]
        yield draw(bench.profile, {"tokens": "square"}, seed=bench.seed, sizes={"seq_q": heads.h, "seq_k": heads.h})
    if bench.profile.policy.empty_row == "zero":  # where it is uniform, scores that a fill hides may have gradients or not
        for name, word in (("keep", "with an empty row"), ("lengths", "with an empty one")):
            choice = {"tokens": bench.profile.tokens[0], name: word}
            if bench.has(name) and word in bench.profile.factors[name] and bench.profile.allows(choice):
                yield draw(bench.profile, choice, seed=bench.seed)


def _cotangent(problem: Problem, seed: int) -> Array:
    return np.random.default_rng([seed, 11]).normal(size=problem.run().y.shape)


def _expected(bench: Bench, problem: Problem, cotangent: Array) -> dict[str, Array]:
    """The right gradients by name; without PyTorch there are none, but slopes."""
    if bench.subject.library.name != "torch" and find_spec("torch") is None:
        return {}
    return _with_stored(bench.subject, problem, specified(problem, cotangent))


_UNITS = ((1e-7, 2.0**-53), (1e-3, 2.0**-24), (np.inf, 2.0**-8))
"""The unit roundoff of an implementation whose rounding is below a number."""

_NOISE = 8 * float(np.finfo(float).eps)
"""What is off by less, as a share of the largest gradient, is not looked at."""


def _with_stored(subject: Subject, problem: Problem, by_name: dict[str, Array]) -> dict[str, Array]:
    """Add what belongs to parameters, as they are stored."""
    if problem.parameters is None or subject.load is None:
        return by_name
    arrays = {field.name: by_name[field.name] for field in fields(Parameters) if field.name in by_name}
    return by_name | {f"stored:{name}": array for name, array in _as_stored(subject, problem, Parameters(**arrays)).items()}


def _as_stored(subject: Subject, problem: Problem, gradients: Parameters[Array]) -> dict[str, Array]:
    """Lay gradients out as the parameters are: put them in, and read the tensors."""
    target = subject.prepared(problem, "float64")
    load = subject.load
    if load is None:
        return {}
    moved = gradients.map(lambda array: array + 1.0)
    before = stored(load(copied(target), gradients, "float64"))
    after = stored(load(copied(target), moved, "float64"))
    return {name: array for name, array in before.items() if not np.array_equal(array, after[name])}


def _compare(bench: Bench, case: _Case) -> Iterator[tuple[str, str]]:
    """Which gradients are wrong, and what they look like."""
    theirs = case.found.inputs | {f"stored:{name}": grad for name, grad in case.found.stored.items()}
    if not case.right:
        yield from _compare_slopes(bench, case)
        return
    size = max(float(np.max(np.abs(grad), initial=0.0)) for grad in case.right.values())
    suspect = [name for name, right in case.right.items() if name in theirs and _beyond(theirs[name], right, _NOISE * size)]
    if not suspect:
        return
    unit = next(unit for below, unit in _UNITS if bench.rounding < below)
    within = _with_stored(bench.subject, case.problem, limits(case.problem, case.cotangent, unit))
    for name in suspect:
        limit = np.clip(within[name], _NOISE * size, bench.rounding * size)
        if _beyond(theirs[name], case.right[name], limit):
            yield name.removeprefix("stored:"), _looks(theirs[name], case.right[name], case, name)


def _beyond(found: Array | None, right: Array, limit: Any) -> bool:
    if found is None or found.shape != right.shape:
        return found is not None or bool(np.any(np.abs(right) > limit))
    return not bool(np.all(np.abs(found - right) <= limit))


def _compare_slopes(bench: Bench, case: _Case) -> Iterator[tuple[str, str]]:
    rng = bench.rng
    for name, grad in case.found.inputs.items():
        direction = rng.normal(size=inputs_of(case.problem)[name].shape)
        wanted = slope_of(case.problem, case.cotangent, name, direction)
        got = np.nan if grad is None else float(np.sum(grad * direction))
        if not abs(got - wanted) <= max(_BY_DIFFERENCE, bench.rounding) * max(abs(wanted), float(np.linalg.norm(direction))):
            yield name, "missing" if grad is None else f"{got / wanted:.3g} times what it should be in a random direction"


def _looks(found: Array | None, right: Array, case: _Case, name: str) -> str:
    """Say what a wrong gradient looks like."""
    if found is None or not found.any():
        return "missing" if found is None else "zero"
    if found.shape != right.shape or not np.isfinite(found).all():
        return f"of the shape {found.shape}, not {right.shape}" if found.shape != right.shape else "NaN"
    return _like(found, right, case, name) or f"off by up to {np.max(np.abs(found - right)) / np.max(np.abs(right)):.2g} of the largest"


def _like(found: Array, right: Array, case: _Case, name: str) -> str:
    """Say how a wrong gradient comes from the right one."""
    close = 1e-6 * float(np.max(np.abs(right)))
    factor = float(np.sum(found * right) / np.sum(right * right))
    if np.max(np.abs(found - factor * right)) < close * max(abs(factor), 1):
        return f"{factor:.6g} times what it should be{_factor(factor, case.problem)}"
    for word, other in _variants(case, name):
        if other.shape == found.shape and np.max(np.abs(found - other)) < close:
            return word
    for a, b in combinations(range(right.ndim), 2):
        if right.shape[a] == right.shape[b] and np.max(np.abs(found - right.swapaxes(a, b))) < close:
            return f"transposed: axes {a} and {b} are exchanged"
    return ""


def _factor(factor: float, problem: Problem) -> str:
    """Name a factor."""
    sizes, rate = problem.sizes, problem.options.get("dropout", 0.0)
    scale = problem.options.get("scale", problem.policy.scale) or sizes["d_k"] ** -0.5
    names = {"1/(1-p)": 1 / (1 - rate), "1-p": 1 - rate, "p": rate, "the scale": scale, "1/scale": 1 / scale, "scale squared": scale**2}
    names |= {
        "p(1-p)": rate * (1 - rate),
        "the size of a group": sizes["h"] / sizes["h_kv"],
        "1/(size of a group)": sizes["h_kv"] / sizes["h"],
    }
    found = [word for word, value in names.items() if value not in (0.0, 1.0) and abs(factor - value) < 1e-6 * abs(value)]
    return f", which is {found[0]}" if found else ""


def _variants(case: _Case, name: str) -> Iterator[tuple[str, Array]]:
    """Gradients that slips of a backward give."""
    problem, sizes = case.problem, case.problem.sizes
    if problem.is_layer:
        return
    if name in ("keys", "values") and sizes["h"] != sizes["h_kv"]:
        shared = {"h": sizes["h"], "grouping": problem.policy.grouping}
        full = replace(problem, keys=share_keys(problem.keys, **shared), values=share_values(problem.values, **shared))  # type: ignore[arg-type]
        by_head = specified(full, case.cotangent)[name]
        group, strided = sizes["h"] // sizes["h_kv"], problem.policy.grouping == "strided"
        for member in range(group):
            heads = np.arange(sizes["h_kv"]) + member * sizes["h_kv"] if strided else np.arange(sizes["h_kv"]) * group + member
            yield "not summed over the group of heads that share it", by_head[:, heads]
    if not problem.options and not problem.is_causal and problem.policy.rotation is None and sizes["h"] == sizes["h_kv"]:
        answer = problem.run()
        scale = (problem.policy.scale or sizes["d_k"] ** -0.5) if problem.policy.cap is None else np.nan
        slips = answer.weights * (case.cotangent @ problem.values.swapaxes(2, 3)) * scale
        word = "what it would be if the softmax were differentiated without the sum over its row"
        yield word, slips @ problem.keys if name == "queries" else slips.swapaxes(2, 3) @ problem.queries


def _named(wrong: list[tuple[Problem, str, str]], right: list[Problem]) -> Iterator[Failure]:
    """Name the faults by what the problems with wrong gradients have in common."""
    grouped = [problem.sizes["h"] != problem.sizes["h_kv"] for problem, _, _ in wrong]
    only_grouped = bool(wrong) and all(grouped) and any(p.sizes["h"] == p.sizes["h_kv"] for p in right)
    dropping = bool(wrong) and all("survivors" in problem.options for problem, _, _ in wrong)
    for problem, name, look in wrong:
        sentence = f"The output is right, but the gradient of {name} is {look}"
        if look == "missing":
            yield Failure("gradient_missing", f"The output is right, but there is no gradient of {name}", told(problem))
        elif look == "NaN" and problem.empty_rows.any():
            yield Failure("fully_masked_row", f"{sentence}, where a query keeps no key", told(problem))
        elif dropping:
            yield Failure("dropout_arithmetic", f"{sentence}, where weights are dropped", told(problem))
        else:
            shared = ", where heads share keys and values: it is not summed over the group rightly"
            yield Failure("gradient_wrong", f"{sentence}{shared if only_grouped else _only_with(problem, right)}", told(problem))


def _only_with(problem: Problem, right: list[Problem]) -> str:
    plain = any(not other.options for other in right)
    return f", with {' and '.join(problem.options)}" if plain and problem.options else ""


def _each_alone(bench: Bench, case: _Case) -> Iterator[Failure]:
    """Let one input after the other be the only one that asks for a gradient."""
    for name, wanted in case.found.inputs.items():
        try:
            found: Any = differentiated(bench.subject, case.problem, case.cotangent, only=(name,)).inputs.get(name)
        except Exception as error:  # whatever it raises is its answer
            sentence = f"The backward raises an error where only {name} asks for a gradient: {type(error).__name__}: {_line(error)}"
            yield Failure("gradient_missing", sentence, told(case.problem))
            continue
        if wanted is None:
            continue
        if found is None:
            yield Failure("gradient_missing", f"There is no gradient of {name} where only that asks for one", told(case.problem))
        elif _beyond(found, wanted, bench.rounding * float(np.max(np.abs(wanted)))):
            yield Failure("gradient_wrong", f"The gradient of {name} is another where only that asks for one", told(case.problem))
