"""The ledger as a table in the terminal."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from .ledger import Cell, Ledger
from .network import Crossing


def table(ledger: Ledger, /, *, title: str | None = None) -> Table:
    """Lay the ledger out: what each step takes, and under it what it gives and what that costs.

    Args:
        ledger: the books.
        title: a line above the table.

    Returns:
        A table for a rich console.
    """
    view = _plain_table(title)
    view.add_column("array, step", no_wrap=True)
    view.add_column("axes", style="cyan")
    for number in ("params", "mult-adds", "bytes"):
        view.add_column(number, justify="right", no_wrap=True)
    stage = ""
    for line in ledger.lines:
        if line.stage != stage:
            view.add_section()
            view.add_row(f"[bold]{(stage := line.stage)}[/bold]")
        for name, cell in line.arguments.items():
            view.add_row(f"  {name}", _sizes(cell), style="dim")
        numbers = (short_count(line.parameters), short_count(line.multiply_adds), short_bytes(line.bytes))
        view.add_row(f" [bold]{line.step}[/bold]", _sizes(line.result), *numbers)
    return view


def _plain_table(title: str | None) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _sizes(cell: Cell) -> str:
    return " ".join(axis if axis == str(size) else f"{axis}={size}" for axis, size in zip(cell.axes, cell.shape, strict=True))


def short_count(number: int) -> str:
    """Write a number in three digits and a prefix; nothing for 0."""
    return _scaled(number, 1000, ["", " k", " M", " G", " T", " P", " E"]) if number else ""


def short_bytes(number: int) -> str:
    """Write a number of bytes in three digits and a unit."""
    return _scaled(number, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"])


def _scaled(number: float, unit: int, suffixes: list[str]) -> str:
    power = 0
    while number >= unit and power < len(suffixes) - 1:
        number, power = number / unit, power + 1
    return f"{number:.3g}{suffixes[power]}" if power and number < 999.5 else f"{number:.0f}{suffixes[power]}"  # noqa: PLR2004


def compared(title: str, books: Mapping[str, Ledger], /) -> Table:
    """Set the totals of two ledgers side by side.

    Args:
        title: a line above the table.
        books: the two, by what stands above their totals.

    Returns:
        A table for a rich console.
    """
    view = _plain_table(title)
    view.add_column("total")
    for name in (*books, "ratio"):
        view.add_column(name, justify="right")
    first, second = (ledger.totals() for ledger in books.values())
    for name, total in first.items():
        view.add_row(name.replace("_", "-"), f"{total:,}", f"{second[name]:,}", f"{total / second[name]:.3f}")
    return view


def crossed(found: Sequence[Crossing], /) -> Table:
    """Lay out what crosses the network.

    Args:
        found: what is added up over the ranks.

    Returns:
        A table for a rich console.
    """
    view = _plain_table("What crosses the network, by an all-reduce each")
    view.add_column("array", no_wrap=True)
    view.add_column("axes", style="cyan")
    for number in ("bytes", "sent by a rank"):
        view.add_column(number, justify="right", no_wrap=True)
    for one in found:
        view.add_row(one.array, _sizes(one.cell), short_bytes(one.bytes), short_bytes(one.sent))
    return view
