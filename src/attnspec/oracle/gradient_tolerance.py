"""How far right gradients can be from those that float64 gives, found by rounding at random (Monte Carlo arithmetic).

The specification runs several times with noise at every step, forward and backward. The noise of a sum of n products
has the variance that `rounding.scatter` has for a random order; all other noise is relative. The spread of the
gradients that come of it is that of right implementations, whatever the options are (Parker, 1997, "Monte Carlo arithmetic").
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..step import function_of, substitute
from .errors_attend import ATTEND
from .errors_fan import FAN

_RUNS = 16
_SIGMAS = 10
_EXPONENTIAL = 4.0  # how far an exponential is off, in standard deviations and in units of roundoff
_PRODUCTS = ("project_queries", "project_keys", "project_values", "score", "blend", "mix")
_EXACT = {"share_keys", "share_values", "extend_keys", "extend_values", "extend_bias", "append_to_cache", "concatenate", "mask"}


def gradient_tolerance(
    run: Callable[[], Tensor], inputs: Mapping[str, Tensor], cotangent: Tensor, unit: float, /, *, seed: int
) -> dict[str, npt.NDArray[Any]]:
    """Find how far gradients of `sum(y * cotangent)` can be off, for an implementation that rounds everywhere alike.

    Args:
        run: computes y by the specification, in float64, from the inputs; every time the same.
        inputs: the tensors whose gradients are asked for, by name; they require gradients.
        cotangent: the gradient of y.
        unit: the unit roundoff of the implementation.
        seed: what the noise is drawn from.

    Returns:
        The tolerance for every element of every gradient.
    """
    generator = torch.Generator(device=cotangent.device).manual_seed(seed)
    exact = _gradients(run, inputs, cotangent)
    square = {name: torch.zeros_like(gradient) for name, gradient in exact.items()}
    with substitute(**_noisy_steps(max(unit, 2.0**-40), generator)):  # float64 itself would drown what is smaller
        for _ in range(_RUNS):
            for name, gradient in _gradients(run, inputs, cotangent).items():
                square[name] += (gradient - exact[name]) ** 2 / _RUNS
    return {name: _limit(exact[name], square[name].sqrt() * (unit / max(unit, 2.0**-40)), unit) for name in exact}


def _gradients(run: Callable[[], Tensor], inputs: Mapping[str, Tensor], cotangent: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad((run() * cotangent).sum(), tuple(inputs.values()), allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(inputs.items(), found, strict=True)
    }


def _limit(exact: Tensor, sigma: Tensor, unit: float) -> npt.NDArray[Any]:
    """So few runs may underrate the spread of one element, less so that of its row."""
    row = (sigma**2).mean(dim=-1, keepdim=True) if sigma.ndim else sigma**2
    limit: npt.NDArray[Any] = (_SIGMAS * (0.75 * sigma**2 + 0.25 * row).sqrt() + 2 * unit * exact.abs()).cpu().numpy()
    return np.where(np.isfinite(limit), limit, 0.0)


class _Noise(torch.autograd.Function):
    """The same numbers with relative noise, going forward and coming back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float, generator: torch.Generator) -> Tensor:
        ctx.backward, ctx.generator = backward, generator
        return x if not forward else x * (1 + forward * _normal(x, generator))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (g,) = gradients
        return g * (1 + ctx.backward * _normal(g, ctx.generator)), None, None, None


class _NoisyProduct(torch.autograd.Function):
    """A product of matrices with the noise of a sum in a random order, and so are its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, unit: float, generator: torch.Generator) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.unit, ctx.generator = unit, generator
        return _summed(x, y, None, unit, generator)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (g,), (x, y) = gradients, ctx.saved_tensors
        of_x = _summed(g, y.mT, x.shape, ctx.unit, ctx.generator)
        return of_x, _summed(x.mT, g, y.shape, ctx.unit, ctx.generator), None, None


class _Met(torch.autograd.Function):
    """Nothing, but coming back it notes the noise of the sum of what comes back times what went forward, row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[Tensor], unit: float, generator: torch.Generator) -> Tensor:
        ctx.save_for_backward(x)
        ctx.notes, ctx.unit, ctx.generator = notes, unit, generator
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (g,), (x,) = gradients, ctx.saved_tensors
        row = _summed(g[..., None, :], x[..., None], None, ctx.unit, ctx.generator)[..., 0]
        ctx.notes.append(row - (g * x).sum(-1, keepdim=True))
        return g, None, None, None


