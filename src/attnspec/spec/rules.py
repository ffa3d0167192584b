"""Rules: what says which query may attend to which key, with its axes and polarity; converted to what is kept at the door."""

from dataclasses import dataclass
from typing import Any, Literal, Self

from ..arrays import A, dtype_name
from ..axes import parse
from ..errors import ConfigError, DtypeError, ShapeError
from ..judge import require_array
from .masks import keep_both, keep_causal, keep_documents, keep_lengths, keep_window
from .positions import Positions

Polarity = Literal["keep", "drop", "additive"]


@dataclass(frozen=True, eq=False)
class Flags:
    """One value for each place that the named axes have."""

    array: Any
    axes: tuple[str, ...]
    polarity: Polarity

    def keep(self, queries: A, keys: A, positions: Any) -> A:
        """Work the rule out for given queries and keys."""
        del positions
        batch, h, seq_q, _ = queries.shape
        sizes = {"batch": batch, "h": h, "seq_q": seq_q, "seq_k": keys.shape[2]}
        for axis, size in zip(self.axes, self.array.shape, strict=True):
            if size not in (sizes[axis], 1):
                wanted = f"{axis}={sizes[axis]} was set by the {'keys' if axis == 'seq_k' else 'queries'}"
                raise ShapeError(f"Mask: {self.polarity} {tuple(self.array.shape)} has {axis}={size}, but {wanted}.")
        return self._kept()[tuple(slice(None) if axis in self.axes else None for axis in sizes)]

    def _kept(self) -> Any:
        if self.polarity == "additive":
            return self.array > _lowest(self.array)
        return self.array if self.polarity == "keep" else ~self.array


def _lowest(array: Any) -> float:
    """The lowest finite number of a dtype, which some projects add in place of minus infinity."""
    return {"float16": -65504.0, "float64": -1.7976931348623157e308}.get(dtype_name(array), -3.3895313892515355e38)


def _require_kind(array: Any, polarity: Polarity) -> None:
    require_array("Mask", polarity, array)
    kind = dtype_name(array)
    if not ("float" in kind if polarity == "additive" else kind == "bool"):
        wanted = "floating-point" if polarity == "additive" else "boolean"
        raise DtypeError(f"Mask: {polarity} is {kind}, but must be {wanted}.")


@dataclass(frozen=True, eq=False)
class Lengths:
    """How many keys of each sequence are real."""

    lengths: Any

    def keep(self, queries: A, keys: A, positions: Any) -> A:
        """Work the rule out for given queries and keys."""
        del queries, positions
        return keep_lengths(keys, self.lengths)


@dataclass(frozen=True, eq=False)
class Causal:
    """No query sees a key behind its own position."""

    def keep(self, queries: A, keys: A, positions: Any) -> A:
        """Work the rule out for given queries and keys."""
        del queries, keys
        return keep_causal(positions.queries, positions.keys)


@dataclass(frozen=True, eq=False)
class Window:
    """Every query sees a window around its own position."""

    left: int | None
    right: int | None

    def keep(self, queries: A, keys: A, positions: Any) -> A:
        """Work the rule out for given queries and keys."""
        del queries, keys
        return keep_window(positions.queries, positions.keys, left=self.left, right=self.right)


@dataclass(frozen=True, eq=False)
class Documents:
    """Every query sees its own document."""

    queries: Any
    keys: Any

    def keep(self, queries: A, keys: A, positions: Any) -> A:
        """Work the rule out for given queries and keys."""
        del queries, keys, positions
        return keep_documents(self.queries, self.keys)


