"""What the annotations of a function promise about the sizes of its arrays, and who sets which size.

An axis has the size that the first argument gives it. Settings come before arrays: a whole-number argument with the
name of an axis sets that axis (`h=8`), and so does such a field of a dataclass argument (`heads.h`). An expression of
axes that nothing sets one by one (`h*d_v` where neither `h` nor `d_v` stands alone) counts as one name.
"""

import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .axes import Axis, Shape, evaluate, is_array, leaves, shape_of

Sizes = dict[str, tuple[Any, str]]
"""For each axis its size, and who set it."""


@dataclass(frozen=True)
class Field:
    """A place in a call where an array or a setting is expected: an argument, or a field of one."""

    path: str
    hint: Any

    @property
    def name(self) -> str:
        """The last word of the path."""
        return self.path.rpartition(".")[2]

    @property
    def argument(self) -> str:
        """The first word of the path."""
        return self.path.partition(".")[0]

    def of(self, arguments: Mapping[str, Any], /) -> Any:
        """Look up what was given here; None if nothing was."""
        value = arguments.get(self.argument)
        for name in self.path.split(".")[1:]:
            value = None if value is None else getattr(value, name)
        return value


@dataclass(frozen=True)
class Entry:
    """An array in a call: what it is called, what was promised and what was given."""

    label: str
    shape: Shape
    hint: Any
    value: Any

    def __str__(self) -> str:
        return f"{self.label} {tuple(self.value.shape)}"


BUILT = "when the layer was built"
"""Who set the sizes of an argument called `layer`."""


def _setting(setter: str) -> str:
    return setter if setter == BUILT else f"by {setter}"


class Conflict(Exception):  # noqa: N818  # it is caught and turned into an error
    """An argument contradicts those before it, on one axis or in the number of its axes."""

    def __init__(self, reason: str, entry: Entry, axis: str = "") -> None:
        super().__init__(reason)
        self.entry = entry
        self.axis = axis


