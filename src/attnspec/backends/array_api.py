"""Any other library that follows the array API standard, through array-api-compat."""

from typing import Any

from array_api_compat import array_namespace, is_array_api_obj
from array_api_compat import device as device_of


def owns(x: Any, /) -> bool:
    """Tell whether `x` is an array of such a library."""
    return is_array_api_obj(x)


def arange(stop: int, like: Any, /) -> Any:
    return array_namespace(like).arange(stop, device=device_of(like))


def uniform(like: Any, generator: Any, /) -> Any:
    return generator(like.shape) if callable(generator) else array_namespace(like).asarray(generator.random(like.shape))


def astype(x: Any, dtype: Any, /) -> Any:
    xp = array_namespace(x)
    return xp.astype(x, getattr(xp, dtype) if isinstance(dtype, str) else dtype, copy=False)


def permute(x: Any, axes: tuple[int, ...], /) -> Any:
    return array_namespace(x).permute_dims(x, axes)


def reshape(x: Any, shape: tuple[int, ...], /) -> Any:
    return array_namespace(x).reshape(x, shape)


def repeat(x: Any, times: int, /, *, axis: int) -> Any:
    return array_namespace(x).repeat(x, times, axis=axis)


def concat(arrays: tuple[Any, ...], /, *, axis: int) -> Any:
    return array_namespace(*arrays).concat(list(arrays), axis=axis)


def take(x: Any, indices: Any, /, *, axis: int) -> Any:
    return array_namespace(x).take(x, indices, axis=axis)


def where(condition: Any, x: Any, y: Any, /) -> Any:
    return array_namespace(condition).where(condition, x, y)


def exp(x: Any, /) -> Any:
    return array_namespace(x).exp(x)


def tanh(x: Any, /) -> Any:
    return array_namespace(x).tanh(x)


def cos(x: Any, /) -> Any:
    return array_namespace(x).cos(x)


def sin(x: Any, /) -> Any:
    return array_namespace(x).sin(x)


def isfinite(x: Any, /) -> Any:
    return array_namespace(x).isfinite(x)


def max(x: Any, /, *, axis: int) -> Any:
    xp = array_namespace(x)
    if x.shape[axis] == 0:
        return xp.sum(x, axis=axis, keepdims=True) - xp.inf
    return xp.max(x, axis=axis, keepdims=True)


def sum(x: Any, /, *, axis: int) -> Any:
    return array_namespace(x).sum(x, axis=axis, keepdims=True)


def any(x: Any, /, *, axis: int) -> Any:
    return array_namespace(x).any(x, axis=axis, keepdims=True)


def maximum(x: Any, y: Any, /) -> Any:
    return array_namespace(x).maximum(x, y)


def device(x: Any, /) -> object:
    return device_of(x)
