"""PyTorch; imported only once the user has imported it."""

from typing import Any

import torch
from torch import Tensor


def arange(stop: int, like: Tensor, /) -> Tensor:
    return torch.arange(stop, device=like.device)


def uniform(like: Tensor, generator: Any, /) -> Tensor:
    return generator(like.shape) if callable(generator) else torch.rand(like.shape, generator=generator, device=like.device)


def astype(x: Tensor, dtype: Any, /) -> Tensor:
    return x.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def permute(x: Tensor, axes: tuple[int, ...], /) -> Tensor:
    return x.permute(axes)


def reshape(x: Tensor, shape: tuple[int, ...], /) -> Tensor:
    return x.reshape(shape)


def repeat(x: Tensor, times: int, /, *, axis: int) -> Tensor:
    return x.repeat_interleave(times, dim=axis)


def concat(arrays: tuple[Tensor, ...], /, *, axis: int) -> Tensor:
    return torch.cat(arrays, dim=axis)


def take(x: Tensor, indices: Tensor, /, *, axis: int) -> Tensor:
    return torch.index_select(x, axis, indices)


def where(condition: Tensor, x: Tensor | float, y: Tensor | float, /) -> Tensor:
    return torch.where(condition, x, y)


def exp(x: Tensor, /) -> Tensor:
    return torch.exp(x)


def tanh(x: Tensor, /) -> Tensor:
    return torch.tanh(x)


def cos(x: Tensor, /) -> Tensor:
    return torch.cos(x)


def sin(x: Tensor, /) -> Tensor:
    return torch.sin(x)


def isfinite(x: Tensor, /) -> Tensor:
    return torch.isfinite(x)


def max(x: Tensor, /, *, axis: int) -> Tensor:
    if x.shape[axis] == 0:
        return torch.full_like(torch.sum(x, dim=axis, keepdim=True), -torch.inf)
    return torch.amax(x, dim=axis, keepdim=True)


def sum(x: Tensor, /, *, axis: int) -> Tensor:
    return torch.sum(x, dim=axis, keepdim=True)


def any(x: Tensor, /, *, axis: int) -> Tensor:
    return torch.any(x, dim=axis, keepdim=True)


def maximum(x: Tensor, y: Tensor, /) -> Tensor:
    return torch.maximum(x, y)


def device(x: Tensor, /) -> object:
    return x.device
