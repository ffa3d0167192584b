"""A step of the specification: checked at the first sight of a signature, recorded or replaced on request."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, ParamSpec, TypeVar

from .axes import Shape, evaluate, shape_of
from .errors import ConfigError
from .judge import judge
from .signature import Signature

P = ParamSpec("P")
R = TypeVar("R")

_KNOWN_CALLS = 4096
_lock = threading.Lock()


@dataclass(frozen=True)
class Step:
    """What a step says of itself.

    Attributes:
        name: the name of its function.
        stage: fan out, attend or fan in.
        equation: its formula, in LaTeX.
        multiply_adds: how many multiply-adds its matrix products take, as an expression of axes; element-wise work
            does not count.
        signature: what its annotations promise.
    """

    name: str
    stage: str
    equation: str
    multiply_adds: str
    signature: Signature = field(repr=False)


@dataclass(frozen=True)
class Call:
    """One call of one step.

    Attributes:
        step: which step.
        arguments: what it took, by name.
        result: what it returned.
    """

    step: Step
    arguments: dict[str, Any]
    result: Any

    @property
    def shapes(self) -> dict[str, Shape]:
        """The annotated shape of each array argument, and of the result under `return`."""
        given = {entry.label: entry.shape for entry in self.step.signature.entries(self.arguments)}
        return {**given, "return": shape_of(self.step.signature.hints["return"])}

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The names of the axes of each array argument, and of the result under `return`."""
        return {label: tuple(axis.text for axis in shape.axes) for label, shape in self.shapes.items()}

    @property
    def sizes(self) -> dict[str, Any]:
        """The size of each axis of the arguments."""
        signature = self.step.signature
        bound = signature.bind(signature.entries(self.arguments), signature.settled(self.arguments))
        return {name: size for name, (size, _) in bound.items()}

    @property
    def multiply_adds(self) -> Any:
        """The multiply-adds of its matrix products, at these sizes."""
        return evaluate(self.step.multiply_adds, self.sizes)


class Trace(Mapping[str, Call]):
    """The calls of steps, in order; by name, the latest call of that step."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getitem__(self, name: str) -> Call:
        for call in reversed(self.calls):
            if call.step.name == name:
                return call
        msg = f"no step {name!r} ran; those that did: {', '.join(self) or 'none'}"
        raise KeyError(msg)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(call.step.name for call in self.calls))

    def __len__(self) -> int:
        return len(set(self))


@dataclass(frozen=True)
class _Seam:
    """Who listens to the steps, and which functions stand in for some of them."""

    record: Callable[[Call], None] | None
    substitutes: Mapping[str, Callable[..., Any]]


_seam: ContextVar[_Seam] = ContextVar("seam")
_steps: dict[str, Step] = {}
_functions: dict[str, Callable[..., Any]] = {}


def step(stage: str, *, equation: str, multiply_adds: str = "0") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a step: checked against its annotations, recorded by `trace`, replaced by `substitute`.

    Args:
        stage: fan out, attend or fan in.
        equation: its formula, in LaTeX.
        multiply_adds: the multiply-adds of its matrix products, as an expression of axes.

    Returns:
        A decorator.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        info = Step(function.__name__, stage, equation, multiply_adds, Signature(function))
        _steps[info.name] = info

        def perform(seam: _Seam, args: tuple[Any, ...], kwargs: dict[str, Any], known: dict[Any, None]) -> Any:
            arguments = info.signature.arguments(args, kwargs)
            body, given = function, (args, kwargs)
            if info.name in seam.substitutes:
                body, given = seam.substitutes[info.name], info.signature.without_defaults(args, kwargs)
            others = {name: other for name, other in seam.substitutes.items() if name != info.name}
            key = key_of(args, kwargs)
            token = _seam.set(_Seam(None, others))  # a substitute may call the step that it stands in for
            try:
                if body is function and is_known(key, known):
                    result = function(*args, **kwargs)
                else:
                    result, repeatable = judge(info.signature, arguments, lambda: body(*given[0], **given[1]), derive=True)
                    if repeatable and not seam.substitutes:
                        remember(key, known)
            finally:
                _seam.reset(token)
            if seam.record is not None:
                seam.record(Call(info, arguments, result))
            return result

        call = _check(function, info.signature, perform, derive=True)
        call.__step__ = info  # type: ignore[attr-defined]
        _functions[info.name] = call
        return call

    return decorate


def checked(function: Callable[P, R], /) -> Callable[P, R]:
    """Check a composition of steps against its annotations, so that its steps agree with each other."""
    signature = Signature(function)

    def perform(_: _Seam, args: tuple[Any, ...], kwargs: dict[str, Any], known: dict[Any, None]) -> Any:
        del known  # what stands in for a step inside may give another result
        return judge(signature, signature.arguments(args, kwargs), lambda: function(*args, **kwargs), derive=False)[0]

    return _check(function, signature, perform, derive=False)


def check_fields(owner: Any, /) -> None:
    """Check the fields of a dataclass against their annotations; to be called when it is built."""
    if is_compiling():
        return
    given = vars(owner)
    if all(given[field.name] is field.default for field in fields(owner)):
        return
    signature, known = _fields_of(type(owner))  # type: ignore[arg-type]  # mypy does not know that types are hashable
    key = key_of((), given)
    if not is_known(key, known) and judge(signature, given, lambda: None, derive=False)[1]:
        remember(key, known)


@functools.cache
def _fields_of(kind: type) -> tuple[Signature, dict[Any, None]]:
    return Signature(kind), {}


def _check(function: Callable[P, R], signature: Signature, perform: Callable[..., Any], *, derive: bool) -> Callable[P, R]:
    known: dict[Any, None] = {}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return function(*args, **kwargs)
        if (seam := _seam.get(None)) is not None:
            return perform(seam, args, kwargs, known)  # type: ignore[no-any-return]
        key = key_of(args, kwargs)
        if is_known(key, known):
            return function(*args, **kwargs)
        arguments = signature.arguments(args, kwargs)
        result, repeatable = judge(signature, arguments, lambda: function(*args, **kwargs), derive=derive)
        if repeatable:
            remember(key, known)
        return result  # type: ignore[no-any-return]

    return call


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All that a verdict depends on: of words, flags and whole numbers the value, of everything else the kind."""
    key: list[Any] = [*kwargs]
    for value in (*args, *kwargs.values()):
        if (shape := getattr(value, "shape", None)) is not None:
            key += (type(value), shape, value.dtype, getattr(value, "device", None))
        elif hasattr(value, "__dataclass_fields__"):
            key += (type(value), key_of((), vars(value)))
        elif isinstance(value, tuple):
            key += (type(value), key_of(value, {}))
        else:
            key += (type(value), value if isinstance(value, (int, str)) else None)
    return tuple(key)


