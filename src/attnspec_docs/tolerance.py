"""Tolerances at work: where each precision rounds, and how far right and wrong answers are off, on a problem that is computed."""

import math
from functools import cache
from typing import Any

import numpy as np

import attnspec
from attnspec.bookkeeping.svg import DIM, INK, Piece, document, line, text
from attnspec.oracle.errors import SIGMAS
from attnspec.oracle.examination import RETRIES, ROUGH
from attnspec.oracle.rounding import LENIENT, ROUNDINGS, Rounding
from attnspec.oracle.tolerance import Tolerance, tolerance
from attnspec.oracle.verdict import DIFFUSE

from .blocks import block
from .writing import figure, table

_PLACES = ("unit", "operands", "projected", "scores", "weights", "blended", "output")
_COMMON = {"rtol 1e-3, atol 1e-5": (1e-3, 1e-5), "rtol 1e-5, atol 1e-8": (1e-5, 1e-8)}
"""Two tolerances for all elements: one that is often written, and the one that NumPy has by default."""


@block
def roundings() -> str:
    """Where each precision rounds: the unit roundoff of every place."""
    rows = [(f"`{name}`", *map(_power, _units(way))) for name, ways in ROUNDINGS.items() for way in ways]
    head = ("precision", "arithmetic", "factors of products", "Q, K, V", "scores", "weights", "what heads find", "output")
    return table(head, rows)


@block
def lenient() -> str:
    """Where rougher ways to compute, which are right too, round otherwise."""
    rows = [
        (f"`{name}`", _power(way.unit), _power(way.blended), f"{way.peak:g} times")
        for name, ways in LENIENT.items()
        for way in ways
        if way not in ROUNDINGS[name]
    ]
    return table(("precision", "arithmetic", "what heads find", "the largest score, before it is subtracted"), rows)


def _units(way: Rounding) -> list[float]:
    return [getattr(way, place) for place in _PLACES]


def _power(unit: float) -> str:
    return rf"\( 2^{{{math.log2(unit):.0f}}} \)" if unit else ""


@block
def tolerance_constant(name: str) -> str:
    """A constant of the rule, for the middle of a sentence: `[[tolerance_constant sigmas]]`."""
    return {"sigmas": f"{SIGMAS}", "retries": f"{RETRIES}", "rough": f"{ROUGH:g}", "diffuse": f"{DIFFUSE:g}"}[name]


@cache
def _worked() -> tuple[Any, Any, dict[str, Any], Tolerance]:
    """One attention: what each step gives in float64 and in float32, answers in float32, and the tolerance for those."""
    rng = np.random.default_rng(0)
    spreads = np.geomspace(0.1, 8, 24)[:, None]  # from queries that look at all keys to some that look at one
    exact = [(rng.normal(size=(1, 2, n, 16)) * (spreads if n == len(spreads) else 1)).astype(np.float32) for n in (24, 40, 40)]
    with attnspec.trace() as wanted:
        attnspec.attend(*(array.astype(np.float64) for array in exact))
    with attnspec.trace() as found:
        right = attnspec.attend(*exact)
    answers = {
        "right": right,
        "scale off by 0.001 %": attnspec.attend(*exact, scale=(1 + 1e-5) / 4),
        "scale off by 0.1 %": attnspec.attend(*exact, scale=(1 + 1e-3) / 4),
    }
    return wanted, found, answers, tolerance(wanted, ROUNDINGS["float32"])


@block
def tolerance_steps() -> str:
    """The right computation, step by step: how far it is off, and how far it may be."""
    wanted, found, _, _ = _worked()
    rows = []
    for name in wanted:
        off, allowed = np.abs(found[name].result - wanted[name].result), tolerance(wanted, ROUNDINGS["float32"], of=name)
        shares = [f"{np.max(off / np.maximum(limit, 1e-300)):.2f}" for limit in (allowed.drawn, allowed.worst)]
        rows.append((f"[`{name}`][attnspec.{name}]", f"{off.max():.1e}", f"{np.median(allowed.drawn):.1e}", *shares))
    return table(("step", "largest error", "tolerance (median)", "error / tolerance", "error / worst case"), rows)


