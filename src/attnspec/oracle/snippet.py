"""A counterexample as code that can be pasted."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from .problem import Array, Crash
from .subject import Subject
from .verdict import Verdict

_LITERAL = 400
"""Arrays of up to this many numbers are written out."""


def snippet(subject: Subject, verdict: Verdict, recipes: Mapping[str, str], /) -> str:
    """Write code that shows a wrong answer.

    Args:
        subject: the implementation.
        verdict: the verdict on its answer.
        recipes: how parameters are drawn, by name, where they need not be written out.

    Returns:
        Python code with NumPy and the call.
    """
    problem, precision = verdict.question.problem, verdict.question.precision
    lines = ["import numpy as np", "nan, inf = np.nan, np.inf", ""]
    sizes = ", ".join(f"{name}={size}" for name, size in problem.sizes.items())
    lines.append(f"# {sizes}; seed {problem.seed}, {precision}; arrays as the specification names them")
    values = subject.arguments_in_numpy(problem)
    names = {id(array): name for name, array in reversed(values.items()) if isinstance(array, np.ndarray)}
    for name, value in values.items():
        lines.append(f"{name} = {names[id(value)] if names.get(id(value), name) != name else _written(value)}")
    if problem.parameters is not None:
        given = [(f.name, getattr(problem.parameters, f.name)) for f in fields(problem.parameters)]
        lines += [f"{name} = {recipes.get(name) or _written(array)}" for name, array in given if array is not None]
        lines.append("# put these parameters into the layer, as its layout says (attnspec.layouts.write does it), then call it")
    call = ", ".join(f"{name}={name}" for name in values)
    lines += ["", f"got = {subject.call_text}({call})  # each array in the dtype and library of the implementation"]
    expected = verdict.question.expected.y
    lines.append(f"expected = {_written(expected)}")
    if isinstance(verdict.answer, Crash):
        lines.append(f"# it raises {verdict.answer.error}")
    elif verdict.answer.y.shape == expected.shape:
        lines.append(f"# got is {_written(verdict.answer.y)}")
    else:
        lines.append(f"# the shape of got is {verdict.answer.y.shape}")
    return "\n".join(lines)


def _written(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    if value.size > _LITERAL:
        return f"...  # {value.size} numbers, drawn; the report as JSON has them all"
    return f"np.array({_listed(value)})"


def _listed(array: Array) -> str:
    return repr(array.tolist()).replace("'", "")
