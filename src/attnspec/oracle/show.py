"""A report as text, and as plain data."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from textwrap import wrap
from typing import Any, Literal

import numpy as np

from .problem import Array, Problem
from .report import Check, Counterexample, Finding, Power, Report

WIDTH = 100
_LINES = 20
"""As many lines of a snippet are shown."""

_LETTERS = 2000
"""As many letters of a snippet are shown."""

_LEVELS = {"wrong": "Wrong", "warning": "Warning", "note": "Note"}


def text_of(report: Report, /) -> str:
    """Write a report as text: the sentence first, then what it was concluded from.

    Args:
        report: the report.

    Returns:
        Plain text of about 40 lines at most.
    """
    parts = [
        wrap(opening(report), WIDTH),
        [line for finding in report.findings for line in _finding(finding, report.sentence)],
        [] if report.counterexample is None else list(_example(report.counterexample)),
        list(_checked(report)),
        [line for sentence in (*power_of(report.power), _effort(report)) for line in wrap(sentence, WIDTH)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def opening(report: Report, /) -> str:
    """Say who it is about, and what is thought of it."""
    verb = "is undecided" if report.verdict == "undecided" else report.verdict
    return f"{report.subject} {verb}. {report.sentence}"


def _finding(finding: Finding, said: str) -> list[str]:
    parts = [*([] if finding.sentence == said else [finding.sentence]), *([f"({finding.evidence})"] if finding.evidence else [])]
    return wrap(": ".join(filter(None, (f"{_LEVELS[finding.level]}, {finding.kind}", " ".join(parts)))), WIDTH, subsequent_indent="  ")


def _example(example: Counterexample) -> Iterator[str]:
    yield from wrap(f"The smallest input that shows it: {size_of(example)}. {distance(example)}", WIDTH)
    shown, letters = [], 0
    lines = example.snippet.splitlines()
    for line in lines[:_LINES]:
        letters += len(line)
        if letters > _LETTERS:
            break
        shown.append(line)
    yield from (f"    {line}".rstrip() for line in shown)
    if len(shown) < len(lines):
        yield f"    # {len(lines) - len(shown)} more lines are in the report as HTML or JSON"


def size_of(example: Counterexample, /) -> str:
    """Say how large a counterexample is."""
    problem = example.problem
    sizes = ", ".join(f"{name}={size}" for name, size in problem.sizes.items() if name not in {"d_key_in", "d_value_in"})
    asked = ", ".join((*(["causal"] if problem.causal else []), *problem.options)) or "nothing else"
    return f"{sizes}, in {example.precision}, asked for {asked}"


def distance(example: Counterexample, /) -> str:
    """Say how far off the answer to a counterexample is."""
    if isinstance(example.got, str):
        return f"Instead of an output: {example.got}."
    error = error_of(example)
    largest = 0.0 if error is None or not error.size else float(error.max())
    if largest <= 1:
        return "The output is within the tolerance; what else is wrong is said above."
    if math.isinf(largest):
        return "The output is not finite where it must be, or the other way round."
    return f"The output is off by up to {largest:.3g} times the tolerance."


def error_of(example: Counterexample, /) -> Array | None:
    """By how much each element of an answer is off, in units of its tolerance; None where there is no such answer."""
    if isinstance(example.got, str):
        return None
    with np.errstate(all="ignore"):
        off = np.abs(example.got - example.expected)
        same = (example.got == example.expected) | (np.isnan(example.got) & np.isnan(example.expected))
        error = np.where(np.isnan(off), np.inf, off) / np.maximum(example.tolerance, np.finfo(float).tiny)
    return np.where(same | np.isnan(example.tolerance) | np.isposinf(example.tolerance) | _free(example), 0.0, error)


def _free(example: Counterexample) -> Array:
    """For which elements nothing is promised."""
    problem = example.problem
    if problem.policy.empty_row != "any":
        return np.array(False)
    empty = problem.empty_rows if problem.is_layer else ~problem.visible.any(-1)
    return np.asarray(empty)[..., None]


def standing(check: Check, /) -> Literal["holds", "fails", "warns", "not decided"]:
    """Say how a check ended; one of which nothing but a warning came does not fail."""
    if check.passed is not False:
        return "holds" if check.passed else "not decided"
    return "fails" if check.level == "wrong" else "warns"


def _checked(report: Report) -> Iterator[str]:
    by_word: dict[str, list[Check]] = {}
    for check in report.checks:
        by_word.setdefault(standing(check), []).append(check)
    for word in ("holds", "warns"):
        if word in by_word:
            yield from wrap(f"{word.capitalize()}: {'; '.join(check.name for check in by_word[word])}.", WIDTH, subsequent_indent="  ")
    for word in ("fails", "not decided"):
        for check in by_word.get(word, []):
            detail = f" ({check.detail})" if check.detail else ""
            yield from wrap(f"{word.capitalize()}: {check.name}{detail}", WIDTH, subsequent_indent="  ")


def power_of(power: Power, /) -> Iterator[str]:
    """Say what a run could have seen."""
    if power.spreads:
        yield f"The scaled scores had standard deviations of {listed(f'{spread:.3g}' for spread in power.spreads)}."
    if power.options:
        yield f"It was asked for {listed(power.options)}."
    if power.smallest_scale_error:
        seen = listed(f"{error:.1e} in {precision}" for precision, error in power.smallest_scale_error.items())
        yield f"A scale that is off by this share would have been seen: {seen}."


def listed(words: Any, /) -> str:
    """Write words as a list: a, b and c."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else str(last)


def _effort(report: Report) -> str:
    return f"{report.problems} problems in {report.seconds:.1f} s, drawn from seed {report.seed}."


def plain(report: Report, /) -> dict[str, Any]:
    """Turn a report into plain data, which JSON can hold; NaN and infinities are text.

    Args:
        report: the report.

    Returns:
        The data; `counterexample` is None where there is none.
    """
    example = report.counterexample
    return {
        "subject": report.subject,
        "verdict": report.verdict,
        "conforms": report.conforms,
        "kind": report.kind,
        "sentence": report.sentence,
        "findings": [asdict(finding) for finding in report.findings],
        "checks": [asdict(check) for check in report.checks],
        "counterexample": None if example is None else _plain_example(example),
        "power": _plain(report.power),
        "problems": report.problems,
        "by_precision": report.by_precision,
        "seconds": report.seconds,
        "seed": report.seed,
        "stages": [{"step": step, "shape": shape, "deviates": deviates} for step, shape, deviates in report.stages],
    }


def _plain_example(example: Counterexample) -> dict[str, Any]:
    parts = {name: getattr(example, name) for name in ("precision", "expected", "got", "tolerance", "snippet")}
    return {"sizes": example.problem.sizes, **_plain(parts), "problem": _plain_problem(example.problem)}


def _plain_problem(problem: Problem) -> dict[str, Any]:
    return {field.name: _plain(getattr(problem, field.name)) for field in fields(problem)}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
