"""A Griffe extension: each function of the specification shows its axes, its laws, and links to the sources that it names."""

import ast
from collections.abc import Iterator
from typing import Any

import griffe

from attnspec.axes import Axis, parse
from attnspec.bookkeeping.glossary import GLOSSARY

from .laws import reference_to
from .sources import linked
from .writing import table

_ARRAYS = {"Bool", "Float", "Int", "Integer", "Num", "Real", "Shaped"}


def axes_in(expression: Any, /) -> Iterator[Axis]:
    """Read the axes of the arrays in an annotation.

    Args:
        expression: the annotation, as Griffe parses it.

    Yields:
        The axes, in order.

    Raises:
        ValueError: the text of a shape has lost its quotes.
    """
    match expression:
        case griffe.ExprSubscript(left=griffe.ExprName(name=kind), slice=griffe.ExprTuple(elements=[_, text])) if kind in _ARRAYS:
            if not isinstance(text, str):
                raise ValueError(f"the shape {text} in {expression} is no string; write it with a leading blank.")  # noqa: TRY004
            yield from parse(ast.literal_eval(text))
        case griffe.Expr():
            for child in expression.iterate(flat=False):
                if child is not expression:
                    yield from axes_in(child)


def axis_link(name: str, /) -> str:
    """Link the names in an axis to the glossary.

    Raises:
        ValueError: a name is not in the glossary.
    """
    for word in Axis(name).names:
        if word not in GLOSSARY:
            raise ValueError(f"the axis {word!r} has no entry in attnspec.bookkeeping.glossary.")
    return f"[`{name}`][axis-{name}]" if name in GLOSSARY else f"`{name}`"


class Shapes(griffe.Extension):
    """Fills in docstrings what annotations, tests and sources say."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Add to the docstring of one function of the specification."""
        if func.docstring is None or not func.path.startswith("attnspec.spec."):
            return
        try:
            summary, *sections = [self._filled(section) for section in func.docstring.parsed]
            if any(str(decorator.value).startswith("step(") for decorator in func.decorators):  # its page begins with the first sentence
                summary.value = summary.value.partition("\n\n")[2]
            sections = [section for section in (summary, griffe.DocstringSectionText(self._axes(func)), *sections) if section.value]
        except ValueError as error:
            raise ValueError(f"{func.path}: {error}") from error
        func.docstring.parsed[:] = sections

    def _filled(self, section: griffe.DocstringSection) -> griffe.DocstringSection:
        if isinstance(section, griffe.DocstringSectionAdmonition) and section.title == "Laws":
            lines = [line for line in section.value.contents.splitlines() if line.strip()]
            return griffe.DocstringSectionText("\n".join(["**Laws**", "", *(f"- {reference_to(line.strip())}" for line in lines)]))
        if isinstance(section, griffe.DocstringSectionText):
            return griffe.DocstringSectionText(linked(section.value))
        return section

    def _axes(self, func: griffe.Function) -> str:
        users: dict[str, dict[str, None]] = {}
        annotations = [(parameter.name, parameter.annotation) for parameter in func.parameters]
        for user, annotation in [*annotations, ("result", func.returns)]:
            for axis in axes_in(annotation):
                if axis.text:
                    users.setdefault(axis.text, {})[f"`{user}`" + " (or size 1)" * axis.broadcast] = None
        rows = [(axis_link(axis), ", ".join(who)) for axis, who in users.items()]
        return f"**Axes**\n\n{table(('axis', 'shared by'), rows, numbers_from=2)}" if rows else ""
