"""What laws are tried on: an implementation, problems drawn for it, and which rows of its output moved."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from .design import Profile, draw
from .problem import Answer, Array, Crash, Problem
from .subject import Subject, fits

MASKS = ("keep", "padding", "lengths", "causal", "window", "window_left", "window_right", "documents", "cumulative")
"""The options that say which keys a query may attend to."""

_SLOW = 0.02
"""An implementation that takes more seconds than this for an answer is asked less."""

_ROUGH = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""What rounding is to be expected where a precision is declared for a part of the work."""

_DULL = ("all kept", "none", "with an empty row", "with an empty one")
_INPUTS = ("queries", "keys", "values")


@dataclass(frozen=True)
class Failure:
    """That a law does not hold.

    Attributes:
        kind: the kind of fault, by its name in the catalogue; or a word for what has none.
        sentence: what is wrong, in one sentence.
        detail: on what problem.
        level: `wrong` makes the verdict; a `warning` does not.
    """

    kind: str
    sentence: str
    detail: str = ""
    level: Literal["wrong", "warning", "note"] = "wrong"


class UndecidedError(Exception):
    """That the implementation crashed, so that a law could not be tried."""


@dataclass(eq=False)
class Bench:
    """An implementation, and what laws are tried on.

    Attributes:
        subject: the implementation.
        profile: what it can be asked for.
        seed: what problems are drawn from.
        rounding: how far two answers that should be equal may differ, as a share of the largest number in them.
        asked: how many questions it was asked.
        seconds: how long it took to answer them.
    """

    subject: Subject
    profile: Profile
    seed: int
    rounding: float = 1e-9
    asked: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        policy = self.profile.policy
        for precision in (policy.softmax_precision, policy.product_precision):
            self.rounding = max(self.rounding, _ROUGH.get(str(precision), 0.0))

    @property
    def rng(self) -> np.random.Generator:
        """A new generator: the same numbers each time."""
        return np.random.default_rng([self.seed, 7])

    def has(self, *names: str) -> bool:
        """Tell whether it has options."""
        return set(names) <= set(self.profile.options)

    @property
    def slow(self) -> bool:
        """Whether it takes so long to answer that fewer questions must do."""
        return self.seconds > _SLOW * max(self.asked, 1)

    def words(self, name: str) -> list[str]:
        """The ways to draw an option that leave every query a key."""
        return [word for word in self.profile.factors[name][1:] if word not in _DULL]

    def draw(self, *names: str, tokens: tuple[str, ...] = (), word: str = "", spread: float = 1.0, again: int = 0) -> Problem | None:
        """Draw a problem that asks for options; None where they cannot be asked for.

        Args:
            *names: the options.
            tokens: the ways in which queries and keys may differ in number; none for all.
            word: the way to draw the first option; empty for its first way.
            spread: the standard deviation of the scaled scores.
            again: which draw of several.

        Returns:
            The problem.
        """
        if not self.has(*names) or not all(self.words(name) for name in names):
            return None
        words = {name: self.words(name)[0] for name in names} | ({names[0]: word} if word else {})
        for way in tokens or self.profile.tokens:
            if way in self.profile.tokens and self.profile.allows({"tokens": way, **words}):
                problem = draw(self.profile, {"tokens": way, **words}, seed=self.seed + again, spread=spread)
                return problem if _takes(self.subject, problem) else None
        return None

    def answer(self, problem: Problem, /, **how: Any) -> Answer | Crash:
        """Ask it, whatever comes."""
        start = time.monotonic()
        found = self.subject.answer(problem, **how)
        self.asked, self.seconds = self.asked + 1, self.seconds + time.monotonic() - start
        return found

    def ask(self, problem: Problem, /, **how: Any) -> Array:
        """Ask it for its output, which must be there and must have the right shape."""
        found = self.answer(problem, **how)
        if isinstance(found, Crash):
            raise UndecidedError(f"it raised {found.error}")
        if found.y.shape != shape_of(problem):
            raise UndecidedError(f"its output has the shape {found.y.shape}, not {shape_of(problem)}")
        return found.y

    def gap(self, found: Array, base: Array, /) -> Array:
        """By how much each row differs: infinite where only one of two numbers is finite."""
        with np.errstate(invalid="ignore"):
            off = np.abs(found - base)
        same = (np.isnan(found) & np.isnan(base)) | (found == base)
        return np.max(np.where(same, 0.0, np.where(np.isnan(off), np.inf, off)), axis=-1)  # type: ignore[no-any-return]

    def moved(self, found: Array, base: Array, /) -> Array:
        """Which rows differ by more than rounding."""
        return self.gap(found, base) > self.rounding * size_of(base)


