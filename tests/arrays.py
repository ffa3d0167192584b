"""The libraries under test, how to compare their arrays, and random problems to give to them."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch

import attnspec
from attnspec import Parameters, Policy

POISONS = (np.nan, np.inf, -np.inf, 1e30)
"""What must not leak out of a place that nobody looks at."""

PRIMES: dict[str, Any] = {
    "batch": 2, "h_kv": 3, "group": 1, "seq_q": 5, "seq_k": 11, "d_k": 7, "d_v": 13, "d_model": 17, "d_key_in": 19, "d_value_in": 23,
}  # fmt: skip
"""Sizes that differ from each other, so that no axis can pass for another; with `group=2` there are 6 query heads."""

EQUAL: dict[str, Any] = dict.fromkeys(PRIMES, 4) | {"h_kv": 2, "group": 2}
"""The opposite: every axis of every array but `h_kv` and `h*d_v` has the size 4, so that any transposition is a legal shape."""


class Library(Enum):
    """The array libraries that the specification runs on, some of them in a nasty form."""

    NUMPY = "numpy"
    NUMPY_READONLY = "numpy_readonly"
    NUMPY_NONCONTIGUOUS = "numpy_noncontiguous"
    TORCH = "torch"
    TORCH_NONCONTIGUOUS = "torch_noncontiguous"
    JAX = "jax"
    ARRAY_API_STRICT = "array_api_strict"

    def wrap(self, array: np.ndarray) -> Any:
        """Copy a NumPy array into this library."""
        return _WRAPPERS[self](array)


def unwrap(array: Any) -> np.ndarray:
    """Bring an array of any library back to NumPy."""
    return array.detach().cpu().numpy() if library_of(array) == "torch" else np.asarray(array)


def library_of(array: Any) -> str:
    """Name the library that an array belongs to."""
    return {"jaxlib": "jax"}.get(module := type(array).__module__.partition(".")[0], module)


def _readonly(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _spread(array: np.ndarray, step: int) -> np.ndarray:
    """Hide the array in a larger one, every other element of which is a trap."""
    trap = True if array.dtype == bool else np.nan
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), fill_value=trap, dtype=array.dtype)
    view = wide[..., ::step]
    view[...] = array
    return view


@functools.cache
def _jax() -> Any:
    import jax

    jax.config.update("jax_enable_x64", val=True)
    return jax.numpy


@functools.cache
def _strict() -> Any:
    import array_api_strict

    array_api_strict.set_array_api_strict_flags(boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=())
    return array_api_strict


_WRAPPERS: dict[Library, Callable[[np.ndarray], Any]] = {
    Library.NUMPY: np.copy,
    Library.NUMPY_READONLY: _readonly,
    Library.NUMPY_NONCONTIGUOUS: lambda array: _spread(array, -2),
    Library.TORCH: torch.tensor,
    Library.TORCH_NONCONTIGUOUS: lambda array: torch.from_numpy(_spread(array, 2).base)[..., ::2],
    Library.JAX: lambda array: _jax().asarray(array),
    Library.ARRAY_API_STRICT: lambda array: _strict().asarray(array),
}

_TRAITS: dict[str, Callable[[Any], Any]] = {
    "library": library_of,
    "shape": lambda array: tuple(array.shape),
    "dtype": lambda array: array.dtype,
    "device": lambda array: getattr(array, "device", None),
}


def assert_same(got: Any, wanted: Any, /, *, within: Any = 0.0, what: str = "the result") -> None:
    """Compare library, shape, dtype and device, and only then the numbers.

    Args:
        got: an array.
        wanted: what it should be.
        within: how far each element may be off, as a number or an array; 0 for not at all. NaN equals NaN.
        what: what is compared, for the message.
    """
    __tracebackhide__ = True
    for name, trait in _TRAITS.items():
        assert trait(got) == trait(wanted), f"{what}: the {name} is {trait(got)}, but should be {trait(wanted)}"
    left, right = (unwrap(array).astype(np.float64) for array in (got, wanted))
    with np.errstate(invalid="ignore"):
        distance = np.abs(left - right)
    same = (left == right) | (np.isnan(left) & np.isnan(right)) | (distance <= within)
    if not same.all():
        worst = np.unravel_index(np.argmax(np.where(same, -1, np.nan_to_num(distance, nan=np.inf))), same.shape)
        allowed = np.broadcast_to(within, same.shape)[worst]
        place = tuple(map(int, worst))
        numbers = f"{left[worst]} at {place}, but should be {right[worst]} within {allowed:.2e}"
        raise AssertionError(f"{what}: {np.count_nonzero(~same)} of {same.size} elements are wrong; the worst is {numbers}")


@dataclass(frozen=True)
class Problem:
    """Everything that a call of the specification takes, with a draw of queries, keys and values for `attend` alone."""

    seed: int
    x: Any
    context: Any
    context_v: Any
    parameters: Parameters
    queries: Any
    keys: Any
    values: Any
    keep: Any
    options: dict[str, Any]

    @property
    def rng(self) -> np.random.Generator:
        """A fresh generator, for what else a test draws."""
        return np.random.default_rng((self.seed, 1))

    @property
    def seen(self) -> np.ndarray:
        """The mask and causality in one array with all its axes."""
        batch, h, seq_q, _ = self.queries.shape
        i, j = np.ogrid[:seq_q, : self.keys.shape[2]]
        causal = j <= i + (self.options["offset"] or 0) if self.options["causal"] else True
        return np.array(np.broadcast_to(causal & (True if self.keep is None else self.keep), (batch, h, seq_q, self.keys.shape[2])))

    def but(self, **changes: Any) -> "Problem":
        """Change some fields; what is no field is an option or a parameter."""
        fields = {name: value for name, value in changes.items() if name in self.__dataclass_fields__}
        options = {name: value for name, value in changes.items() if name in self.options}
        arrays = {name: value for name, value in changes.items() if name in Parameters.__dataclass_fields__}
        assert len(fields) + len(options) + len(arrays) == len(changes), f"unknown among {list(changes)}"
        parameters = dataclasses.replace(self.parameters, **arrays)
        return dataclasses.replace(self, **{"parameters": parameters, "options": self.options | options} | fields)

    def unrolled(self) -> "Problem":
        """Write causality into the mask, where keys can be moved about."""
        return self.but(keep=self.seen, causal=False, offset=None)

    def map(self, function: Callable[[Any], Any]) -> "Problem":
        """Apply a function to every array."""
        arrays = {name: array for name, array in vars(self).items() if hasattr(array, "shape")}
        return self.but(parameters=self.parameters.map(function), **{name: function(array) for name, array in arrays.items()})

    def arrays(self) -> dict[str, Any]:
        """All arrays by name."""
        named = vars(self) | vars(self.parameters)
        return {name: array for name, array in named.items() if hasattr(array, "shape")}

    def run(self) -> Any:
        """Compute multi-head attention."""
        arrays = {"context": self.context, "context_v": self.context_v, "keep": self.keep}
        return attnspec.multi_head_attention(self.x, self.parameters, **arrays, **self.options)

    def attend(self) -> Any:
        """Compute attention alone."""
        return attnspec.attend(self.queries, self.keys, self.values, keep=self.keep, **self.options)

    def steps(self) -> dict[str, Any]:
        """Compute multi-head attention and keep what each step returns."""
        with attnspec.trace() as calls:
            self.run()
        return {name: call.result for name, call in calls.items()}


def draw(
    *,
    seed: int = 0,
    batch: int,
    h_kv: int,
    group: int,
    seq_q: int,
    seq_k: int,
    d_k: int,
    d_v: int,
    d_model: int,
    d_key_in: int,
    d_value_in: int,
    bias: bool = True,
    masked: bool = False,
    causal: bool = False,
    offset: int | None = None,
    scale: float | None = None,
    self_attention: bool = False,
) -> Problem:
    """Draw a problem in float64, with normal numbers of such a spread that nothing grows along the chain.

    Where there is a mask, it drops about a third of the keys, and all of them for one query of one head.
    """
    rng = np.random.default_rng(seed)
    h = h_kv * group
    if self_attention:
        seq_k, d_key_in, d_value_in = seq_q, d_model, d_model

    def normal(*shape: int, width: int = 1) -> np.ndarray:
        return rng.normal(0, width**-0.5, shape)

    weights = {
        "w_q": normal(h, d_model, d_k, width=d_model),
        "w_k": normal(h_kv, d_key_in, d_k, width=d_key_in),
        "w_v": normal(h_kv, d_value_in, d_v, width=d_value_in),
        "w_o": normal(h * d_v, d_model, width=h * d_v),
    }
    biases = {"b_q": normal(h, d_k), "b_k": normal(h_kv, d_k), "b_v": normal(h_kv, d_v), "b_o": normal(d_model)}
    keep = rng.random((batch, h, seq_q, seq_k)) < 2 / 3
    keep[-1, -1, -1] = False
    return Problem(
        seed=seed,
        x=normal(batch, seq_q, d_model),
        context=None if self_attention else normal(batch, seq_k, d_key_in),
        context_v=None if self_attention else normal(batch, seq_k, d_value_in),
        parameters=Parameters(**weights, **(biases if bias else {})),
        queries=normal(batch, h, seq_q, d_k),
        keys=normal(batch, h, seq_k, d_k),
        values=normal(batch, h, seq_k, d_v),
        keep=keep if masked else None,
        options={"causal": causal, "offset": offset if causal else None, "scale": scale, "policy": Policy()},
    )


def problems(**settings: Any) -> st.SearchStrategy[Problem]:
    """Draw problems with sizes from 1 to 4; a setting may be a value or a strategy."""
    drawn: dict[str, Any] = dict.fromkeys(PRIMES, st.integers(1, 4)) | {
        "h_kv": st.integers(1, 3),
        "group": st.integers(1, 2),
        "seed": st.integers(0, 2**32 - 1),
        "bias": st.booleans(),
        "masked": st.booleans(),
        "causal": st.booleans(),
        "offset": st.none() | st.integers(-2, 4),
        "scale": st.none() | st.sampled_from([0.25, 1.0, -2.0]),
    }
    given = {name: value if isinstance(value, st.SearchStrategy) else st.just(value) for name, value in settings.items()}
    return st.builds(draw, **drawn | given)
