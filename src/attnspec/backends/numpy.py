"""NumPy."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def arange(stop: int, like: Array, /) -> Array:
    del like  # NumPy has one device
    return np.arange(stop)


def uniform(like: Array, generator: Any, /) -> Array:
    return generator(like.shape) if callable(generator) else generator.random(like.shape)


def astype(x: Array, dtype: Any, /) -> Array:
    return x.astype(dtype, copy=False)


def permute(x: Array, axes: tuple[int, ...], /) -> Array:
    return x.transpose(axes)


def reshape(x: Array, shape: tuple[int, ...], /) -> Array:
    return x.reshape(shape)


def repeat(x: Array, times: int, /, *, axis: int) -> Array:
    return np.repeat(x, times, axis=axis)


def concat(arrays: tuple[Array, ...], /, *, axis: int) -> Array:
    return np.concatenate(arrays, axis=axis)


def take(x: Array, indices: Array, /, *, axis: int) -> Array:
    return np.take(x, indices, axis=axis)


def where(condition: Array, x: Array | float, y: Array | float, /) -> Array:
    return np.where(condition, x, y)


def exp(x: Array, /) -> Array:
    return np.exp(x)


def tanh(x: Array, /) -> Array:
    return np.tanh(x)


def cos(x: Array, /) -> Array:
    return np.cos(x)


def sin(x: Array, /) -> Array:
    return np.sin(x)


def isfinite(x: Array, /) -> Array:
    return np.isfinite(x)


def max(x: Array, /, *, axis: int) -> Array:
    return np.max(x, axis=axis, keepdims=True, initial=-np.inf)


def sum(x: Array, /, *, axis: int) -> Array:
    return np.sum(x, axis=axis, keepdims=True)


def any(x: Array, /, *, axis: int) -> Array:
    return np.any(x, axis=axis, keepdims=True)


def maximum(x: Array, y: Array, /) -> Array:
    return np.maximum(x, y)


def device(x: Array, /) -> object:
    del x
    return "cpu"
