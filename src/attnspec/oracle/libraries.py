"""The array libraries of implementations: how a number gets there and back, in which precisions, and with which gradient."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ..arrays import dtype_name, library_of
from ..errors import ConfigError
from .problem import Array


class Library(Protocol):
    """What the oracle needs from the library of an implementation."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """The dtypes that it has, the widest first."""

    def give(self, x: Array, precision: str, /) -> Any:
        """Copy an array there: floats in the precision, everything else as it is."""

    def take(self, x: Any, /) -> Array:
        """Copy an array back, floats as float64."""

    def working(self, *, watched: bool = True) -> Any:
        """What must be entered while the implementation runs; `watched` if it should be able to give gradients."""

    def gradients(self, function: Callable[[dict[str, Any]], Any], inputs: Mapping[str, Any], cotangent: Any, /) -> dict[str, Any] | None:
        """Differentiate the product of a function's result and a cotangent; None where there is no gradient at all."""


class NumPy:
    """NumPy."""

    name = "numpy"
    precisions = ("float64", "float32", "float16")

    def give(self, x: Array, precision: str, /) -> Any:
        return np.array(x, dtype=precision if x.dtype == np.float64 else None)

    def take(self, x: Any, /) -> Array:
        return np.array(x, dtype=np.float64 if np.asarray(x).dtype.kind == "f" else None)

    @contextmanager
    def working(self, *, watched: bool = True) -> Iterator[None]:
        del watched
        with np.errstate(all="ignore"):
            yield

    def gradients(self, function: Callable[[dict[str, Any]], Any], inputs: Mapping[str, Any], cotangent: Any, /) -> dict[str, Any] | None:
        del function, inputs, cotangent
        return None


class Torch:
    """PyTorch."""

    name = "torch"
    precisions = ("float64", "float32", "bfloat16", "float16")

    def give(self, x: Array, precision: str, /) -> Any:
        import torch

        copied = torch.from_numpy(np.array(x))
        return copied.to(getattr(torch, precision)) if x.dtype == np.float64 else copied

    def take(self, x: Any, /) -> Array:
        x = x.detach().cpu()
        return np.array(x.double().numpy() if x.is_floating_point() else x.numpy())

    @contextmanager
    def working(self, *, watched: bool = True) -> Iterator[None]:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the problems are too small for more, which only wait for each other
        try:
            with torch.set_grad_enabled(watched):
                yield
        finally:
            torch.set_num_threads(threads)

    def gradients(self, function: Callable[[dict[str, Any]], Any], inputs: Mapping[str, Any], cotangent: Any, /) -> dict[str, Any] | None:
        import torch

        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
        y = function(leaves)
        if not y.requires_grad:
            return dict.fromkeys(leaves)
        found = torch.autograd.grad(y, list(leaves.values()), grad_outputs=cotangent, allow_unused=True)
        return dict(zip(leaves, found, strict=True))


class Jax:
    """JAX, with float64 switched on while the implementation runs."""

    name = "jax"
    precisions = ("float64", "float32", "bfloat16", "float16")

    def give(self, x: Array, precision: str, /) -> Any:
        import jax.numpy as jnp

        with self.working():
            return jnp.array(x, dtype=getattr(jnp, precision) if x.dtype == np.float64 else None)

    def take(self, x: Any, /) -> Array:
        with self.working():
            floating = "float" in dtype_name(x)
            return np.array(x.astype("float32") if dtype_name(x) == "bfloat16" else x, dtype=np.float64 if floating else None)

    @contextmanager
    def working(self, *, watched: bool = True) -> Iterator[None]:
        del watched
        import jax

        with jax.enable_x64(True):  # it takes no keyword
            yield

    def gradients(self, function: Callable[[dict[str, Any]], Any], inputs: Mapping[str, Any], cotangent: Any, /) -> dict[str, Any] | None:
        import jax

        with self.working():
            _, pull = jax.vjp(function, dict(inputs))
            return dict(pull(cotangent)[0])


LIBRARIES: dict[str, Library] = {"numpy": NumPy(), "torch": Torch(), "jax": Jax()}


def library_named(name: str, /) -> Library:
    """Look up a library."""
    if name not in LIBRARIES:
        raise ConfigError(f"oracle: library={name!r} is not known; the libraries are {', '.join(LIBRARIES)}.")
    return LIBRARIES[name]


def guess_library(target: Any, /) -> Library:
    """Find out which library an implementation works with, by its class and by the modules that its code names."""
    if isinstance(target, tuple) and target:  # a module or its function, and its parameters
        return guess_library(target[0])
    classes = {base.__module__.partition(".")[0] for base in type(target).__mro__}
    if "keras" in classes:
        backend = sys.modules["keras"].config.backend()
        return LIBRARIES.get(backend, LIBRARIES["numpy"])
    if "torch" in classes:
        return LIBRARIES["torch"]
    if classes & {"flax", "equinox", "haiku", "jax"}:
        return LIBRARIES["jax"]
    found = set(_named(target, set(), 3))
    return next((LIBRARIES[name] for name in ("torch", "jax") if name in found), LIBRARIES["numpy"])


def _named(target: Any, seen: set[int], depth: int) -> Iterator[str]:
    """The libraries whose modules, functions or arrays a function or a class names, also in what it calls."""
    if id(target) in seen or depth < 0:
        return
    seen.add(id(target))
    if type(target).__name__ == "module" or isinstance(target, type):
        yield target.__name__.partition(".")[0] if not isinstance(target, type) else target.__module__.partition(".")[0]
    yield library_of(target)
    inner = getattr(target, "func", None) or getattr(target, "__wrapped__", None) or getattr(target, "__func__", None)
    if inner is not None:
        yield from _named(inner, seen, depth)
    module = str(getattr(target, "__module__", "")).partition(".")[0]
    yield module
    if module in {"numpy", "torch", "jax"}:
        return
    for function in _functions_of(target):
        code, known = function.__code__, function.__globals__
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell]
        for value in [*(known[name] for name in _names(code) if name in known), *cells]:
            yield from _named(value, seen, depth - 1)


def _functions_of(target: Any) -> list[Any]:
    if type(target).__name__ == "function":
        return [target]
    kind = target if isinstance(target, type) else type(target)
    return [member for member in vars(kind).values() if type(member).__name__ == "function"] if kind.__module__ in sys.modules else []


def _names(code: Any) -> set[str]:
    inner = (constant for constant in code.co_consts if hasattr(constant, "co_names"))
    return {*code.co_names, *(name for constant in inner for name in _names(constant))}
