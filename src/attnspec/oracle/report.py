"""A report: the sentence first, the numbers after."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import AttnspecError
from .problem import Array, Problem

Verdict = Literal["conforms", "deviates", "undecided"]
Level = Literal["wrong", "warning", "note"]


class ConformanceError(AttnspecError, AssertionError):
    """An implementation of attention deviates from the specification, or nothing could be decided."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        kind: which kind of fault it is, by its name in the catalogue; or which property fails.
        sentence: what is wrong, in one sentence.
        level: `wrong` makes the verdict; a `warning` and a `note` do not.
        evidence: what it was concluded from, in numbers.
    """

    kind: str
    sentence: str
    level: Level = "wrong"
    evidence: str = ""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what must hold.
        passed: whether it does; None where it could not be decided.
        detail: on how many problems, and by how much.
        sentence: what is wrong, where it does not hold.
        level: what it means where it does not hold: only what is `wrong` fails.
    """

    name: str
    passed: bool | None
    detail: str = ""
    sentence: str = ""
    level: Level = "wrong"


@dataclass(frozen=True, eq=False)
class Counterexample:
    """The smallest problem found that the implementation gets wrong.

    Attributes:
        problem: the problem.
        precision: the dtype of its arrays.
        expected: what the specification says.
        got: what came; a sentence where that is no array of the same shape.
        tolerance: how far it may be off, element by element.
        snippet: Python code that shows it, with NumPy and the caller's call.
    """

    problem: Problem
    precision: str
    expected: Array
    got: Array | str
    tolerance: Array
    snippet: str = ""


@dataclass(frozen=True)
class Power:
    """How much this run could have seen.

    Attributes:
        spreads: the standard deviations of the scaled scores that were reached.
        smallest_scale_error: the smallest relative error of the scale that would have been seen, by precision.
        options: which options were exercised.
        precisions: which precisions were.
    """

    spreads: tuple[float, ...] = ()
    smallest_scale_error: dict[str, float] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Report:
    """What the oracle found out about one implementation.

    Attributes:
        subject: what the implementation is called.
        verdict: whether it conforms, deviates, or nothing could be decided.
        sentence: the verdict, in one sentence.
        findings: what was found, the most important first.
        checks: what was looked at.
        counterexample: the smallest failing problem; None where none fails.
        power: how much the run could have seen.
        problems: how many problems were put; where only properties were looked at, how many of those.
        by_precision: how many problems were put in each precision.
        seconds: how long it took.
        seed: what the problems were drawn from.
        stages: the steps, with the shape of each result at the counterexample, and whether the fault is in that step.
    """

    subject: str
    verdict: Verdict
    sentence: str
    findings: tuple[Finding, ...] = ()
    checks: tuple[Check, ...] = ()
    counterexample: Counterexample | None = None
    power: Power = field(default_factory=Power)
    problems: int = 0
    by_precision: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    seed: int = 0
    stages: tuple[tuple[str, str, bool], ...] = ()

    @property
    def conforms(self) -> bool | None:
        """True where it conforms, False where it deviates, None where nothing could be decided."""
        return {"conforms": True, "deviates": False, "undecided": None}[self.verdict]

    @property
    def kind(self) -> str | None:
        """The kind of the first fault that was found; None where there is none."""
        return next((finding.kind for finding in self.findings if finding.level == "wrong"), None)

    def raise_if_wrong(self) -> None:
        """Raise an error unless the implementation conforms.

        Raises:
            ConformanceError: it deviates, or nothing could be decided; the message is the report.
        """
        if self.verdict != "conforms":
            raise ConformanceError(str(self))

    def __str__(self) -> str:
        from .show import text_of

        return text_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        from .show import plain

        return plain(self)

    def to_json(self, path: str | Path | None = None, /) -> str:
        """Return the report as JSON, and write it to a file if one is named."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_html(self, path: str | Path, /) -> None:
        """Write the report as one HTML file that needs no other."""
        from .html import page

        Path(path).write_text(page(self), encoding="utf-8")
