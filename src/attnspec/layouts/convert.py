"""From stored tensors to parameters and back."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from einops import rearrange

from ..arrays import A, backend_of
from ..errors import ConfigError, ShapeError
from ..spec.parameters import Heads, Parameters
from .table import LAYOUTS, Layout

_PARAMETERS = {field.name for field in fields(Parameters)}
_COUNTS = {"two": 2, "three": 3, "four": 4}
_HEADS, _SOURCES, _WIDTHS = {"h", "h_kv"}, {"d_model", "d_key_in", "d_value_in"}, {"d_k", "d_v"}
_OF_ROLE = {"q": ("h", "d_model", "d_k"), "k": ("h_kv", "d_key_in", "d_k"), "v": ("h_kv", "d_value_in", "d_v")}


def read(stored: Mapping[str, A], layout: Layout | str, heads: Heads, /) -> Parameters[A]:
    """Read the parameters from the tensors of another project.

    Args:
        stored: the tensors by name, of NumPy or PyTorch.
        layout: how they are laid out; the name of a project in `LAYOUTS`, or lines of one's own.
        heads: the sizes.

    Returns:
        The parameters; a bias that is not stored is None.

    Raises:
        ShapeError: a tensor does not have the size that its pattern and the sizes demand.
        ConfigError: a weight is not stored, or the layout has no place for a tensor.
    """
    lines = [_Line(held, *line) for held, line in _lines(layout).items()]
    if unknown := stored.keys() - {line.name for line in lines}:
        raise ConfigError(f"layouts: there is no place for {', '.join(sorted(unknown))} in this layout.")
    found: dict[str, A] = {}
    for line in lines:
        if line.name in stored:
            found |= line.take_apart(stored[line.name], heads)
        elif line.held.startswith("w_"):
            raise ConfigError(
                f"layouts: {line.name}, which holds {line.held}, is not stored; there are {', '.join(sorted(stored)) or 'none'}."
            )
    return Parameters(**found)


def write(parameters: Parameters[A], layout: Layout | str, /) -> dict[str, A]:
    """Lay the parameters out as another project stores them.

    Args:
        parameters: the parameters.
        layout: how they shall be laid out; the name of a project in `LAYOUTS`, or lines of one's own.

    Returns:
        The tensors by name.

    Raises:
        ConfigError: the layout has no place for an array that there is, or holds together what is there only in part.
    """
    left = {name: array for name, array in vars(parameters).items() if array is not None}
    stored: dict[str, A] = {}
    for line in (_Line(held, *rest) for held, rest in _lines(layout).items()):
        given = [part for part in line.parts if part in left]
        if given and given != line.parts:
            raise ConfigError(f"layouts: {line.name} holds {' and '.join(line.parts)}, but there is {' and '.join(given)} alone.")
        if given:
            stored[line.name] = line.put_together([left.pop(part) for part in given], parameters.heads)
    if left:
        raise ConfigError(f"layouts: there is no place for {' and '.join(left)} in this layout.")
    return stored


def _lines(layout: Layout | str) -> Layout:
    if not isinstance(layout, str):
        return layout
    if layout not in LAYOUTS:
        raise ConfigError(f"layouts: layout={layout!r} is not known; there are {', '.join(LAYOUTS)}.")
    return LAYOUTS[layout]


@dataclass(frozen=True)
class _Line:
    """One stored tensor: what it holds, what it is called, and how it is laid out."""

    held: str
    name: str
    pattern: str

    @property
    def words(self) -> list[str]:
        return re.findall(r"[a-z]\w*", self.pattern)

    @property
    def parts(self) -> list[str]:
        """What it holds: w_qkv is w_q, w_k and w_v."""
        if self.held in _PARAMETERS:
            return [self.held]
        kind, _, roles = self.held.rpartition("_")
        parts = [f"{kind}_{role}" for role in roles]
        if not set(parts) <= _PARAMETERS:
            raise ConfigError(
                f"layouts: {self.name} is said to hold {self.held}, which is none of the parameters, nor several, as w_qkv is."
            )
        return parts

    @property
    def stack(self) -> str:
        """The word that counts its parameters, if each has all its heads together."""
        return next((word for word in self.words if word in ("two", "three")), "")

    @property
    def outer(self) -> str:
        """The word before `part`: inside of what the heads of its parameters stand one behind the other."""
        before = self.words[: self.words.index("part")]
        return next((word for word in before if word in _HEADS or word in _COUNTS), "")

    @property
    def inside(self) -> str:
        """The axes of a parameter but for its heads, in the order of `Parameters`."""
        order = [*_SOURCES, "extra", *_WIDTHS]
        return " ".join(sorted((word for word in self.words if word in order), key=lambda word: (word in _WIDTHS, word == "extra")))

    @property
    def canonical(self) -> str:
        """All axes of a parameter, in the order of `Parameters`."""
        heads = next((word for word in self.words if word in _HEADS), "")
        if self.held == "w_o":
            return f"({heads} {next(word for word in self.words if word in _WIDTHS)}) d_model"
        return f"{heads or 1 if self.held.startswith('gain_') else heads} {self.inside}"

    def take_apart(self, tensor: A, heads: Heads) -> dict[str, A]:
        sizes = self.sizes(heads) | ({"extra": tensor.shape[1]} if "extra" in self.words and len(tensor.shape) > 1 else {})
        self.require_shape(tensor, sizes)
        if "part" in sizes:
            opened = rearrange(tensor, f"{self.pattern} -> part ({self.outer}) {self.inside}", **sizes)
            ends = [sum(self.counts(heads)[: index + 1]) for index in range(len(self.parts))]
            pieces = [opened[end - count : end] for end, count in zip(ends, self.counts(heads), strict=True)]
            return {part: rearrange(piece, "n outer ... -> (outer n) ...") for part, piece in zip(self.parts, pieces, strict=True)}
        opened = rearrange(tensor, f"{self.pattern} -> {self.stack or '1'} {self.canonical}", **sizes)
        return {part: opened[index] for index, part in enumerate(self.parts)}

    def put_together(self, arrays: list[A], heads: Heads) -> A:
        xp, sizes = backend_of(arrays[0]), self.sizes(heads)
        if "part" in sizes:
            counts = self.counts(heads)
            opened = tuple(rearrange(array, "(outer n) ... -> n outer ...", n=n) for array, n in zip(arrays, counts, strict=True))
            return rearrange(xp.concat(opened, axis=0), f"part ({self.outer}) {self.inside} -> {self.pattern}", **sizes)
        opened = tuple(array[None] for array in arrays)
        return rearrange(xp.concat(opened, axis=0), f"{self.stack or '1'} {self.canonical} -> {self.pattern}", **sizes)

    def sizes(self, heads: Heads) -> dict[str, int]:
        """The size of each word of the pattern."""
        self.require_equal(heads)
        known = vars(heads) | _COUNTS | ({"part": sum(self.counts(heads))} if "part" in self.words else {})
        if strange := [word for word in self.words if word not in known and word != "extra"]:
            raise ConfigError(
                f"layouts: {self.name} has {' and '.join(strange)} in its pattern {self.pattern}, but the words are {', '.join(known)}."
            )
        return {word: known[word] for word in self.words if word != "extra"}

    def counts(self, heads: Heads) -> list[int]:
        """How many heads of each parameter stand one behind the other."""
        outer = (vars(heads) | _COUNTS | {"": 1})[self.outer]
        named = {part: _OF_ROLE[part[-1]][0] for part in self.parts}
        for name in named.values():
            if (count := getattr(heads, name)) % outer:
                raise ConfigError(f"layouts: {self.name} keeps its heads in {outer} groups, which do not divide {name}={count}.")
        return [getattr(heads, name) // outer for name in named.values()]

    def require_equal(self, heads: Heads) -> None:
        """Refuse sizes that differ where one pattern stands for several parameters."""
        for names in zip(
            *(_OF_ROLE[part[-1]][1 if "part" in self.words else 0 :] for part in self.parts if len(self.parts) > 1), strict=True
        ):
            needed = [name for name in dict.fromkeys(names) if self.held.startswith("w_") or name not in _SOURCES]
            if len({getattr(heads, name) for name in needed}) > 1:
                got = " and ".join(f"{name}={getattr(heads, name)}" for name in needed)
                raise ConfigError(
                    f"layouts: {self.name} holds {' and '.join(self.parts)} under one pattern, so these must be equal: {got}."
                )

    def require_shape(self, tensor: A, sizes: Mapping[str, int]) -> None:
        axes = re.findall(r"\([^)]*\)|\S+", self.pattern)
        wanted = [math.prod(sizes.get(word, 1) for word in re.findall(r"[a-z]\w*", axis)) for axis in axes]
        got = tuple(tensor.shape)
        if len(got) != len(axes):
            raise ShapeError(f"layouts: {self.name} {got} has {len(got)} axes, but needs {len(axes)}: {self.pattern}.")
        for axis, size, demanded in zip(axes, got, wanted, strict=True):
            if size != demanded:
                known = ", ".join(f"{word}={sizes[word]}" for word in re.findall(r"[a-z]\w*", axis))
                raise ShapeError(f"layouts: {self.name} {got} has {axis}={size}, but {axis}={demanded} was set by heads ({known}).")