@dataclass(frozen=True, eq=False)
class Mask:
    """Which query may attend to which key: rules that must all let it, each with its axes and polarity.

    A padding mask cannot pass for an attention mask, since each says which axes it has; `a & b` keeps what both keep.

    Attributes:
        rules: what must be kept to; made by the class methods.
    """

    rules: tuple[Any, ...] = ()

    @classmethod
    def keep(cls, flags: Any, /, axes: str = "batch h seq_q seq_k") -> Self:
        """Keep where a boolean array is True.

        Args:
            flags: one flag for each place.
            axes: which axes the array has, in order, of batch, h, seq_q and seq_k.

        Returns:
            The mask.

        Raises:
            AttnspecError: it is no such array, or the axes are not those, or not as many as the array has.
        """
        return cls._flags(flags, axes, "keep")

    @classmethod
    def drop(cls, flags: Any, /, axes: str = "batch h seq_q seq_k") -> Self:
        """Drop where a boolean array is True, as in `torch.nn.MultiheadAttention`.

        Args:
            flags: one flag for each place.
            axes: which axes the array has, in order, of batch, h, seq_q and seq_k.

        Returns:
            The mask.

        Raises:
            AttnspecError: it is no such array, or the axes are not those, or not as many as the array has.
        """
        return cls._flags(flags, axes, "drop")

    @classmethod
    def additive(cls, addend: Any, /, axes: str = "batch h seq_q seq_k") -> Self:
        """Drop where an addend is minus infinity, or the lowest number of its dtype, and keep elsewhere.

        Finite addends have no influence here; where they mean something, give them as `bias` too.

        Args:
            addend: one addend for each place.
            axes: which axes the array has, in order, of batch, h, seq_q and seq_k.

        Returns:
            The mask.

        Raises:
            AttnspecError: it is no such array, or the axes are not those, or not as many as the array has.
        """
        return cls._flags(addend, axes, "additive")

    @classmethod
    def lengths(cls, lengths: Any, /) -> Self:
        """Keep the first keys of each sequence; the others are padding.

        Args:
            lengths: how many keys of each sequence are real.

        Returns:
            The mask.
        """
        return cls(rules=(Lengths(lengths),))

    @classmethod
    def causal(cls) -> Self:
        """Keep the keys up to each query's own position.

        Returns:
            The mask.
        """
        return cls(rules=(Causal(),))

    @classmethod
    def window(cls, left: int | None, right: int | None, /) -> Self:
        """Keep a window of keys around each query's own position.

        Args:
            left: how far back a query sees; None for all the way.
            right: how far ahead a query sees; None for all the way.

        Returns:
            The mask.
        """
        return cls(rules=(Window(left, right),))

    @classmethod
    def documents(cls, queries: Any, keys: Any | None = None, /) -> Self:
        """Keep the keys of each query's own document.

        Args:
            queries: the number of each query's document.
            keys: the number of each key's document; None for that of the queries.

        Returns:
            The mask.
        """
        return cls(rules=(Documents(queries, queries if keys is None else keys),))

    @classmethod
    def _flags(cls, array: Any, axes: str, polarity: Polarity) -> Self:
        _require_kind(array, polarity)
        names = tuple(axis.text for axis in parse(axes))
        allowed = ("batch", "h", "seq_q", "seq_k")
        if names != tuple(name for name in allowed if name in names):
            raise ConfigError(f"Mask: axes={axes!r} must be some of {', '.join(allowed)}, in this order.")
        if len(names) != len(array.shape):
            raise ShapeError(f"Mask: {polarity} {tuple(array.shape)} has {len(array.shape)} axes, but axes={axes!r} names {len(names)}.")
        return cls(rules=(Flags(array, names, polarity),))

    def __and__(self, other: Self) -> Self:
        return type(self)((*self.rules, *other.rules))

    @property
    def needs_positions(self) -> bool:
        """Whether a rule asks where queries and keys stand."""
        return any(isinstance(rule, Causal | Window) for rule in self.rules)

    def realise(self, queries: A, keys: A, positions: Positions[A] | None, /) -> A | None:
        """Work the rules out for given queries and keys.

        Args:
            queries: the queries.
            keys: the keys.
            positions: where they stand; None where no rule asks.

        Returns:
            True where the query may attend to the key; None if there is no rule.
        """
        kept: A | None = None
        for rule in self.rules:
            keep = rule.keep(queries, keys, positions)
            kept = keep if kept is None else keep_both(kept, keep)
        return kept