@block
def tolerance_numbers() -> str:
    """How far right and wrong answers are off, in units of the tolerance, and what tolerances for all elements say."""
    wanted, _, answers, allowed = _worked()
    exact, rows = wanted["blend"].result, []
    for name, answer in answers.items():
        off = np.abs(answer - exact)
        shares = [f"{(off / limit).max():.2f}" for limit in (allowed.drawn, allowed.worst)]
        said = ["accepts" if np.allclose(answer, exact, rtol, atol) else "rejects" for rtol, atol in _COMMON.values()]
        rows.append((name, f"{off.max():.1e}", *shares, *said))
    return table(("answer in float32", "largest error", "error / tolerance", "error / worst case", *_COMMON), rows)


@block
def tolerance_range() -> str:
    """By how much the tolerances of the elements of one answer differ."""
    allowed = _worked()[3].drawn
    return f"{allowed.max() / allowed.min():,.0f}"


_LEFT, _TOP, _WIDE, _HIGH = 64.0, 12.0, 260.0, 330.0
_ACROSS, _UP = (-6.8, -4.8), (-10.0, -4.6)
"""The powers of ten that the picture reaches from and to."""
_MARKS = {
    "right": ("●", "light-dark(#0a6b62, #56d4c4)"),
    "scale off by 0.001 %": ("×", "light-dark(#b3261e, #ff9b92)"),
}


@block
def tolerance_picture() -> str:
    """The error of every element beside its own tolerance, for a right answer and for one that is slightly wrong."""
    wanted, _, answers, allowed = _worked()
    parts = [*_frame()]
    for row, (name, (mark, colour)) in enumerate(_MARKS.items()):
        parts.append(text(_LEFT + _WIDE, _TOP + _HIGH - 28 + 16 * row, f"{mark} {name}", fill=colour, anchor="end"))
        off = np.abs(answers[name] - wanted["blend"].result)
        for error, limit in zip(off.flat[::7], allowed.drawn.flat[::7], strict=True):
            x, y = _place(limit, error)
            parts.append(text(x, y + 4, mark, fill=colour))
    shown = document(
        Piece("".join(parts), _LEFT + _WIDE + 8, _TOP + _HIGH + 44),
        "Errors beside their tolerances",
        "Errors of a right computation lie below the line of equal error and tolerance; with a scale that is slightly off, many lie above.",
    )
    caption = (
        "Each mark is one element of the output: its tolerance to the right, its error upwards. Above the line an error is larger than its "
        "tolerance."
    )
    return figure(shown, caption=caption)


def _place(limit: float, error: float) -> tuple[float, float]:
    """Where an element stands, on scales of powers of ten."""
    shares = [(math.log10(max(one, 1e-12)) - low) / (high - low) for one, (low, high) in ((limit, _ACROSS), (error, _UP))]
    return _LEFT + _WIDE * shares[0], _TOP + _HIGH * (1 - max(shares[1], 0.0))


def _frame() -> list[str]:
    right, bottom = _LEFT + _WIDE, _TOP + _HIGH
    start, end = (_place(10.0**power, 10.0**power) for power in _ACROSS)
    return [
        line((_LEFT, _TOP), (_LEFT, bottom), DIM),
        line((_LEFT, bottom), (right, bottom), DIM),
        line(start, end, INK, 1.5),
        text(_LEFT + _WIDE / 2, bottom + 34, "tolerance of the element", bold=True),
        text(12, _TOP + _HIGH / 2, "error of the element", bold=True, turn=True),
        *(text(_place(10.0**power, 1)[0], bottom + 16, f"1e{power}", fill=DIM) for power in (-6, -5)),
        *(text(_LEFT - 6, _place(1, 10.0**power)[1] + 4, f"1e{power}", fill=DIM, anchor="end") for power in range(-10, -4)),
    ]