def is_known(key: tuple[Any, ...], known: dict[Any, None], /) -> bool:
    """Tell whether a call has been judged before."""
    try:
        return key in known
    except TypeError:  # a size that is a symbol, as in PyTorch's fake tensors, cannot be looked up
        return False


def remember(key: tuple[Any, ...], known: dict[Any, None], /) -> None:
    """Note that a call has been judged; the oldest is forgotten where there are many."""
    with _lock, suppress(TypeError):  # as above
        if len(known) >= _KNOWN_CALLS:
            del known[next(iter(known))]
        known[key] = None


def is_compiling() -> bool:
    """Tell whether PyTorch is reading the code instead of running it; checks would only confuse it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


@contextmanager
def trace() -> Iterator[Trace]:
    """Record every step that runs inside.

    Yields:
        The calls by the name of their step, as in `steps["softmax"].result`.
    """
    steps = Trace()
    outer = _seam.get(None)
    token = _seam.set(_Seam(steps.calls.append, outer.substitutes if outer else {}))
    try:
        yield steps
    finally:
        _seam.reset(token)


@contextmanager
def substitute(**functions: Callable[..., Any]) -> Iterator[None]:
    """Run other functions in place of steps: `substitute(scale=my_scale)`.

    A substitute takes what the step takes, less the arguments that have their default, and returns what it returns; it
    may call the step itself.

    Args:
        **functions: the substitutes, by the name of the step.

    Raises:
        ConfigError: there is no such step, or a substitute is no function.
    """
    for name, function in functions.items():
        function_of(name, "substitute")
        if not callable(function):
            msg = f"substitute: {name}={function!r} must be a function."
            raise ConfigError(msg)
    outer = _seam.get(None)
    token = _seam.set(_Seam(outer.record if outer else None, {**(outer.substitutes if outer else {}), **functions}))
    try:
        yield
    finally:
        _seam.reset(token)


def function_of(name: str, owner: str, /) -> Callable[..., Any]:
    """Look up a step by name, for an owner who is named in the error if there is none."""
    if name not in _functions:
        raise ConfigError(f"{owner}: there is no step {name!r}; the steps are {', '.join(sorted(_functions))}.")
    return _functions[name]


def is_watched() -> bool:
    """Tell whether someone records the steps or has put others in their place, so that each of them must run."""
    return not is_compiling() and _seam.get(None) is not None


def step_of(function: Callable[..., Any], /) -> Step:
    """Look up what a step says of itself."""
    return function.__step__  # type: ignore[attr-defined, no-any-return]
