"""A subject: an implementation of attention, and how it is asked."""

import copy
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from ..arrays import dtype_name
from ..axes import parse
from ..errors import ConfigError
from .libraries import Library
from .options import NAMES
from .problem import Answer, Array, Crash, Problem

MaskKind = Literal["keep", "drop", "additive", "lengths", "none"]
Order = Literal["bhsd", "bshd"]

SOURCES = {
    **dict.fromkeys(("x", "hidden_states", "inputs", "input", "tokens"), "x"),
    **dict.fromkeys(("q", "query", "queries", "target", "tgt", "x_q"), "queries"),
    **dict.fromkeys(("k", "key", "keys", "context", "memory", "source", "src", "kv", "x_k", "x_kv"), "keys"),
    **dict.fromkeys(("v", "value", "values", "context_v", "x_v"), "values"),
}
"""Which input of a problem an argument of this name stands for."""


@dataclass(frozen=True, eq=False)
class Signature:
    """What the arguments of a call stand for.

    Attributes:
        places: for each argument its name, and the input or option that it stands for.
        explicit: whether every argument must be given, as to a function that was written for this purpose.
        required: the names of arguments that must be given, whether they are asked for or not.
    """

    places: tuple[tuple[str, str], ...]
    explicit: bool
    required: frozenset[str] = frozenset()

    @property
    def direct(self) -> bool:
        """Whether the implementation itself has this signature."""
        return not self.explicit

    @property
    def roles(self) -> tuple[str, ...]:
        """What the arguments stand for, in order."""
        return tuple(role for _, role in self.places)


