"""What the pages on the oracle show: reports of real runs, the catalogue of faults, and tolerances at work."""

import contextlib
import io
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

import attnspec
from attnspec.bookkeeping.svg import DIM, INK, Piece, document, line, text
from attnspec.oracle.faults.catalogue import CATALOGUE
from attnspec.oracle.faults.kinds import KINDS
from attnspec.oracle.html import page
from attnspec.oracle.tolerance import ROUNDINGS, tolerance

from .blocks import block
from .numbers import table

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
    return f"```python\n{code}```\n\n```text\n{printed}```"


@block
def counterexample(name: str) -> str:
    """The smallest failing call that the report of an example holds."""
    return f"```python\n{_run(name)[2]['report'].counterexample.snippet}\n```"


@block
def report_text(name: str) -> str:
    """The whole report of an example, as it is printed."""
    return f"```text\n{_run(name)[2]['report']}\n```"


@block
def report_page(name: str) -> str:
    """The report of an example as the page that `to_html` writes."""
    written = escape(page(_run(name)[2]["report"])).replace("\n", "&#10;")
    return f'<figure class="report" markdown="0"><iframe title="The report as a page" srcdoc="{written}"></iframe></figure>'


@block
def faults() -> str:
    """Every kind of fault, family by family: what it is, the smallest input that shows it, what is said of it, and where it was seen."""
    parts: list[str] = []
    for family in dict.fromkeys(kind.family for kind in KINDS.values()):
        parts.append(f"## {family[0].upper()}{family[1:]}")
        parts += [_kind(name) for name, kind in KINDS.items() if kind.family == family]
    return "\n\n".join(parts)


def _kind(name: str) -> str:
    kind = KINDS[name]
    says = dict.fromkeys(fault.says for fault in CATALOGUE if fault.kind == name)
    ways = "\n".join(f"    - … but {said}." for said in says)
    seen = ", ".join(f"[{thread}](https://github.com/{thread.replace('#', '/issues/')})" for thread in kind.threads)
    return "\n\n".join([
        f"### `{name}` {{ #fault-{name} }}",
        kind.meaning,
        f"**Smallest input that can show it**: {kind.witness}.",
        f'??? note "What is said of it, in {len(says)} ways: “It is multi-head attention, …”"\n\n{ways}',
        f"**Seen in**: {seen}." if seen else "",
    ])  # fmt: skip


@block
def fault_counts() -> str:
    """How many faults the catalogue has."""
    return f"{len({(fault.kind, fault.says) for fault in CATALOGUE})} faults of {len(KINDS)} kinds"


def _worked() -> tuple[Any, dict[str, Any], Any]:
    """One attention: its exact answer, answers in float32, and the tolerance for those."""
    rng = np.random.default_rng(0)
    spreads = np.geomspace(0.1, 8, 24)[:, None]  # from queries that look at all keys to some that look at one
    exact = [(rng.normal(size=(1, 2, n, 16)) * (spreads if n == len(spreads) else 1)).astype(np.float32) for n in (24, 40, 40)]
    with attnspec.trace() as steps:
        wanted = attnspec.attend(*(array.astype(np.float64) for array in exact))
    answers = {
        "right": attnspec.attend(*exact),
        "scale off by 0.001 %": attnspec.attend(*exact, scale=(1 + 1e-5) / 4),
        "scale off by 0.1 %": attnspec.attend(*exact, scale=(1 + 1e-3) / 4),
    }
    return wanted, answers, tolerance(steps, ROUNDINGS["float32"])


@block
def tolerance_numbers() -> str:
    """How far right and wrong answers are off, in units of the tolerance, and what another rule says."""
    wanted, answers, allowed = _worked()
    rows = []
    for name, answer in answers.items():
        off = np.abs(answer - wanted)
        shares = [f"{(off / limit).max():.2f}" for limit in (allowed.drawn, allowed.worst)]
        rows.append((name, f"{off.max():.1e}", *shares, "yes" if np.allclose(answer, wanted) else "no"))
    head = ("answer in float32", "largest error", "in units of its tolerance", "of the worst case", "`numpy.allclose` accepts")
    return table(head, rows)


_LOW, _HIGH, _LEFT, _TOP, _SIDE = -10.0, -4.5, 64.0, 20.0, 250.0
_MARKS = {
    "right": ("●", "light-dark(#0a6b62, #56d4c4)"),
    "scale off by 0.001 %": ("×", "light-dark(#b3261e, #ff9b92)"),
}


@block
def tolerance_range() -> str:
    """By how much the tolerances of the elements of one answer differ."""
    allowed = _worked()[2].drawn
    return f"{allowed.max() / allowed.min():,.0f}"


@block
def tolerance_picture() -> str:
    """The error of every element beside its own tolerance, for a right answer and for one that is slightly wrong."""
    wanted, answers, allowed = _worked()
    parts = [*_frame()]
    for row, (name, (mark, colour)) in enumerate(_MARKS.items()):
        parts.append(text(_LEFT + 12, _TOP + 18 + 16 * row, f"{mark} {name}", fill=colour, anchor="start"))
        for off, limit in zip(np.abs(answers[name] - wanted).flat[::7], allowed.drawn.flat[::7], strict=True):
            parts.append(text(_LEFT + _along(limit), _TOP + _SIDE - _along(off) + 4, mark, fill=colour))
    shown = document(
        Piece("".join(parts), _LEFT + _SIDE + 20, _SIDE + 62),
        "Errors beside their tolerances",
        "Errors of a right computation lie below the line of equal error and tolerance; with a scale that is slightly off, many lie above.",
    )
    return f'<figure class="step" markdown="0">{shown}<figcaption>Each mark is one element of the output, in float32.</figcaption></figure>'


def _along(value: float) -> float:
    """How far along an axis of powers of ten a number stands."""
    return _SIDE * float(np.clip((np.log10(max(value, 1e-12)) - _LOW) / (_HIGH - _LOW), 0, 1))


def _frame() -> list[str]:
    right, bottom = _LEFT + _SIDE, _TOP + _SIDE
    powers = range(-10, -4)
    return [
        line((_LEFT, _TOP), (_LEFT, bottom), DIM),
        line((_LEFT, bottom), (right, bottom), DIM),
        line((_LEFT, bottom), (right, _TOP), INK, 1.5),
        text(right - 4, bottom - 8, "the line: error = tolerance", anchor="end"),
        text(_LEFT + _SIDE / 2, bottom + 34, "tolerance of the element", bold=True),
        text(16, _TOP + _SIDE / 2, "error of the element", bold=True, turn=True),
        *(text(_LEFT + _along(10.0**power), bottom + 16, f"1e{power}", fill=DIM) for power in powers),
        *(text(_LEFT - 6, bottom - _along(10.0**power) + 4, f"1e{power}", fill=DIM, anchor="end") for power in powers),
    ]