class _Subtracted(torch.autograd.Function):
    """Nothing, but coming back it adds the noise of the sums that a softmax subtracts, whether over keys or over channels."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, weights: Tensor, notes: list[Tensor]) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.notes = notes
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (g,), (weights,) = gradients, ctx.saved_tensors
        return g + weights * sum(ctx.notes), None, None


def _summed(x: Tensor, y: Tensor, shape: Any, unit: float, generator: torch.Generator) -> Tensor:
    total, squares, count = x @ y, x**2 @ y**2, x.shape[-1]
    if shape is not None and total.shape != shape:
        count = count * total.numel() // max(1, shape.numel())
        total, squares = total.sum_to_size(shape), squares.sum_to_size(shape)
    variance = ((count + 1) * (squares / 6 + total**2 / 3) + squares) * (unit**2 / 3)
    return total + variance.sqrt() * _normal(total, generator)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _noisy_steps(unit: float, generator: torch.Generator) -> dict[str, Callable[..., Tensor]]:
    def noise(x: Tensor, forward: float = 0.0, backward: float = 0.0) -> Tensor:
        noisy: Tensor = _Noise.apply(x, forward * unit, backward * unit, generator)  # type: ignore[no-untyped-call]
        return noisy

    def times(x: Tensor, y: Tensor) -> Tensor:
        product: Tensor = _NoisyProduct.apply(x, y, unit, generator)  # type: ignore[no-untyped-call]
        return product

    def given(x: Any, like: Tensor) -> Any:
        """What is broadcast has the gradient of a sum."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return noise(x, backward=1 + (like.numel() / max(1, x.numel()) / 3) ** 0.5)

    def project(x: Tensor, w: Tensor, b: Tensor | None = None, **_: Any) -> Tensor:
        y = times(x[:, None], w)
        return noise(y if b is None else y + given(b, y)[:, None, :], 1.0, 1.0)

    def mix(x: Tensor, w: Tensor, b: Tensor | None = None, **_: Any) -> Tensor:
        y = times(x, w)
        return noise(y if b is None else y + given(b, y), 1, 1)

    def softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        peak = torch.where(scores.isfinite(), scores, 0).abs().amax(-1, keepdim=True)
        off = unit * (_EXPONENTIAL + 2 * peak) * _normal(scores, generator)
        notes.clear()
        scores = _Subtracted.apply(scores, softmax_step(scores, *args, **kwargs).detach(), notes)  # type: ignore[no-untyped-call]
        return met(noise(softmax_step(scores + off, *(given(a, scores) for a in args), **kwargs), 2, 2))

    def met(x: Tensor) -> Tensor:
        y: Tensor = _Met.apply(x, notes, unit, generator)  # type: ignore[no-untyped-call]
        return y

    notes: list[Tensor] = []
    softmax_step = function_of("softmax", "gradient_tolerance")
    steps: dict[str, Callable[..., Tensor]] = {
        "score": lambda q, k, **_: noise(times(q, k.mT), 1, 1),
        "blend": lambda a, v, **_: met(noise(times(a, v), 1, 1)),
        "mix": mix,
        "softmax": softmax,
        **dict.fromkeys(_PRODUCTS[:3], project),
    }

    def plain(step: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: noise(step(*(given(a, args[0]) for a in args), **kwargs), 2, 2)

    others = set(FAN | ATTEND) - set(steps) - _EXACT - {"linear_bias", "relative_bias"}
    return steps | {name: plain(function_of(name, "gradient_tolerance")) for name in others}