def read_signature(function: Callable[..., Any], /, *, subject_first: bool, heads_first: bool, explicit: bool, owner: str) -> Signature:
    """Read what the arguments of a call stand for, by their names.

    Args:
        function: what is called.
        subject_first: whether its first argument is the implementation.
        heads_first: whether queries, keys and values come first, whatever they are called.
        explicit: whether it was written for this purpose, so that every argument must be known.
        owner: who asks, for the error.

    Returns:
        What they stand for.

    Raises:
        ConfigError: an argument must be given, and nobody knows what it stands for.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{owner}: the arguments of {function!r} cannot be read; say how to call it, with call=.") from error
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][subject_first:]
    places = []
    for index, parameter in enumerate(named):
        role = ("queries", "keys", "values")[index] if heads_first and index < 3 else {**NAMES, **SOURCES}.get(parameter.name)
        if role is not None:
            places.append((parameter.name, role))
        elif explicit or parameter.default is parameter.empty:
            known = ", ".join(sorted({*NAMES.values(), *SOURCES.values()}))
            raise ConfigError(
                f"{owner}: nobody knows what the argument {parameter.name!r} stands for; the names are {known}. Adapt with call=."
            )
    if not places or places[0][1] not in ("x", "queries"):
        raise ConfigError(f"{owner}: the first input must be called x or queries, but the arguments are {[p.name for p in named]}.")
    required = (parameter.name for parameter in named if explicit or parameter.default is parameter.empty)
    return Signature(tuple(places), explicit, frozenset(required))


class Store(Protocol):
    """Where parameters go in an implementation."""

    def __call__(self, target: Any, parameters: Any, precision: str, /) -> Any:
        """Put parameters into an implementation, and return it."""

    def tensors(self, parameters: Any, /) -> dict[str, Array]:
        """Lay parameters out as they are stored: the tensors by their whole names."""

    @property
    def called(self) -> dict[str, str]:
        """What the layout calls each tensor, by its whole name."""

    def redrawn(self, parameters: Any, draw: Callable[[str, tuple[int, ...]], Array], /) -> Any:
        """Draw the tensors of weights and biases anew, and read the parameters from them."""


@dataclass(eq=False)
class Subject:
    """An implementation, and how it is asked.

    Attributes:
        name: what it is called.
        target: the implementation.
        call: what calls it: takes the target, then what the signature says.
        signature: what the arguments stand for.
        library: whose arrays it takes.
        order: the axes of heads' queries, keys and values.
        mask: how its mask is meant.
        mask_axes: the axes that its mask has, one of several patterns.
        load: puts parameters into the target and returns it; None where there are none.
        in_precision: copies the target into a precision.
        training: sets whether the target is in training.
    """

    name: str
    target: Any
    call: Callable[..., Any]
    signature: Signature
    library: Library
    order: Order = "bhsd"
    mask: MaskKind = "keep"
    mask_axes: tuple[str, ...] = ("batch h seq_q seq_k",)
    load: Store | None = None
    in_precision: Callable[[Any, str], Any] = field(default=lambda target, _: target)
    training: Callable[[Any, bool], None] = field(default=lambda *_: None)

    def answer(self, problem: Problem, /, *, precision: str = "float64", train: bool = False, change: Any = None) -> Answer | Crash:
        """Ask it.

        Args:
            problem: what is asked, in numbers that the precision holds.
            precision: the dtype of its arrays.
            train: whether it is in training.
            change: what is done to each array before it is handed over; None for nothing.

        Returns:
            What it answers, or that it crashed.
        """
        try:
            with self.library.working(watched=problem.seed % 2 == 0):  # some layers take another path where nothing is watched
                target = self.prepared(problem, precision, train=train)
                result = self.call(target, **self.arguments(problem, precision, train=train, change=change))
                return self._read(result, problem)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # whatever it raises, SystemExit too, is its answer
            return Crash(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", _is_inside(error))

    def prepared(self, problem: Problem, precision: str, *, train: bool = False) -> Any:
        """Copy the target, so that no call leaves a trace for the next, and put the parameters in."""
        target = self.in_precision(copied(self.target), precision)
        if self.load is not None and problem.parameters is not None:
            target = self.load(target, problem.parameters, precision)
        self.training(target, train)
        return target

    def arguments(self, problem: Problem, precision: str, *, train: bool = False, change: Any = None) -> dict[str, Any]:
        """Make the arguments of a call by name."""
        values = self._values(problem, train=train)
        given: dict[str, Any] = {}
        known: dict[int, Any] = {}
        for name, role in self.signature.places:
            if role in values:
                value = values[role]
                if isinstance(value, np.ndarray):
                    if id(value) not in known:
                        array = self.library.give(value, precision)
                        known[id(value)] = array if change is None else change(role, array)
                    value = known[id(value)]
                given[name] = value
            elif name in self.signature.required:
                given[name] = _NEUTRAL.get(role)
        return given

    def arguments_in_numpy(self, problem: Problem, /) -> dict[str, Any]:
        """The arguments of a call by name, as they are before they go to the library."""
        values = self._values(problem, train=False)
        needed = self.signature.required
        return {name: values.get(role, _NEUTRAL.get(role)) for name, role in self.signature.places if role in values or name in needed}

    def _values(self, problem: Problem, *, train: bool) -> dict[str, Any]:
        values: dict[str, Any] = {"queries": problem.queries, "keys": problem.keys, "values": problem.values, "x": problem.queries}
        if not problem.is_layer and self.order == "bshd":
            swapped: dict[int, Array] = {}
            values = {name: swapped.setdefault(id(array), np.ascontiguousarray(array.swapaxes(1, 2))) for name, array in values.items()}
        values |= {**problem.options, "training": train}
        h_kv = problem.sizes["h_kv"]
        values |= {"h_kv": h_kv, "enable_gqa": h_kv != problem.sizes["h"]}
        if "keep" in values:
            values["keep"] = self._mask(self._on_axes(values["keep"], problem))
        if "padding" in values:
            values["padding"] = self._mask(values["padding"])
        return values

    def _mask(self, keep: Array) -> Array:
        if self.mask == "drop":
            return ~keep
        return np.where(keep, 0.0, -np.inf) if self.mask == "additive" else keep

    def _on_axes(self, keep: Array, problem: Problem) -> Array:
        """Bring a mask to the axes that the implementation takes."""
        fitting = [pattern for pattern in self.mask_axes if fits(keep, pattern)]
        pattern = fitting[(problem.seed + problem.sizes["seq_q"]) % len(fitting)]
        if pattern == "batch h seq_q seq_k":
            return keep
        sizes, words = {**problem.sizes, "seq_k": keep.shape[3]}, [axis.text for axis in parse(pattern)]
        axes = ("batch", "h", "seq_q", "seq_k")
        full = np.broadcast_to(keep, tuple(sizes[axis] if axis in words else 1 for axis in axes))
        return np.ascontiguousarray(full).reshape([1 if word == "1" else sizes[word] for word in words])

    def _read(self, result: Any, problem: Problem) -> Answer:
        parts = list(result) if isinstance(result, tuple | list) else [result]
        arrays = [self.library.take(part) for part in parts if hasattr(part, "shape")]
        if not arrays:
            raise TypeError(f"it returned {type(result).__name__}, no array")
        y, weights = arrays[0], arrays[1] if "return_weights" in problem.options and len(arrays) > 1 else None
        first = next(part for part in parts if hasattr(part, "shape"))
        if not problem.is_layer and self.order == "bshd" and y.ndim == 4:  # batch, seq, h, d_v
            y = y.swapaxes(1, 2)
        return Answer(y, weights, dtype_name(first))


_NEUTRAL: Mapping[str, Any] = {"causal": False, "return_weights": False, "dropout": 0.0, "training": False, "enable_gqa": False}
"""What stands for "not asked for", where that is not None."""


def fits(keep: Array, pattern: str, /) -> bool:
    """Tell whether a mask can be had on these axes."""
    words = [axis.text for axis in parse(pattern)]
    sizes = zip(("batch", "h", "seq_q", "seq_k"), keep.shape, strict=True)
    return all(size == 1 or axis in words for axis, size in sizes)


def _is_inside(error: BaseException) -> bool:
    """Tell whether an error was raised further in than where the implementation is called: in this room, or by `call`."""
    frames = list(traceback.walk_tb(error.__traceback__))
    outside = sum(frame.f_code.co_filename.startswith(_ROOM) for frame, _ in frames)
    return len(frames) > outside + 1 or (len(frames) > outside and not isinstance(error, TypeError))


_ROOM = __file__.rpartition("/")[0]


def copied(target: Any, /) -> Any:
    """Copy an implementation, where that can be done."""
    if inspect.isroutine(target):
        return target
    try:
        return copy.deepcopy(target)
    except Exception:  # what cannot be copied is used as it is
        return target
