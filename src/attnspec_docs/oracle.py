"""What the pages on the oracle show: reports of real runs, what is looked at, and the catalogue of faults."""

import contextlib
import io
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from attnspec.oracle.examination import LONG
from attnspec.oracle.faults.catalogue import CATALOGUE
from attnspec.oracle.faults.kinds import KINDS, OTHER, Kind
from attnspec.oracle.html import page
from attnspec.oracle.isolation import MEMORY_MB, SECONDS
from attnspec.oracle.known import _CLASSES as KNOWN_CLASSES
from attnspec.oracle.properties import PROPERTIES

from .blocks import block
from .writing import figure, folded, table

_EXAMPLES = Path(__file__).parents[2] / "docs" / "use" / "examples"


@cache
def _run(name: str) -> tuple[str, str, dict[str, Any]]:
    """An example: its code, what it prints, and its names."""
    code, names = (_EXAMPLES / f"{name}.py").read_text(), {"__name__": name}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, f"{name}.py", "exec"), names)  # noqa: S102  # the examples of this documentation
    return code, printed.getvalue(), names


@block
def example(name: str) -> str:
    """The code of an example, and what it prints: `[[example wrong]]`."""
    code, printed, _ = _run(name)
    return f"```python\n{code}```\n\n{_printed(printed)}"


def _printed(words: str) -> str:
    return f"```{{ .text .wrapped }}\n{words.strip()}\n```"


@block
def counterexample(name: str) -> str:
    """The smallest failing call that the report of an example holds."""
    return f"```python\n{_run(name)[2]['report'].counterexample.snippet}\n```"


@block
def report_text(name: str) -> str:
    """The whole report of an example, as it is printed."""
    return folded("All that was looked at: print(report)", _printed(str(_run(name)[2]["report"])))


@block
def report_page(name: str) -> str:
    """The report of an example as the page that `to_html` writes."""
    written = escape(page(_run(name)[2]["report"])).replace("\n", "&#10;")
    return figure(f'<iframe title="The report as a page" srcdoc="{written}"></iframe>', kind="report")


@block
def properties() -> str:
    """What must hold for any weights, by the names that `strict=` takes."""
    rows = [(f"`{name}`", prop.law) for name, prop in PROPERTIES.items()]
    return folded("The properties, by name", table(("property", "what must hold"), rows, numbers_from=9))


@block
def known_classes() -> str:
    """The classes of which nothing need be said, by the package that they come from."""
    found: dict[str, list[str]] = {}
    for path in KNOWN_CLASSES:
        found.setdefault(path.partition(".")[0], []).append(f"`{path.rpartition('.')[2]}`")
    return "; ".join(f"{package}: {', '.join(dict.fromkeys(names))}" for package, names in found.items())


@block
def limits() -> str:
    """How much time and memory a child process may take where nothing else is said."""
    return f"{SECONDS:,.0f} seconds and {MEMORY_MB:,} MB"


@block
def long_keys() -> str:
    """As many keys as the longest problems have."""
    return str(LONG)


@block
def faults() -> str:
    """Every kind of fault, family by family: what it is, the smallest input that shows it, what is said of it, and where it was seen."""
    parts: list[str] = []
    for family in dict.fromkeys(kind.family for kind in KINDS.values()):
        parts.append(f"## {family[0].upper()}{family[1:]}")
        parts += [_kind(kind) for kind in KINDS.values() if kind.family == family]
    parts.append("## Other names in reports { #other }")
    parts.append("These are no faults of attention, or were not seen in public.")
    return "\n\n".join([*parts, *(_kind(kind) for kind in OTHER.values())])


def _kind(kind: Kind) -> str:
    says = list(dict.fromkeys(fault.says for fault in CATALOGUE if fault.kind == kind.name))
    lines = [f"### `{kind.name}` {{ #fault-{kind.name} }}", kind.meaning]
    if kind.witness != "any":
        lines.append(f"**Smallest input that can show it**: {kind.witness}.")
    if len(says) == 1:
        lines.append(f"**What the report says**: “It is multi-head attention, but {says[0]}.”")
    elif says:
        ways = "\n".join(f"- … but {said}." for said in says)
        lines.append(folded(f"What the report says, one of {len(says)} sentences: “It is multi-head attention, …”", ways))
    elif kind.threads:
        lines.append("**What the report says**: what a check of its own found, on which input.")
    seen = ", ".join(f"[{thread}](https://github.com/{thread.replace('#', '/issues/')})" for thread in kind.threads)
    return "\n\n".join([*lines, *([f"**Seen in**: {seen}."] if seen else [])])


@block
def fault_counts() -> str:
    """How many faults the catalogue has."""
    known = {(fault.kind, fault.says) for fault in CATALOGUE if fault.kind in KINDS}
    threads = {thread for kind in KINDS.values() for thread in kind.threads}
    return f"{len(known)} faults of {len(KINDS)} kinds, collected from {len(threads)} public reports"
