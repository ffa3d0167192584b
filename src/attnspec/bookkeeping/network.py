"""What crosses the network where ranks share the heads, from the books of one of them."""

from dataclasses import asdict, dataclass
from typing import Any

from ..axes import evaluate
from .ledger import Cell, Ledger

SENT = "2*(ranks-1)*bytes//ranks"
"""What each rank sends of an array of so many bytes in a ring: once around to add up, and once around to hand the sums out."""


@dataclass(frozen=True)
class Crossing:
    """An array that is added up over the ranks, by one all-reduce.

    Attributes:
        array: what is added up: the output forward, gradients backward.
        cell: its axes, sizes and dtype.
        ranks: how many ranks there are.
    """

    array: str
    cell: Cell
    ranks: int

    @property
    def bytes(self) -> int:
        """How many bytes the array takes."""
        return int(self.cell.bytes)

    @property
    def sent(self) -> int:
        """How many bytes each rank sends."""
        return int(evaluate(SENT, {"ranks": self.ranks, "bytes": self.bytes}))

    def to_dict(self) -> dict[str, Any]:
        """The crossing as plain data."""
        return {**asdict(self), "bytes": self.bytes, "sent": self.sent}


def crossings(share: Ledger, ranks: int, /, *, cross: bool) -> tuple[Crossing, ...]:
    """Tell what crosses the network in one step of training.

    Args:
        share: the books of one rank.
        ranks: how many ranks there are.
        cross: whether the context is another array than `x`, with a gradient of its own.

    Returns:
        What is added up, in order.
    """
    fan_out = {"x": share["project_queries"].arguments["x"], "context": share["project_keys"].arguments["context"]}
    gradients = (Crossing(f"gradient of {name}", cell, ranks) for name, cell in fan_out.items() if cross or name == "x")
    return Crossing("output", share["mix"].result, ranks), *gradients
