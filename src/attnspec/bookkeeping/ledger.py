"""The ledger: every step with its axes, sizes and cost, read from the annotations."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..arrays import Outline, dtype_name
from ..axes import evaluate, shapes_of
from ..judge import DTYPES
from ..spec.multi_head import DEFAULT, multi_head_attention
from ..spec.parameters import Heads, Parameters
from ..spec.policy import Policy
from ..spec.sizes import OF_INPUTS, settle
from ..step import Call, Trace, trace

_FIELDS = tuple(field.name for field in dataclasses.fields(Parameters))
_PARAMETERS = frozenset({*_FIELDS, "gain"})
BIASES = tuple(name for name in _FIELDS if name.startswith("b_"))
OPTIONAL = (*(name for name in _FIELDS if not name.startswith(("w_", "b_"))), "bias")


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


def ledger(
    heads: Heads,
    /,
    *,
    batch: int,
    seq: int,
    seq_k: int | None = None,
    bias: bool = True,
    causal: bool = False,
    policy: Policy = DEFAULT,
    dtype: str = "float32",
) -> Ledger:
    """Keep the books of multi-head attention at given sizes, without computing anything.

    Args:
        heads: the sizes of the layer.
        batch: independent sequences.
        seq: query positions.
        seq_k: key positions; None for as many as query positions.
        bias: whether the projections have biases.
        causal: whether a query sees only keys up to its own position.
        policy: the conventions, which may add steps.
        dtype: the standard name of the dtype.

    Returns:
        The steps in order; `mask` is among them, with one mask for each sequence and head.

    Raises:
        ConfigError: a size is not a positive whole number.
    """
    given = settle("ledger", OF_INPUTS, {"batch": batch, "seq_q": seq, "seq_k": seq_k})
    absent = () if bias else BIASES
    return ledger_of(outline_run({**vars(heads), **given}, absent=absent, causal=causal, policy=policy, dtype=dtype))


def outline_run(
    sizes: Mapping[str, Any],
    /,
    *,
    present: Collection[str] = (),
    absent: Collection[str] = (),
    causal: bool = False,
    policy: Policy = DEFAULT,
    dtype: str = "float32",
) -> Trace:
    """Run multi-head attention on outlines, cross-attention with a mask, and record its steps.

    Args:
        sizes: the size of each axis: whole numbers, or symbols.
        present: which of the optional arrays there are: gains, extra keys and values, sinks, gates, the bias of scores.
        absent: which of the usual arrays there are not: biases of the projections, the mask.
        causal: whether a query sees only keys up to its own position.
        policy: the conventions.
        dtype: the standard name of the dtype.

    Returns:
        The calls of the steps.

    Raises:
        ShapeError: the steps do not fit together.
    """
    without = {name for name in OPTIONAL if name not in present} | set(absent)
    arrays = outlines(multi_head_attention, sizes, without=without, dtype=dtype)
    given = {name.removeprefix("parameters."): array for name, array in arrays.items() if not name.startswith("positions.")}
    parameters: Parameters[Any] = Parameters(**{name: given.pop(name) for name in _PARAMETERS & given.keys()})
    with trace() as steps:
        multi_head_attention(given.pop("x"), parameters, **given, causal=causal, policy=policy)
    return steps


def outlines(
    function: Callable[..., Any], sizes: Mapping[str, Any], /, *, without: Collection[str] = (), dtype: str = "float32"
) -> dict[str, Any]:
    """Make an outline for each array argument of a function, from its annotations.

    Args:
        function: the annotated function.
        sizes: the size of each axis.
        without: the last words of the names of arguments to leave out.
        dtype: the standard name of the dtype of floating-point arguments.

    Returns:
        The outlines by the name of the argument.

    Raises:
        ConfigError: an axis has no size.
    """
    wanted = (item for item in shapes_of(function).items() if not item[0].startswith("return"))
    return {
        name: Outline(tuple(evaluate(axis.text, sizes) for axis in shape.axes), DTYPES.get(shape.kind, dtype))
        for name, (shape, *_) in wanted
        if name.rpartition(".")[2] not in without
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
