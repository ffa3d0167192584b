"""The sizes of a layer, and its parameters: one independent set for each head."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, Self

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

from ..arrays import A, B, backend_of
from ..axes import evaluate, shapes_of
from ..errors import ConfigError
from ..step import check_fields
from .sizes import MERGED, OF_HEADS, OF_RANKS, SHARE, settle

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, init=False)
class Heads:
    """The sizes of multi-head attention: how one budget of width is split among the heads.

    Attributes:
        d_model: width of the residual stream, in and out.
        h: how many query heads.
        h_kv: how many key/value heads; each serves `h / h_kv` query heads.
        d_k: width of one head's queries and keys.
        d_v: width of one head's values.
        d_key_in: width of the source of keys.
        d_value_in: width of the source of values.
    """

    d_model: int
    h: int
    h_kv: int
    d_k: int
    d_v: int
    d_key_in: int
    d_value_in: int

    def __init__(
        self,
        *,
        d_model: int,
        h: int,
        h_kv: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        d_key_in: int | None = None,
        d_value_in: int | None = None,
    ) -> None:
        """Settle the sizes.

        Args:
            d_model: width of the residual stream.
            h: how many query heads.
            h_kv: how many key/value heads; None for `h`.
            d_k: width of one head's queries and keys; None for `d_model / h`.
            d_v: width of one head's values; None for `d_k`.
            d_key_in: width of the source of keys; None for `d_model`.
            d_value_in: width of the source of values; None for `d_key_in`.

        Raises:
            ConfigError: a size is not a positive whole number, `h` does not divide `d_model` though `d_k` is not
                given, or `h_kv` does not divide `h`.
        """
        given = {"d_model": d_model, "h": h, "h_kv": h_kv, "d_k": d_k, "d_v": d_v, "d_key_in": d_key_in, "d_value_in": d_value_in}
        for name, size in settle("Heads", OF_HEADS, given).items():
            object.__setattr__(self, name, size)

    def merged(self) -> Self:
        """One head of the full width, `h * d_k`, with the same budget of parameters."""
        return self._resized(MERGED, vars(self))

    def split(self, ranks: int, /, *, name: str = "tp") -> Self:
        """The heads that each of several ranks has: whole groups of them, as wide as before.

        Args:
            ranks: how many ranks share the heads.
            name: what their number is called, in the error.

        Returns:
            The sizes of one rank.

        Raises:
            ConfigError: the heads cannot be shared equally.
        """
        return self._resized(SHARE, settle("Heads", OF_RANKS, {**vars(self), "ranks": ranks}, ranks=name))

    def _resized(self, formulas: Mapping[str, str], sizes: Mapping[str, int]) -> Self:
        return type(self)(**{**vars(self), **{name: evaluate(formula, sizes) for name, formula in formulas.items()}})


@dataclass(frozen=True, eq=False)
class Parameters(Generic[A]):
    """The parameters of multi-head attention, kept for each head, of one array library; checked when built.

    Attributes:
        w_q: projects the input to queries.
        w_k: projects the context to keys.
        w_v: projects the context to values.
        w_o: mixes what the heads found.
        b_q: bias of the queries; None for none.
        b_k: bias of the keys; None for none.
        b_v: bias of the values; None for none.
        b_o: bias of the output; None for none.
        gain_q: factors of normalised queries; None for none.
        gain_k: factors of normalised keys; None for none.
        extra_k: learnt keys that every query may attend to besides the context; None for none.
        extra_v: their values.
        sinks: a score for each head that takes its share and gives nothing; None for none.
        gates: a factor for each head, 1 keeps and 0 ablates it; None for none.
    """

    w_q: Float[A, "h d_model d_k"]
    w_k: Float[A, "h_kv d_key_in d_k"]
    w_v: Float[A, "h_kv d_value_in d_v"]
    w_o: Float[A, "h*d_v d_model"]
    b_q: Float[A, "h d_k"] | None = None
    b_k: Float[A, "h_kv d_k"] | None = None
    b_v: Float[A, "h_kv d_v"] | None = None
    b_o: Float[A, " d_model"] | None = None
    gain_q: Float[A, "#h d_k"] | None = None
    gain_k: Float[A, "#h_kv d_k"] | None = None
    extra_k: Float[A, "h_kv extra d_k"] | None = None
    extra_v: Float[A, "h_kv extra d_v"] | None = None
    sinks: Float[A, " h"] | None = None
    gates: Float[A, " h"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.extra_k is None) != (self.extra_v is None):
            raise ConfigError("Parameters: extra_k and extra_v come in pairs; give both or neither.")

    @property
    def heads(self) -> Heads:
        """The sizes that these arrays have."""
        (h, d_model, d_k), (h_kv, d_key_in, _), (_, d_value_in, d_v) = self.w_q.shape, self.w_k.shape, self.w_v.shape
        return Heads(d_model=d_model, h=h, h_kv=h_kv, d_k=d_k, d_v=d_v, d_key_in=d_key_in, d_value_in=d_value_in)

    @classmethod
    def random(
        cls, heads: Heads, /, *, seed: int = 0, bias: bool = True, dtype: npt.DTypeLike = np.float64
    ) -> "Parameters[npt.NDArray[Any]]":
        """Draw parameters: independent normal numbers of variance 1 / (width of the input of that projection).

        So an input of variance 1 gives queries, keys and values of variance about 1 and scaled scores of spread
        about 1.

        Args:
            heads: the sizes.
            seed: which draw.
            bias: whether there are biases, of the same variance as the weights beside them.
            dtype: the dtype of the arrays.

        Returns:
            The parameters, as NumPy arrays.
        """
        rng = np.random.default_rng(seed)
        named = {name: shape.axes for name, (shape,) in shapes_of(cls).items() if name.startswith(("w_", "b_") if bias else "w_")}
        shapes = {name: tuple(evaluate(axis.text, vars(heads)) for axis in axes) for name, axes in named.items()}
        spread = {name: shapes["w" + name[1:]][-2] ** -0.5 for name in shapes}
        return Parameters(**{name: rng.normal(0, spread[name], shapes[name]).astype(dtype) for name in spread})

    def map(self, function: Callable[[A], B], /) -> "Parameters[B]":
        """Apply a function to every array: `parameters.map(jax.numpy.asarray)`.

        Args:
            function: what to do with each array.

        Returns:
            The parameters that come of it, checked again.
        """
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return Parameters(**{name: function(array) for name, array in arrays.items() if array is not None})

    def prune(self, heads: Collection[int], /) -> Self:
        """Remove query heads from every array that has them.

        Key/value heads that serve no query head any more go too; the others must go on to serve equally many.

        Args:
            heads: which query heads to remove.

        Returns:
            The smaller parameters, which give the same output as with these heads' gates at 0.

        Raises:
            ConfigError: there is no such head, none would be left, or the groups would become unequal.
        """
        sizes, group = self.heads, self.heads.h // self.heads.h_kv
        kept = [head for head in range(sizes.h) if head not in set(heads)]
        served = Counter(head // group for head in kept)
        if not kept or not set(heads) <= set(range(sizes.h)) or len(set(served.values())) > 1:
            raise ConfigError(
                f"prune: heads={sorted(heads)} must be some of the h={sizes.h}, equally many of each group of {group} or all."
            )
        rows = [head * sizes.d_v + channel for head in kept for channel in range(sizes.d_v)]
        picked = {"h": kept, "h_kv": sorted(served), "h*d_v": rows}
        given = {name: shape.axes[0] for name, (shape,) in shapes_of(type(self)).items() if getattr(self, name) is not None}
        index = {
            name: picked[axis.text]
            for name, axis in given.items()
            if axis.text in picked and not (axis.broadcast and getattr(self, name).shape[0] == 1)
        }
        return replace(self, **{name: _pick(getattr(self, name), rows) for name, rows in index.items()})

    def to_torch(self, *, dtype: "torch.dtype | None" = None, device: "torch.device | str | None" = None) -> "Parameters[torch.Tensor]":
        """Copy the parameters to PyTorch.

        Args:
            dtype: the dtype of the tensors; None for that of the arrays.
            device: where the tensors lie; None for PyTorch's default.

        Returns:
            The parameters, as tensors.
        """
        import torch

        return self.map(lambda array: torch.tensor(np.asarray(array), dtype=dtype, device=device))


def _pick(array: A, rows: list[int]) -> A:
    xp = backend_of(array)
    return xp.concat(tuple(array[row : row + 1] for row in rows), axis=0)
