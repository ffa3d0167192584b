"""The ledger: every step with its axes, sizes and cost, read from the annotations."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..arrays import Outline, dtype_name
from ..axes import evaluate, shapes_of
from ..errors import ConfigError
from ..spec.multi_head import multi_head_attention
from ..spec.parameters import Heads, Parameters
from ..step import Call, Trace, trace

_PARAMETERS = frozenset(field.name for field in dataclasses.fields(Parameters))


@dataclass(frozen=True)
class Cell:
    """An array in the ledger: the names of its axes, their sizes and its dtype."""

    axes: tuple[str, ...]
    shape: tuple[Any, ...]
    dtype: str

    @property
    def size(self) -> Any:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> Any:
        """How many bytes it takes."""
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits.group()) // 8 if bits else 1)


@dataclass(frozen=True)
class Line:
    """One step in the ledger.

    Attributes:
        step: the name of the step.
        stage: fan out, attend or fan in.
        equation: its formula, in LaTeX.
        arguments: the arrays that it takes.
        result: the array that it gives.
        multiply_adds: the multiply-adds of its matrix products; element-wise work does not count.
    """

    step: str
    stage: str
    equation: str
    arguments: dict[str, Cell]
    result: Cell
    multiply_adds: Any

    @property
    def parameters(self) -> Any:
        """How many parameters of the layer it uses."""
        return sum(cell.size for name, cell in self.arguments.items() if name in _PARAMETERS)

    @property
    def bytes(self) -> Any:
        """How many bytes its result takes."""
        return self.result.bytes

    def to_dict(self) -> dict[str, Any]:
        """The line as plain data."""
        return {**dataclasses.asdict(self), "parameters": self.parameters, "bytes": self.bytes}


@dataclass(frozen=True)
class Ledger(Mapping[str, Line]):
    """The steps in order, by name, and their totals."""

    lines: tuple[Line, ...]

    @property
    def parameters(self) -> Any:
        """How many parameters the steps use."""
        return sum(line.parameters for line in self.lines)

    @property
    def multiply_adds(self) -> Any:
        """How many multiply-adds the matrix products take."""
        return sum(line.multiply_adds for line in self.lines)

    @property
    def bytes(self) -> Any:
        """How many bytes the results take together, if each is kept."""
        return sum(line.bytes for line in self.lines)

    def __getitem__(self, step: str) -> Line:
        return {line.step: line for line in self.lines}[step]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(line.step for line in self.lines))

    def __len__(self) -> int:
        return len(set(self))

    def totals(self) -> dict[str, Any]:
        """The totals as plain data."""
        return {"parameters": self.parameters, "multiply_adds": self.multiply_adds, "bytes": self.bytes}

    def to_dict(self) -> dict[str, Any]:
        """The ledger as plain data."""
        return {"steps": [line.to_dict() for line in self.lines], "totals": self.totals()}


def ledger(heads: Heads, /, *, batch: int, seq: int, seq_k: int | None = None, bias: bool = True, dtype: str = "float32") -> Ledger:
    """Keep the books of multi-head attention at given sizes, without computing anything.

    Args:
        heads: the sizes of the layer.
        batch: independent sequences.
        seq: query positions.
        seq_k: key positions; None for as many as query positions.
        bias: whether the projections have biases.
        dtype: the standard name of the dtype.

    Returns:
        The steps in order; `mask` is among them, with one mask for each sequence and head.

    Raises:
        ConfigError: a size is not a positive whole number.
    """
    given = {"batch": batch, "seq_q": seq, "seq_k": seq if seq_k is None else seq_k}
    for name, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"ledger: {name}={size!r} must be a positive whole number.")
    return ledger_of(outline_run({**vars(heads), **given}, bias=bias, dtype=dtype))


def outline_run(sizes: Mapping[str, Any], /, *, bias: bool = True, dtype: str = "float32") -> Trace:
    """Run multi-head attention on outlines, cross-attention with a mask, and record its steps.

    Args:
        sizes: the size of each axis: whole numbers, or symbols.
        bias: whether the projections have biases.
        dtype: the standard name of the dtype.

    Returns:
        The calls of the steps.

    Raises:
        ShapeError: the steps do not fit together.
    """
    arrays = outlines(multi_head_attention, sizes, dtype=dtype)
    kept = {name.removeprefix("parameters."): array for name, array in arrays.items() if bias or not name.startswith("parameters.b_")}
    parameters: Parameters[Any] = Parameters(**{name: kept.pop(name) for name in _PARAMETERS & kept.keys()})
    with trace() as steps:
        multi_head_attention(kept.pop("x"), parameters, **kept)
    return steps


def outlines(function: Callable[..., Any], sizes: Mapping[str, Any], /, *, dtype: str = "float32") -> dict[str, Any]:
    """Make an outline for each array argument of a function, from its annotations.

    Args:
        function: the annotated function.
        sizes: the size of each axis.
        dtype: the standard name of the dtype of floating-point arguments.

    Returns:
        The outlines by the name of the argument.

    Raises:
        ConfigError: an axis has no size.
    """
    shapes = {name: shape for name, (shape, *_) in shapes_of(function).items() if not name.startswith("return")}
    return {
        name: Outline(tuple(evaluate(axis.text, sizes) for axis in shape.axes), "bool" if shape.kind == "Bool" else dtype)
        for name, shape in shapes.items()
    }


def ledger_of(steps: Trace, /) -> Ledger:
    """Keep the books of what was traced.

    Args:
        steps: the recorded calls, of arrays or of outlines.

    Returns:
        The steps in order.
    """
    return Ledger(tuple(map(_line, steps.calls)))


def _line(call: Call) -> Line:
    arrays = {**{entry.label: entry.value for entry in call.step.signature.entries(call.arguments)}, "return": call.result}
    cells = {name: Cell(call.axes[name], tuple(array.shape), dtype_name(array)) for name, array in arrays.items()}
    result = cells.pop("return")
    return Line(call.step.name, call.step.stage, call.step.equation, cells, result, call.multiply_adds)
