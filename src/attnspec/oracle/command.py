"""The commands `attnspec check` and `attnspec faults`."""

import difflib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError

if TYPE_CHECKING:
    from .examination import Progress
    from .job import Job
    from .report import Report

_STATUS = {"conforms": 0, "deviates": 1, "undecided": 3}


def check(
    target: Annotated[str, typer.Argument(help="The implementation, as MODULE:ATTRIBUTE; or a subject of pyproject.toml.")],
    *,
    args: Annotated[str | None, typer.Option(help="What the attribute is called with: '24, 4, batch_first=True'.")] = None,
    call: Annotated[str | None, typer.Option(help="How to call the layer m: 'm(x, mask=keep)'.")] = None,
    mask: Annotated[str | None, typer.Option(help="How its mask is meant: keep, drop, additive, lengths or none.")] = None,
    mask_axes: Annotated[str | None, typer.Option(help="The axes of its mask: 'batch seq_q seq_k'; several with ; between.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal", help="It is always causal.")] = None,
    layout: Annotated[str | None, typer.Option(help="What its tensors hold: the name of a layout, or a file: layout.toml.")] = None,
    heads: Annotated[str | None, typer.Option(help="Its sizes: 'd_model=24, h=4'.")] = None,
    policy: Annotated[str | None, typer.Option(help="Its conventions: 'empty_row=\"any\"'.")] = None,
    options: Annotated[str | None, typer.Option(help="The options that it takes: 'causal, scale'.")] = None,
    attention: Annotated[bool | None, typer.Option("--attention", help="It is a function of queries, keys and values.")] = None,
    cache: Annotated[bool | None, typer.Option("--cache", help="It makes a decoder that keeps a cache.")] = None,
    properties: Annotated[bool | None, typer.Option("--properties", help="Check only what must hold for any weights.")] = None,
    order: Annotated[str | None, typer.Option(help="The axes of a function's arrays: bhsd or bshd.")] = None,
    library: Annotated[str | None, typer.Option(help="Whose arrays it takes: numpy, torch or jax.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report as an HTML file.")] = None,
    as_json: Annotated[bool | None, typer.Option("--json", help="Print plain data instead.")] = None,
    effort: Annotated[str | None, typer.Option(help="How much to try: quick, default or thorough.")] = None,
    seed: Annotated[int | None, typer.Option(help="What the problems are drawn from.")] = None,
    timeout: Annotated[float | None, typer.Option(help="How many seconds it may take; 300 by default.")] = None,
    memory: Annotated[int | None, typer.Option(help="How much memory it may take, in MB; 4096 by default.")] = None,
    in_process: Annotated[bool | None, typer.Option("--in-process", help="Examine it in this process, without limits.")] = None,
) -> None:
    """Tell whether an implementation is multi-head attention, and if not, what is wrong with it.

    The exit status is 0 if it conforms, 1 if it deviates, 2 if the command is wrong, and 3 if nothing could be decided.
    """
    said = dict(locals())
    said["json"] = said.pop("as_json")
    from .settings import gathered, job_of

    settings = gathered(said.pop("target"), said, directory=Path.cwd())
    found = _examined(job_of(settings), settings)
    typer.echo(found.to_json() if settings.get("json") else str(found))
    if "report" in settings:
        found.to_html(settings["report"])
    raise typer.Exit(_STATUS[found.verdict])


def _examined(job: "Job", settings: Mapping[str, Any]) -> "Report":
    from .isolation import MEMORY_MB, SECONDS, run_isolated

    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    with _bar() as progress:
        if settings.get("in_process"):
            return job.examine(job.make(), progress)
        seconds, memory_mb = settings.get("timeout", SECONDS), settings.get("memory", MEMORY_MB)
        return run_isolated(job, seconds=seconds, memory_mb=memory_mb, progress=progress)


@contextmanager
def _bar() -> "Iterator[Progress | None]":
    """Show a bar on the standard error while something works, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("import", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def faults(
    kind: Annotated[str | None, typer.Argument(help="Explain this kind of fault.")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead.")] = False,
) -> None:
    """List the kinds of faults that real implementations of attention had, or explain one."""
    from dataclasses import asdict

    from .faults.kinds import KINDS, OTHER

    if kind is not None and kind not in (known := KINDS | OTHER):
        near = difflib.get_close_matches(kind, known, n=1, cutoff=0)
        raise ConfigError(f"faults: there is no kind {kind!r}; did you mean {near[0]}? `attnspec faults` lists all.")
    chosen = list(KINDS.values()) if kind is None else [(KINDS | OTHER)[kind]]
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in chosen]))
        return
    _print_kinds(chosen) if kind is None else _print_kind(chosen[0])


def _print_kinds(kinds: list[Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    view.add_column("kind", no_wrap=True, style="bold")
    view.add_column("what is wrong")
    family = ""
    for one in kinds:
        if one.family != family:
            view.add_section()
            family = one.family
        view.add_row(one.name, one.meaning)
    Console().print(view)
    typer.echo(f"{len(kinds)} kinds; `attnspec faults KIND` explains one.")


def _print_kind(kind: Any) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console, threads = Console(highlight=False), "\n".join(kind.threads)
    console.print(f"[bold]{kind.name}[/bold], of the family {kind.family}\n")
    seen = threads or "No public thread is known of; code with this fault was made to see that the oracle names it."
    for title, text in (("What is wrong", kind.meaning), ("Smallest input that can show it", kind.witness), ("Seen in", seen)):
        console.print(f"[bold]{title}[/bold]")
        console.print(Padding(Text(text), (0, 0, 1, 2)))
