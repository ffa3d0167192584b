"""The command line."""

import dataclasses
import json
import sys
from typing import Annotated

import typer

from .bookkeeping.ledger import ledger
from .errors import AttnspecError
from .heads.command import heads
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
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead.")] = False,
) -> None:
    """Show the shape of every array at your sizes, and what the steps cost."""
    layer = Heads(d_model=d_model, h=h, h_kv=h_kv, d_k=d_k, d_v=d_v)
    many, one = (ledger(sizes, batch=batch, seq=seq, seq_k=seq_k) for sizes in (layer, layer.merged()))
    if as_json:
        data = {"heads": dataclasses.asdict(layer), **many.to_dict(), "one_full_width_head": one.totals()}
        print(json.dumps(data, indent=2))
        return
    from rich.console import Console

    from .bookkeeping.show import compared, table

    console = Console()
    console.print(table(many, title="Every array in float32; a step's line is what it gives"))
    console.print(compared(layer, many, one))


app.command()(heads)


def main() -> None:
    """Run the command line; an error of the user's is one sentence and exit status 2."""
    try:
        app()
    except AttnspecError as error:
        print(f"attnspec: {error}", file=sys.stderr)
        sys.exit(2)
