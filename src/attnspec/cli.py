"""The command line."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from .bookkeeping.ledger import Ledger, ledger
from .bookkeeping.network import crossings
from .errors import AttnspecError
from .heads.command import heads
from .oracle.command import check, faults
from .spec.parameters import Heads

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def attnspec() -> None:
    """Multi-head attention, written down once, with every shape checked."""


@app.command()
def shapes(
    d_model: Annotated[int, typer.Option(help="Width of the residual stream.")] = 512,
    h: Annotated[int, typer.Option(help="Query heads.")] = 8,
    h_kv: Annotated[int | None, typer.Option(help="Key/value heads; by default as many as query heads.")] = None,
    d_k: Annotated[int | None, typer.Option(help="Width of a head's queries and keys; by default d_model / h.")] = None,
    d_v: Annotated[int | None, typer.Option(help="Width of a head's values; by default d_k.")] = None,
    batch: Annotated[int, typer.Option(help="Independent sequences.")] = 2,
    seq: Annotated[int, typer.Option(help="Query positions.")] = 6,
    seq_k: Annotated[int | None, typer.Option(help="Key positions; by default as many as query positions.")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that share the heads; shows one of them, and what they exchange.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead.")] = False,
) -> None:
    """Show the shape of every array at your sizes, and what the steps cost."""
    layer = Heads(d_model=d_model, h=h, h_kv=h_kv, d_k=d_k, d_v=d_v)
    books = partial(ledger, batch=batch, seq=seq, seq_k=seq_k)
    if tp is not None:
        _show_rank(layer, tp, books, cross=seq_k is not None, as_json=as_json)
    elif as_json:
        _print_json({"heads": asdict(layer), **books(layer).to_dict(), "one_full_width_head": books(layer.merged()).totals()})
    else:
        from .bookkeeping.show import compared, table

        columns = {f"{layer.h} heads of width {layer.d_k}": layer, f"1 head of width {layer.h * layer.d_k}": layer.merged()}
        _print(
            table(books(layer), title="Every array in float32; a step's line is what it gives"),
            compared("The same budget, spent once or many times", {name: books(sizes) for name, sizes in columns.items()}),
        )


def _show_rank(layer: Heads, ranks: int, books: Callable[[Heads], Ledger], *, cross: bool, as_json: bool) -> None:
    """Show what one of several ranks has, and what crosses the network."""
    whole, share = books(layer), books(layer.split(ranks))
    found = crossings(share, ranks, cross=cross)
    if as_json:
        network = [crossing.to_dict() for crossing in found]
        _print_json({"heads": asdict(layer), "tp": ranks, **share.to_dict(), "network": network, "whole_layer": whole.totals()})
        return
    from .bookkeeping.show import compared, crossed, table

    _print(
        table(share, title=f"Every array of one of {ranks} ranks in float32; a step's line is what it gives"),
        compared("One rank beside the whole layer", {f"1 rank of {ranks}": share, "all heads on one": whole}),
        crossed(found),
    )


def _print(*tables: Any) -> None:
    from rich.console import Console

    console = Console()
    for table in tables:
        console.print(table)


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))


app.command()(heads)
app.command()(check)
app.command()(faults)


def main() -> None:
    """Run the command line; an error of the user's is one sentence and exit status 2."""
    try:
        app()
    except AttnspecError as error:
        print(f"attnspec: {error}", file=sys.stderr)
        sys.exit(2)
