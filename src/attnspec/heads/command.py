"""The command `attnspec heads`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from .shipped import TEXT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from .replay import Replay
    from .run import Layer, Run


def heads(
    text: Annotated[str, typer.Argument(help="What the model reads.")] = TEXT,
    *,
    model: Annotated[Path | None, typer.Option(help="A local model directory; by default, three layers of all-MiniLM-L6-v2.")] = None,
    layer: Annotated[int | None, typer.Option(help="Show the heads of this layer only.")] = None,
    head: Annotated[int | None, typer.Option(help="Show this head of the layer only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead.")] = False,
) -> None:
    """Show what the heads of a real model look at, computed step by step and compared with the model's own attention."""
    from .replay import replay

    run = _run(text, model)
    replays = [replay(one) for one in _chosen(run, layer, head)]
    if as_json:
        typer.echo(json.dumps(_as_data(run, replays, head)))
    else:
        from rich.console import Console

        console = Console()
        for view in _views(run, replays, layer, head, width=console.width):
            console.print(view)
    if not all(replayed.is_rounding for replayed in replays):
        raise typer.Exit(1)


def _run(text: str, model: Path | None) -> "Run":
    if model is None:
        from .shipped import shipped

        return shipped(text)
    from .models import observe

    return observe(model, text)


def _chosen(run: "Run", layer: int | None, head: int | None) -> "Sequence[Layer]":
    if layer is None:
        if head is not None:
            raise ConfigError(f"heads: --head {head} needs --layer, since every layer has heads of its own.")
        return run.layers
    chosen = [one for one in run.layers if one.index == layer]
    if not chosen:
        raise ConfigError(f"heads: there is no layer {layer}; there are {', '.join(str(one.index) for one in run.layers)}.")
    h = chosen[0].blended.shape[1]
    if head is not None and not 0 <= head < h:
        raise ConfigError(f"heads: there is no head {head}; layer {layer} has the heads 0 to {h - 1}.")
    return chosen


def _as_data(run: "Run", replays: "Sequence[Replay]", head: int | None) -> dict[str, Any]:
    return {
        "model": run.model,
        "note": run.note,
        "text": run.text,
        "tokens": run.tokens,
        "layers": [one.to_dict(run.tokens, heads=None if head is None else [head]) for one in replays],
        "difference": max(replayed.distances["blend"].difference for replayed in replays),
        "is_rounding": all(replayed.is_rounding for replayed in replays),
    }


def _views(run: "Run", replays: "Sequence[Replay]", layer: int | None, head: int | None, *, width: int) -> "Iterator[RenderableType]":
    from . import show

    if layer is None:
        from ..bookkeeping.ledger import ledger_of
        from ..bookkeeping.show import table

        yield table(ledger_of(replays[0].steps), title="Every array in layer 0; a step's line is what it gives")
        if run.examples:
            yield show.LEGEND
        for index, number in run.examples:
            yield from (show.head_view(one, number, run.tokens, width=width) for one in replays if one.layer.index == index)
        yield show.summary(replays, run.tokens)
    elif head is None:
        yield show.layer_view(replays[0], run.tokens, width=width)
    else:
        yield show.LEGEND
        yield show.head_view(replays[0], head, run.tokens, width=width)
    yield show.comparison(run, replays)
