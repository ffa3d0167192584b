"""Parameters are put into an implementation by a layout, which says which of its tensors holds what."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import numpy as np

from ..errors import ConfigError, ShapeError
from ..layouts import LAYOUTS, read, write
from ..spec.parameters import Heads, Parameters
from .libraries import Library
from .places import Place, require_pattern
from .problem import Array
from .tensors import attribute, cast, find, is_parameter, nearest, set_stored, set_training, stored, tensors_of
from .walk import is_of

__all__ = ["Lines", "Loader", "cast", "set_stored", "set_training", "stored"]

Lines = Mapping[str, tuple[str, str | None]]
"""What is held: what it is called, and how it is laid out; without a pattern it is a tensor to be left as it is."""

IDENTITY = "no output projection"
_HELD = re.compile(r"w_o|b_o|[wb]_(?!.*(.).*\1)[qkv]{1,3}|gain_[qk]|extra_[kv]|sinks|gates")
_EXAMPLES = ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o", "w_qkv", "b_qkv", "w_kv", "b_kv", "sinks", "gates")


class Loader:
    """Puts parameters into an implementation.

    Attributes:
        heads: the sizes.
        template: parameters of the shapes that are stored, all zeros; without an output projection, `w_o` is the identity.
        fixed: the names of parameters that must stay as they are in the template.
        extra: further tensors that are put in, by name, which hold none of the parameters.
    """

    def __init__(self, target: Any, heads: Heads, layout: Lines | str, library: Library) -> None:
        """Find the tensor of each parameter.

        Args:
            target: the implementation; its tensors must have their shapes.
            heads: the sizes.
            layout: which tensor holds what, by einops patterns of the stored shapes; or the name of a layout in
                `attnspec.layouts.LAYOUTS`. A name with `{h}` in it stands for one tensor for each head; a pattern None
                says to leave the tensors of this name as they are.
            library: whose arrays the implementation takes.

        Raises:
            ConfigError: there is no tensor of a name, a word is not known, or a parameter is not mentioned.
            ShapeError: a tensor does not have the size that its pattern and the sizes demand.
        """
        self.heads, self._library = heads, library
        known = tensors_of(target)
        if not known:
            raise ConfigError("layout: the implementation has no floating-point tensors; if they are made in a call, call it once.")
        lines = _lines(layout)
        found = [_place(Place(held, *line), target, known, heads, named=isinstance(layout, str)) for held, line in lines.items()]
        self._places = [place for place in found if place is not None]
        _require_all_mentioned(target, self._places, lines, known)
        zeros = _zeros(self._places, stored(target))
        for place in self._places:
            require_pattern(place, zeros[place.name].shape, heads)
        self._layout = {place.held: (place.name, place.whole_pattern) for place in self._places}
        self.fixed = frozenset({"w_o"} - self._layout.keys())
        self.extra: dict[str, Array] = {}
        self.template = read(zeros | self._without_output(), self._layout, heads)
        self._zero_extra = is_of(target, "torch", "nn", "MultiheadAttention") and target.add_zero_attn
        if self._zero_extra:
            self.template = _with_zero_extra(self.template)
            self.fixed |= {"extra_k", "extra_v"}

    def _without_output(self) -> dict[str, Array]:
        if not self.fixed:
            return {}
        width, d_model = self.heads.h * self.heads.d_v, self.heads.d_model
        if width != d_model:
            raise ShapeError(
                f"layout: there is no w_o, so the heads side by side are the output; but h*d_v={width} and d_model={d_model} differ."
            )
        self._layout["w_o"] = (IDENTITY, "(h d_v) d_model")
        return {IDENTITY: np.eye(width)}

    def __call__(self, target: Any, parameters: Parameters[Array], precision: str, /) -> Any:
        """Put parameters in.

        Args:
            target: the implementation, which is changed where it can be.
            parameters: the parameters; a bias that is None is put in as zeros where there is room for one.
            precision: the dtype.

        Returns:
            The implementation with them: the same object, or a copy.
        """
        return set_stored(
            target, {self.called.get(name, name): a for name, a in self.tensors(parameters).items()}, self._library, precision
        )

    @property
    def called(self) -> dict[str, str]:
        """What the layout calls each tensor, by its whole name; a copy may have other whole names."""
        return {whole: place.of_head(head) for place in self._places for head, whole in enumerate(place.tensors)}

    def tensors(self, parameters: Parameters[Array], /) -> dict[str, Array]:
        """Lay parameters out as they are stored: the tensors by their whole names."""
        zeros = {name: array for name, array in vars(self.template).items() if name.startswith("b_")}
        given = {name: zeros.get(name) if array is None else array for name, array in vars(parameters).items()}
        if self._zero_extra:
            extras = {name: given[name][:, :-1] for name in ("extra_k", "extra_v")}  # type: ignore[index]  # the template has them
            given |= {name: extra if extra.shape[1] else None for name, extra in extras.items()}
        laid_out = write(Parameters(**given), self._layout)
        tensors: dict[str, Array] = {}
        for place in self._places:
            array = laid_out[place.name]
            tensors |= dict(zip(place.tensors, array if place.is_by_head else [array], strict=True))
        return tensors | self.extra

    def redrawn(self, parameters: Parameters[Array], draw: Callable[[str, tuple[int, ...]], Array], /) -> Parameters[Array]:
        """Draw the tensors of weights and biases anew, and read the parameters from them.

        Args:
            parameters: the parameters as they were.
            draw: gives a tensor by its name and shape.

        Returns:
            The parameters; as they were where keys of zeros are put behind the learnt ones, which are drawn once.
        """
        if self._zero_extra:
            return parameters
        tensors = self.tensors(parameters)
        drawn = {
            name: draw(name, tensors[name].shape) for place in self._places for name in place.tensors if place.held[:2] in ("w_", "b_")
        }
        tensors |= drawn
        whole = {p.name: np.stack([tensors[n] for n in p.tensors]) if p.is_by_head else tensors[p.tensors[0]] for p in self._places}
        return read(whole | self._without_output(), self._layout, self.heads)


def _with_zero_extra(template: Parameters[Array]) -> Parameters[Array]:
    """Put a key and a value of zeros behind the extra ones; those that are learnt are drawn once, as all of them stay."""
    sizes, extras = template.heads, {}
    for name, width in (("extra_k", sizes.d_k), ("extra_v", sizes.d_v)):
        learnt = getattr(template, name)
        learnt = np.zeros((sizes.h_kv, 0, width)) if learnt is None else np.random.default_rng(width).normal(size=learnt.shape)
        extras[name] = np.concatenate([learnt, np.zeros((sizes.h_kv, 1, width))], axis=1)
    return replace(template, **extras)


def _lines(layout: Lines | str) -> Lines:
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise ConfigError(f"layout: {layout!r} is no layout; {nearest(layout, LAYOUTS)}.")
        return LAYOUTS[layout]
    for held, (name, pattern) in layout.items():
        if pattern is not None and not _HELD.fullmatch(held):
            raise ConfigError(f"layout: {name} is said to hold {held}, which is no parameter; {nearest(held, _EXAMPLES)}.")
    for held in ("w_q", "w_k", "w_v"):
        if not any(other[:2] == "w_" and held[2] in other[2:] for other, (_, pattern) in layout.items() if pattern is not None):
            raise ConfigError(f"layout: there is no line for {held}; say which tensor holds it.")
    return layout


def _place(place: Place, target: Any, known: Mapping[str, Any], heads: Heads, *, named: bool) -> Place | None:
    """Find the tensors of a parameter; None where there are none, and need not be."""
    if place.pattern is None:
        if not any(fnmatch(whole, place.name.replace("/", ".")) for whole in known):
            find(target, place.name, known)
        return None
    if place.is_by_head:
        return place.with_tensors(*_by_head(target, place, heads, known))
    is_weight = place.held[:2] == "w_"
    if attribute(target, place.name) is None and (place.held == "w_o" or not is_weight):
        return None
    try:
        return place.with_tensors(find(target, place.name, known))
    except ConfigError:
        if named and not is_weight:
            return None
        raise


def _by_head(target: Any, place: Place, heads: Heads, known: Mapping[str, Any]) -> list[str]:
    """Find the tensors of a name with `{h}` in it."""
    found = [find(target, place.of_head(0), known)]
    while attribute(target, name := place.of_head(len(found))) is not None and name.replace("/", ".") in known:
        found.append(find(target, name, known))
    if len(found) != (wanted := getattr(heads, place.axis)):
        raise ConfigError(f"layout: {place.held} is stored as {len(found)} tensors {place.name}, but {place.axis}={wanted} is declared.")
    return found


def _zeros(places: list[Place], arrays: Mapping[str, Array]) -> dict[str, Array]:
    zeros = {}
    for place in places:
        shapes = {arrays[name].shape for name in place.tensors}
        if len(shapes) > 1:
            raise ShapeError(f"layout: the tensors {place.name} of {place.held} differ in shape: {', '.join(map(str, sorted(shapes)))}.")
        zeros[place.name] = np.zeros((len(place.tensors), *shapes.pop()) if place.is_by_head else shapes.pop())
    return zeros


def _require_all_mentioned(target: Any, places: list[Place], lines: Lines, known: Mapping[str, Any]) -> None:
    """Refuse a layout that mentions a tensor twice, or not at all."""
    holders: dict[int, str] = {}
    for place in places:
        for name in place.tensors:
            if (other := holders.setdefault(id(known[name]), place.held)) != place.held:
                raise ConfigError(f"layout: {name} is said to hold {other} and {place.held}; what holds several is called w_qkv or w_kv.")
    left = [name.replace("/", ".") for name, pattern in lines.values() if pattern is None]
    forgotten = [
        name
        for name, tensor in known.items()
        if is_parameter(target, tensor)
        and id(tensor) not in holders
        and not any(fnmatch(name, pattern) or name.endswith(f".{pattern}") for pattern in left)
    ]
    if forgotten:
        line = f'"other": ("{forgotten[0]}", None)'
        raise ConfigError(f"layout: it does not mention {', '.join(forgotten)}; a line like {line} leaves a tensor as it is.")
