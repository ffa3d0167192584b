"""Array annotations, read as data from their text.

jaxtyping keeps the text of a shape (`dim_str`) but not its parsed form in public, so the text is parsed here; a
test compares this parser with jaxtyping's own.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import AbstractArray

from .errors import ConfigError


@dataclass(frozen=True)
class Axis:
    """One axis of an annotation.

    Attributes:
        text: its name, its size or the expression that gives its size; empty where anything is allowed.
        broadcast: `#`, size 1 stands for any size.
        variadic: `*` or `...`, any number of axes.
        anonymous: `_` or `...`, the name is a comment and binds nothing.
        per_leaf: `?`, bound anew for each leaf of a tree.
        label: the words before `=`, a comment on a size.
    """

    text: str
    broadcast: bool = False
    variadic: bool = False
    anonymous: bool = False
    per_leaf: bool = False
    label: str = ""

    @property
    def is_name(self) -> bool:
        """Whether the axis is a plain name."""
        return self.text.isidentifier()

    @property
    def names(self) -> frozenset[str]:
        """The names whose sizes give this axis its size."""
        return frozenset() if self.anonymous else frozenset(re.findall(r"[^\W\d]\w*", self.text))

    def __str__(self) -> str:
        marks = "#" * self.broadcast + "*" * self.variadic + "_" * self.anonymous + "?" * self.per_leaf
        label = f"{self.label}=" if self.label else ""
        return "..." if self.variadic and self.anonymous and not self.text else f"{marks}{label}{self.text}"


@dataclass(frozen=True)
class Shape:
    """The axes of one array annotation, and the kind of number that the array holds (`Float`, `Bool`, ...)."""

    axes: tuple[Axis, ...]
    kind: str

    def __str__(self) -> str:
        return " ".join(map(str, self.axes))


def parse(text: str, /) -> tuple[Axis, ...]:
    """Read the text of a shape.

    Args:
        text: axes separated by blanks, in jaxtyping's notation.

    Returns:
        The axes in order.

    Raises:
        ConfigError: jaxtyping does not allow this text either.
    """
    axes = tuple(_parse_axis(word) for word in text.split())
    if sum(axis.variadic for axis in axes) > 1:
        raise _malformed(text, "at most one axis can stand for several")
    return axes


_MARKS = {"#": "broadcast", "*": "variadic", "_": "anonymous", "?": "per_leaf"}


def _parse_axis(word: str) -> Axis:
    if "..." in word:
        if word != "...":
            raise _malformed(word, "'...' stands alone")
        return Axis("", variadic=True, anonymous=True)
    if ("," in word and "(" not in word) or word.endswith("#"):
        raise _malformed(word, "axes are separated by blanks, and # comes first")
    rest, label, marks = word, "", dict.fromkeys(_MARKS.values(), False)
    while rest[:1] in _MARKS or rest.count("=") == 1:
        if rest[:1] in _MARKS:
            mark = _MARKS[rest[0]]
            if marks[mark]:
                raise _malformed(word, f"{rest[0]} is given twice")
            marks[mark], rest = True, rest[1:]
        else:
            label, rest = rest.split("=")
    named = not rest or rest.isidentifier()
    if named and marks["broadcast"] and marks["anonymous"]:
        raise _malformed(word, "an axis without a name has no size to broadcast to")
    if not named and (marks["variadic"] or marks["anonymous"] or marks["per_leaf"]):
        raise _malformed(word, "a size or an expression takes no mark but #")
    return Axis(rest, label=label, **marks)


def _malformed(text: str, reason: str) -> ConfigError:
    return ConfigError(f"the shape {text!r} is malformed: {reason}")


def evaluate(expression: str, sizes: Mapping[str, Any], /) -> Any:
    """Work out the size of an axis, or a cost, from the sizes of the axes that it names.

    Args:
        expression: a size, a name or arithmetic on them, as annotations write it: `h*d_v`.
        sizes: the size of each name. It may hold an expression instead, `h*d_v`, which then stands in brackets.

    Returns:
        The size, a whole number, or a symbol where the sizes are symbols.

    Raises:
        ConfigError: a name has no size.
    """
    if expression in sizes:
        return sizes[expression]
    names = {name: size for name, size in sizes.items() if name.isidentifier()}
    for text in sizes.keys() - names.keys():  # an expression that counts as one name
        names[stand_in := f"size{len(names)}"] = sizes[text]
        expression = expression.replace(f"({text})", stand_in)
    try:
        return eval(expression, {}, names)  # noqa: S307  # the text of an annotation is code already
    except NameError as error:
        msg = f"{expression} cannot be worked out: {error.name} is not among {', '.join(sizes) or 'no sizes'}"
        raise ConfigError(msg) from None


def shapes_of(function: Callable[..., Any], /) -> dict[str, tuple[Shape, ...]]:
    """Read the shapes of a function or dataclass from its jaxtyping annotations.

    Args:
        function: any annotated function, or a class whose fields are annotated.

    Returns:
        For each argument that holds an array, and for `return`, its shapes, which are one, or one for each alternative of a
        union. An array inside a tuple or a dataclass has a path as its name: `return[0]`, `parameters.w_q`.

    Raises:
        NameError: an annotation is a string that names something unknown.
    """
    found: dict[str, tuple[Shape, ...]] = {}
    for name, hint in typing.get_type_hints(function).items():
        for path, leaf in leaves(name, hint):
            if is_array(leaf) and (shape := shape_of(leaf)) not in found.get(path, ()):
                found[path] = (*found.get(path, ()), shape)
    return found


def shape_of(annotation: Any, /) -> Shape:
    """Read the shape of one jaxtyping annotation, `Float[Array, "batch seq"]`."""
    return Shape(parse(annotation.dim_str), annotation.dtype.__name__)


def is_array(hint: Any, /) -> bool:
    """Tell whether a type hint is a jaxtyping annotation."""
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def alternatives(hint: Any, /) -> tuple[Any, ...]:
    """Take a type hint apart into the members of its union, `None` left out."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(member for member in typing.get_args(hint) if member is not type(None))
    return (hint,)


def is_optional(hint: Any, /) -> bool:
    """Tell whether a type hint allows `None`."""
    return type(None) in typing.get_args(hint)


def leaves(path: str, hint: Any, /) -> Iterator[tuple[str, Any]]:
    """Walk through a type hint, into unions, tuples and the fields of dataclasses, to the hints that hold no others."""
    for member in alternatives(hint):
        origin = typing.get_origin(member) or member
        if origin is tuple:
            for index, item in enumerate(typing.get_args(member)):
                yield from leaves(f"{path}[{index}]", item)
        elif dataclasses.is_dataclass(origin):
            for name, item in typing.get_type_hints(origin).items():
                yield from leaves(f"{path}.{name}", item)
        else:
            yield path, member