class Signature:
    """The promises of a function, or of the fields of a dataclass.

    They are read at first use, since reading them takes longer than importing this package.
    """

    def __init__(self, owner: Any, /) -> None:
        self.name: str = owner.__name__
        self._owner = owner
        self._promises: dict[Any, tuple[Shape, Any]] = {}

    @cached_property
    def _parameters(self) -> inspect.Signature:
        return inspect.signature(self._owner)

    @cached_property
    def hints(self) -> dict[str, Any]:
        """The type hint of each argument, and of the result under `return`."""
        return typing.get_type_hints(self._owner)

    @cached_property
    def _fields(self) -> list[Field]:
        found = (Field(*leaf) for name, hint in self.hints.items() if name != "return" for leaf in leaves(name, hint))
        return [field for field in found if "[" not in field.path]  # what a tuple holds is not checked

    @cached_property
    def arrays(self) -> list[Field]:
        """The places of arrays, in the order in which they set sizes.

        The fields of a dataclass come first, since what is kept outlives what is passed; arrays with an expression to
        work out come last, when its names have sizes.
        """

        def rank(field: Field) -> tuple[bool, bool]:
            return any(map(self._is_worked_out, shape_of(field.hint).axes)), field.path == field.argument

        return sorted((field for field in self._fields if is_array(field.hint)), key=rank)

    @cached_property
    def settings(self) -> list[Field]:
        """The places of whole numbers."""
        return [field for field in self._fields if field.hint is int]

    @cached_property
    def options(self) -> dict[str, Any]:
        """The type hints of the arguments that are neither arrays nor dataclasses."""
        others = {"return", *(field.argument for field in self._fields if field.path != field.argument or field in self.arrays)}
        return {name: hint for name, hint in self.hints.items() if name not in others}

    @cached_property
    def _alone(self) -> frozenset[str]:
        axes = {axis.text for field in self._fields if is_array(field.hint) for axis in shape_of(field.hint).axes}
        return frozenset(axes | {field.name for field in self.settings})

    def _is_worked_out(self, axis: Axis) -> bool:
        return not axis.is_name and axis.names <= self._alone

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> dict[str, Any]:
        """Name the arguments of a call; a TypeError says which are missing or too many."""
        try:
            return self._parameters.bind(*args, **kwargs).arguments
        except TypeError as error:
            msg = f"{self.name}: {error}."
            raise TypeError(msg) from None

    def without_defaults(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Leave out the arguments of a call that are what they would be by default."""
        bound = self._parameters.bind(*args, **kwargs)
        for name, parameter in self._parameters.parameters.items():
            if name in bound.arguments and bound.arguments[name] is parameter.default:
                del bound.arguments[name]
        return bound.args, bound.kwargs

    def entries(self, arguments: Mapping[str, Any], /) -> list[Entry]:
        """Pick the arrays out of the arguments, in the order in which they set sizes."""
        given = ((field, field.of(arguments)) for field in self.arrays)
        return [self.entry(field.path, field.hint, value) for field, value in given if hasattr(value, "shape")]

    def entry(self, label: str, hint: Any, value: Any, /) -> Entry:
        """Put an array beside its annotation, in which an expression that nothing sets is written as one name."""
        if hint not in self._promises:  # made once, since jaxtyping and beartype keep what they make of each annotation
            self._promises[hint] = self._promise(hint)
        return Entry(label, *self._promises[hint], value)

    def _promise(self, hint: Any) -> tuple[Shape, Any]:
        shape = shape_of(hint)
        if all(axis.is_name or self._is_worked_out(axis) for axis in shape.axes):
            return shape, hint
        words = (str(axis) if self._is_worked_out(axis) else re.sub(r"[^\w#]", "_", str(axis)) for axis in shape.axes)
        return shape, hint.dtype[hint.array_type, " " + " ".join(words)]

    def settled(self, arguments: Mapping[str, Any], /) -> Sizes:
        """Pick the sizes that settings fix out of the arguments."""
        given = ((field, field.of(arguments)) for field in self.settings)
        known = ((field, size) for field, size in given if size is not None and not hasattr(size, "shape"))
        return {field.name: (size, BUILT if field.argument == "layer" else field.path) for field, size in known}

    def bind(self, entries: Iterable[Entry], settled: Sizes, /) -> Sizes:
        """Give each axis the size of the first array that has it.

        Args:
            entries: the arrays, in the order in which they set sizes.
            settled: the sizes that are fixed before.

        Returns:
            All sizes.

        Raises:
            Conflict: an array contradicts what was set before it.
        """
        sizes = dict(settled)
        for entry in entries:
            axes, got = entry.shape.axes, tuple(entry.value.shape)
            if len(axes) != len(got):
                raise Conflict(self._wrong_rank(entry, sizes), entry)
            for axis, size in zip(axes, got, strict=True):
                if axis.broadcast and size == 1:
                    continue
                known, setter = self.size(axis, sizes) or sizes.setdefault(axis.text, (size, str(entry)))
                if known != size:
                    reason = f"{entry} has {axis.text}={size}, but {axis.text}={known} was set {_setting(setter)}"
                    raise Conflict(reason, entry, axis.text)
        return sizes

    def size(self, axis: Axis, sizes: Sizes, /) -> tuple[Any, str] | None:
        """Look up or work out the size of an axis, and who set it; None while it is open."""
        if axis.text in sizes or not axis.names <= sizes.keys():
            return sizes.get(axis.text)
        setters = dict.fromkeys(sizes[name][1] for name in sorted(axis.names))
        size = evaluate(axis.text, {name: size for name, (size, _) in sizes.items()})
        return size, " and ".join(setters) or "the annotation"

    def _wrong_rank(self, entry: Entry, sizes: Sizes) -> str:
        known = [(axis, self.size(axis, sizes)) for axis in entry.shape.axes]
        wanted = ", ".join(axis.text + (f"={size[0]}" if size else "") + " or 1" * axis.broadcast for axis, size in known)
        rank = len(entry.value.shape)
        return f"{entry} has {rank} {'axis' if rank == 1 else 'axes'}, but needs {len(known)}: ({wanted})"
