"""The proof that the chain fits for all sizes: the steps run once on symbols instead of sizes."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..axes import Shape, shapes_of
from ..errors import ShapeError
from ..spec.multi_head import DEFAULT, multi_head_attention
from ..spec.policy import Policy
from ..step import Call, Trace
from .ledger import BIASES, outline_run


@dataclass(frozen=True)
class Link:
    """An array on its way from one step to the next.

    Attributes:
        source: the step that gives it, or the name of the input that it is.
        target: the step that takes it.
        argument: as which argument.
        given: its axes as the source calls them; of an input, as the target does.
        taken: its axes as the target calls them.
        shape: its sizes, in symbols.
    """

    source: str
    target: str
    argument: str
    given: Shape
    taken: Shape
    shape: tuple[Any, ...]


@dataclass(frozen=True)
class Proof:
    """That what each step gives is what the next one takes, for all sizes.

    Attributes:
        links: every array that a step takes, in order.
        calls: the steps, run on symbols.
    """

    links: tuple[Link, ...]
    calls: tuple[Call, ...]


def prove(
    *, grouped: bool = True, bias: bool = True, present: Collection[str] = (), causal: bool = False, policy: Policy = DEFAULT
) -> Proof:
    """Prove, from the annotations alone, that the chain of multi-head attention fits for all sizes.

    Each axis gets a symbol for its size. Every step must then find, under each name, the symbol of that name: neither
    another size nor another axis. Needs sympy.

    Args:
        grouped: whether there may be fewer key/value heads than query heads.
        bias: whether the projections have biases.
        present: which of the optional arrays there are: gains, sinks, gates, the bias of scores.
        causal: whether a query sees only keys up to its own position.
        policy: the conventions, which may add steps.

    Returns:
        The links of the chain.

    Raises:
        ShapeError: the first step that does not fit.
    """
    symbols = symbols_of_axes(grouped=grouped)
    steps = outline_run(symbols, present=present, absent=() if bias else BIASES, causal=causal, policy=policy)
    for call in steps.calls:
        _require_own_names(call, symbols)
    return Proof(tuple(_links(steps)), tuple(steps.calls))


def symbols_of_axes(*, grouped: bool) -> dict[str, Any]:
    """Make a symbol for the size of each axis of the chain. Needs sympy.

    Args:
        grouped: whether there may be fewer key/value heads than query heads; if not, they share a symbol.

    Returns:
        The symbols, by the names of the axes.
    """
    from sympy import Symbol

    names = {name for shapes in shapes_of(multi_head_attention).values() for shape in shapes for axis in shape.axes for name in axis.names}
    symbols = {name: Symbol(name, integer=True, positive=True) for name in sorted(names)}
    return symbols if grouped else {**symbols, "h_kv": symbols["h"]}


def _require_own_names(call: Call, symbols: dict[str, Any]) -> None:
    for name, size in call.sizes.items():
        if name in symbols and size != symbols[name]:
            raise ShapeError(f"{call.step.name}: what it calls {name} is {size}.")


def _links(steps: Trace) -> list[Link]:
    sources: dict[int, Call] = {}
    links = []
    for call in steps.calls:
        for entry in call.step.signature.entries(call.arguments):
            source = sources.get(id(entry.value))
            given = source.shapes["return"] if source else entry.shape
            name = source.step.name if source else entry.label
            links.append(Link(name, call.step.name, entry.label, given, entry.shape, entry.value.shape))
        sources[id(call.result)] = call
    return links
