"""Where a parameter is stored, and whether its pattern fits."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Self

from ..errors import ConfigError, ShapeError
from ..spec.parameters import Heads
from .tensors import nearest

_COUNTS = {"two": 2, "three": 3, "four": 4}
_KINDS = {"heads": ("h", "h_kv", "part"), "width": ("d_k", "d_v"), "source": ("d_model", "d_key_in", "d_value_in")}
_NEEDED = {"w": ("heads", "width", "source"), "b": ("heads", "width")}


@dataclass(frozen=True)
class Place:
    """Where a parameter is stored.

    Attributes:
        held: which parameter, or several.
        name: what it is called in the layout; with `{h}` in it, each head has its own.
        pattern: how a tensor is laid out; None where it is left as it is.
        tensors: the whole names of the tensors.
    """

    held: str
    name: str
    pattern: str | None
    tensors: tuple[str, ...] = ()

    @property
    def is_by_head(self) -> bool:
        """Whether each head has a tensor of its own."""
        return "{h}" in self.name

    @property
    def axis(self) -> str:
        """Which heads it is for."""
        return "h" if {"q", "o"} & set(self.held.rpartition("_")[2]) else "h_kv"

    @property
    def whole_pattern(self) -> str:
        """The pattern of all its tensors together."""
        return f"{self.axis} {self.pattern}" if self.is_by_head else self.pattern or ""

    @property
    def axes(self) -> list[str]:
        """The pattern of each axis."""
        return re.findall(r"\([^)]*\)|\S+", self.whole_pattern)

    def of_head(self, head: int) -> str:
        """What the tensor of one head is called."""
        return self.name.replace("{h}", str(head))

    def with_tensors(self, *tensors: str) -> Self:
        """Say which tensors these are."""
        return replace(self, tensors=tensors)


def words_of(pattern: str, /) -> list[str]:
    """The names of axes in a pattern."""
    return re.findall(r"[A-Za-z]\w*", pattern)


def require_pattern(place: Place, shape: tuple[int, ...], heads: Heads, /) -> None:
    """Hold the pattern of a parameter to the shape that is stored.

    Args:
        place: where the parameter is stored.
        shape: the shape, with all heads together.
        heads: the sizes.

    Raises:
        ConfigError: the pattern has a word that nobody knows, or lacks one.
        ShapeError: the pattern demands another shape; the message says which would fit.
    """
    sizes = vars(heads) | _COUNTS
    words, known = words_of(place.whole_pattern), (*sizes, "part", "extra")
    if strange := [word for word in words if word not in known]:
        raise ConfigError(f"layout: the pattern {place.pattern!r} of {place.held} has {strange[0]}; {nearest(strange[0], known)}.")
    for kind in _NEEDED.get(place.held[0], ()) if place.held != "b_o" and place.held[1] == "_" else ():
        if "part" not in words and not set(words) & set(_KINDS[kind]):
            some = " or ".join(word for word in _KINDS[kind] if word != "part")
            raise ConfigError(f"layout: the pattern {place.pattern!r} of {place.held} lacks {some}, even if that is 1.")
    if {"part", "extra"} & set(words):
        return  # what these count is left to the layout
    wanted = tuple(math.prod(sizes[word] for word in words_of(axis)) for axis in place.axes)
    if wanted != shape:
        raise ShapeError(f"layout: {place.held} is stored as {place.name} {shape}, but {_differ(place, shape, wanted, sizes)}.")


def _differ(place: Place, shape: tuple[int, ...], wanted: tuple[int, ...], sizes: Mapping[str, int]) -> str:
    """Say how a pattern and a shape differ, and what would fit."""
    if len(shape) != len(wanted):
        return f"its pattern {place.whole_pattern!r} has {len(wanted)} axes"
    index = next(index for index, size in enumerate(shape) if size != wanted[index])
    axis = place.axes[index]
    declared = ", ".join(f"{word}={sizes[word]}" for word in words_of(axis))
    said = f"{axis} of its pattern is {wanted[index]} ({declared})"
    turned = next((order for order in permutations(range(len(shape))) if tuple(wanted[at] for at in order) == shape), None)
    if turned is not None:
        return f"{said}; {' '.join(place.axes[at] for at in turned)!r} would fit"
    hints = _hints(words_of(axis), shape[index], sizes)
    return f"{said}; {' or '.join(hints)} would fit" if hints else said


def _hints(words: list[str], size: int, sizes: Mapping[str, int]) -> list[str]:
    """Which words, or which sizes of words, would give an axis its size."""
    instead, resized = [], []
    for word in words:
        rest = math.prod(sizes[other] for other in words) // sizes[word]
        if size % rest == 0 and word not in _COUNTS:
            kind = next(kind for kind in _KINDS.values() if word in kind)
            instead += [f"{other} for {word}" for other in kind if other in sizes and sizes[other] == size // rest]
            resized.append(f"{word}={size // rest}")
    for count, times in _COUNTS.items():
        if not set(words) & set(_COUNTS) and size == times * math.prod(sizes[word] for word in words):
            instead.append(f"one more word, {count},")
    return instead or resized
