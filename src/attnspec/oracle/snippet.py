"""A counterexample as code that can be pasted: it makes the call that goes wrong, and shows by how much."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .problem import Array, Crash, Problem
from .subject import Subject
from .verdict import Verdict
from .walk import is_torch

_LITERAL = 400
"""Inputs and outputs of up to this many numbers are written out."""

_STORED = 2500
"""The same of tensors that cannot be drawn by a line."""


def snippet(subject: Subject, verdict: Verdict, recipes: Mapping[str, str], /) -> str:
    """Write code that shows a wrong answer.

    Args:
        subject: the implementation.
        verdict: the verdict on its answer.
        recipes: how tensors of the implementation are drawn, by name, where they need not be written out.

    Returns:
        Python code; where a layer, or how it is called, is not known as code, a line says what to write there.
    """
    problem, precision = verdict.question.problem, verdict.question.precision
    is_native = subject.library.name in ("numpy", "torch") and (problem.parameters is None or _takes_state(subject, problem))
    lines = ["import numpy as np", "nan, inf = np.nan, np.inf"]
    if subject.library.name == "torch":
        lines.insert(1, "import torch")
    if not is_native:
        lines.append("from attnspec.oracle.libraries import LIBRARIES")
    sizes = ", ".join(f"{name}={size}" for name, size in problem.sizes.items())
    lines += ["", f"# {sizes}; seed {problem.seed}, {precision}"]
    if not is_native:
        lines.append(f"library = LIBRARIES[{subject.library.name!r}]")
    if problem.parameters is not None:
        lines += _layer(subject, problem, precision, recipes, is_native=is_native)
    lines += _inputs(subject, problem, precision, is_native=is_native)
    lines += ["", *_call(subject, problem, is_native=is_native)]
    return "\n".join([*lines, *_ending(verdict)])


def completed(code: str, name: str, target: str, arguments: str | None, call: str | None, /) -> str:
    """Put into the code how the implementation is made and called, where that is known as text.

    Args:
        code: what `snippet` wrote.
        name: what the implementation is called.
        target: the implementation, as `module:attribute`.
        arguments: what the attribute is called with, as text; None where it is taken as it is.
        call: how it is called, as an expression.

    Returns:
        The code with lines in the place of those that say what to write.
    """
    module, _, path = target.partition(":")
    made = f"{module}.{path}" + ("" if arguments is None else f"({arguments})")
    code, found = re.subn(r"(?m)^(?:from .* import .*\n)?layer = .*# .*$", lambda _: f"import {module}\nlayer = {made}", code)
    if not found:  # a function, which is called by its name
        code = code.replace("\n\n", f"\nimport {module}\n\n{_function(name)} = {made}\n", 1)
    return code if call is None else re.sub(r"(?m)YOUR_CALL  # .*$", lambda _: call, code)


def _function(name: str) -> str:
    return name if name.isidentifier() else "attention"


def _takes_state(subject: Subject, problem: Problem) -> bool:
    """Tell whether a module of PyTorch takes its tensors as a state dict."""
    if subject.load is None or not is_torch(subject.target):
        return False
    return set(subject.load.tensors(problem.parameters)) <= set(subject.target.state_dict())


def _layer(subject: Subject, problem: Problem, precision: str, recipes: Mapping[str, str], *, is_native: bool) -> Iterator[str]:
    kind = type(subject.target)
    if "<locals>" not in kind.__qualname__ and kind.__module__ != "__main__":
        yield f"from {kind.__module__} import {kind.__qualname__.partition('.')[0]}"
    yield f"layer = {kind.__qualname__.rpartition('<locals>.')[2]}(...)  # write here what you make it with"
    tensors = {} if subject.load is None else subject.load.tensors(problem.parameters)
    called = {} if is_native or subject.load is None else subject.load.called
    yield "tensors = {"
    yield from (f"    {called.get(name, name)!r}: {recipes.get(name) or _written(array, most=_STORED)}," for name, array in tensors.items())
    yield "}"
    if is_native:
        yield f"layer = layer.to(torch.{precision}).eval()"
        yield "layer.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()}, strict=False)"
    else:
        yield "from attnspec.oracle.stores import cast, set_stored, set_training"
        yield f"layer = set_stored(cast(layer, {precision!r}, library), tensors, library, {precision!r})"
        yield "set_training(layer, False)"


def _inputs(subject: Subject, problem: Problem, precision: str, *, is_native: bool) -> Iterator[str]:
    values = subject.arguments_in_numpy(problem)
    names = {id(array): name for name, array in reversed(values.items()) if isinstance(array, np.ndarray)}
    for name, value in values.items():
        if not isinstance(value, np.ndarray):
            yield f"{name} = {value!r}"
        elif names[id(value)] != name:
            yield f"{name} = {names[id(value)]}"
        elif value.size > _LITERAL or not is_native:
            yield f"{name} = {_written(value) if is_native else f'library.give({_written(value)}, {precision!r})'}"
        else:
            yield f"{name} = {_native(value, subject.library.name, precision)}"


def _native(value: Array, library: str, precision: str) -> str:
    is_float = value.dtype == np.float64
    if library == "torch":
        return f"torch.tensor({_listed(value)}{f', dtype=torch.{precision}' if is_float else ''})"
    return f"np.array({_listed(value)}{f', dtype=np.{precision}' if is_float and precision != 'float64' else ''})"


def _call(subject: Subject, problem: Problem, *, is_native: bool) -> Iterator[str]:
    target = "layer" if problem.parameters is not None else _function(subject.name)
    names = list(subject.arguments_in_numpy(problem))
    given = ", ".join(f"{name}={name}" for name in names)
    if not subject.signature.direct:
        yield _adapter(subject.call, subject.signature.places)
        given = f"{target}, {given}"
    called = f"{target if subject.signature.direct else 'call'}({given})"
    watched = f"torch.set_grad_enabled({problem.seed % 2 == 0})" if subject.library.name == "torch" else "library.working()"
    if is_native and subject.library.name == "numpy":
        yield f"got = {called}"
    else:
        yield f"with {watched}:"
        yield f"    got = {called}"
    yield "got = got[0] if isinstance(got, tuple | list) else got"
    if not is_native:
        yield "got = library.take(got)"
    elif subject.library.name == "torch":
        yield "got = got.detach().double().numpy()"
    if not problem.is_layer and subject.order == "bshd":
        yield "got = got.swapaxes(1, 2)  # batch, h, seq, d_v"


def _adapter(call: Callable[..., Any], places: tuple[tuple[str, str], ...]) -> str:
    """How an implementation is called, as a function: imported where that can be, else to be written."""
    name, module = getattr(call, "__qualname__", "<"), getattr(call, "__module__", None)
    if inspect.isfunction(call) and module not in (None, "__main__") and name.isidentifier():
        return f"from {module} import {name} as call"
    arguments = ", ".join(("m", *(name for name, _ in places)))
    return f"call = lambda {arguments}: YOUR_CALL  # write here what you gave as call="


def _ending(verdict: Verdict) -> Iterator[str]:
    expected, answer = verdict.question.expected.y, verdict.answer
    if isinstance(answer, Crash):
        yield f"# it raises {answer.error}"
        return
    yield f"expected = {_written(expected)}"
    if answer.y.shape != expected.shape:
        yield 'print("shapes:", got.shape, "instead of", expected.shape)'
        yield f"# the shape of got is {answer.y.shape}"
        return
    limit = verdict.question.limit
    finite = float(np.max(limit, initial=0.0, where=np.isfinite(limit)))
    yield f'print("off by up to", np.abs(got - expected).max(), "where rounding explains at most {finite:.2g}")'
    yield f"# got is {_listed(answer.y) if answer.y.size <= _LITERAL else 'as the report as JSON has it'}"


def _written(value: Array, *, most: int = _LITERAL) -> str:
    if value.size > most:
        return f"...  # {value.size} numbers, drawn; the report as JSON has them all"
    return f"np.array({_listed(value)})"


def _listed(array: Array) -> str:
    return repr(array.tolist())