def _takes(subject: Subject, problem: Problem) -> bool:
    keep = problem.options.get("keep")
    return keep is None or any(fits(keep, pattern) for pattern in subject.mask_axes)


def size_of(y: Array, /) -> float:
    """The largest number of an output."""
    return float(np.max(np.abs(y[np.isfinite(y)]), initial=np.finfo(float).tiny))


def shape_of(problem: Problem, /) -> tuple[int, ...]:
    """The shape that the output must have."""
    sizes = problem.sizes
    names = ("batch", "seq_q", "d_model") if problem.is_layer else ("batch", "h", "seq_q", "d_v")
    return tuple(sizes[name] for name in names)


def rows_of(problem: Problem, per_head: Array, /) -> Array:
    """Bring what holds for each head and query to the rows of the output: some head is enough."""
    return np.asarray(per_head.any(1)) if problem.is_layer else per_head


def full_rows(problem: Problem, /) -> Array:
    """The rows of the output to which every head brings something."""
    kept = np.asarray(problem.visible.any(-1))
    return np.asarray(kept.all(1)) if problem.is_layer else kept


def changed(problem: Problem, names: tuple[str, ...], change: Callable[[Array], Array], /) -> Problem:
    """Change some of the inputs; those that are the same array stay the same."""
    new = {id(array): change(array.copy()) for array in {id(a): a for a in (getattr(problem, name) for name in names)}.values()}
    inputs = {name: getattr(problem, name) for name in _INPUTS}
    return replace(problem, **{name: new.get(id(array), array) for name, array in inputs.items()})


def separate(problem: Problem, name: str, /) -> bool:
    """Tell whether an input is an array of its own."""
    return sum(getattr(problem, name) is getattr(problem, other) for other in _INPUTS) == 1


def part_of(problem: Problem, axis: str, kept: Any, /) -> Problem:
    """Keep some of the samples, queries or keys, wherever the problem has that axis.

    Args:
        problem: the problem.
        axis: `batch`, `seq_q` or `seq_k`.
        kept: which.

    Returns:
        The smaller problem, or one with the same in another order.
    """
    inputs = {"batch": _INPUTS, "seq_q": ("queries",), "seq_k": ("keys", "values")}[axis]
    size, where = problem.sizes[axis], {"batch": 0, "seq_q": -2, "seq_k": -1}[axis]

    def cut(name: str, value: Any) -> Any:
        owns = name in _BATCHED if axis == "batch" else name in ("keep", "bias", "survivors") or (name == "padding" and axis == "seq_k")
        return np.take(value, kept, where) if owns and value.shape[where] == size else value

    smaller = changed(problem, inputs, lambda array: np.take(array, kept, 0 if axis == "batch" else -2))
    return replace(smaller, options={name: cut(name, value) for name, value in problem.options.items()})


_BATCHED = ("keep", "padding", "lengths", "bias", "documents", "positions", "survivors")


def told(problem: Problem, /) -> str:
    """Say on what problem."""
    sizes = ", ".join(f"{name}={size}" for name, size in problem.sizes.items() if name in ("batch", "seq_q", "seq_k", "h", "h_kv"))
    asked = ", ".join(problem.options) or "no options"
    return f"{sizes}, {asked}, seed {problem.seed}"
