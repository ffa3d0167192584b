"""The examination of one implementation: what is asked of it, and what it answered."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ..errors import ConfigError
from .design import Choice, Profile, choices, draw
from .faults.fault import Fault
from .options import OPTIONS
from .problem import Crash, Problem
from .properties import PROPERTIES, Outcome, check_properties
from .report import Check, Finding, Power
from .rounding import LENIENT, ROUNDINGS, Rounding
from .subject import Subject
from .verdict import Question, Verdict, answered, ask, judge

Effort = Literal["quick", "default", "thorough"]
Progress = Callable[[str, int, int], None]
SEEDS = {"quick": 1, "default": 2, "thorough": 12}
SPREADS = (1.0, 8.0)
RETRIES = 4
LONG, FEW = 131, 5
"""As many keys as show what happens behind a tile of 128, and the queries beside them."""
ROUGH = 50.0
"""Answers that are off by at most so many tolerances may come from a rougher way to compute."""
_MASKS = ("keep", "padding", "lengths")


class NeverAnsweredError(Exception):
    """An implementation raises an error whatever it is asked."""

    def __init__(self, crash: Crash) -> None:
        super().__init__(crash.error)
        self.crash = crash


@dataclass(eq=False)
class Examination:
    """An implementation, what may be asked of it, and what it answered.

    Attributes:
        subject: the implementation.
        profile: what may be asked of it.
        effort: how many problems are put.
        seed: what they are drawn from.
        progress: is told what is being done, how much of it is done, and how much there is.
        strict: the properties that make the verdict where others only warn.
        counts: how many problems were put in each precision.
        strained: the verdicts on wrong answers where scores are large.
        stood: the verdicts on right ones there, which no small fill of dropped keys would give.
    """

    subject: Subject
    profile: Profile
    effort: Effort = "default"
    seed: int = 0
    progress: Progress | None = None
    strict: Collection[str] = ()
    verdicts: list[Verdict] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    inside: tuple[Rounding, ...] = ROUNDINGS["float64"]
    counts: Counter[str] = field(default_factory=Counter)
    rough: set[str] = field(default_factory=set)
    strained: list[Verdict] = field(default_factory=list)
    stood: list[Verdict] = field(default_factory=list)
    faults: tuple[Fault, ...] = ()

    def tell(self, what: str, done: int, total: int) -> None:
        """Tell how far it is."""
        if self.progress is not None:
            self.progress(what, done, total)

    def fit_profile(self) -> None:
        """Find out which sizes the implementation allows, and which ways of asking.

        Raises:
            NeverAnsweredError: it answers nothing at all.
        """
        answers = {tokens: self._try({"tokens": tokens}) for tokens in self.profile.tokens}
        crashes = {tokens: answer for tokens, answer in answers.items() if isinstance(answer, Crash)}
        if len(crashes) == len(answers):
            raise NeverAnsweredError(next(iter(crashes.values())))
        self.profile = replace(self.profile, tokens=tuple(tokens for tokens in answers if tokens not in crashes))
        for tokens, crash in crashes.items():
            said = {
                "wide": "fewer queries than keys",
                "tall": "more queries than keys",
                "square": "as many queries as keys",
                "one query": "one query",
            }
            text = f"It refuses {said.get(tokens, 'self-attention')} ({crash.error})."
            self.findings.append(Finding("refused", text, "note"))
        if self.is_slow:
            self.profile = replace(self.profile, tokens=self.profile.tokens[:2], heads=self.profile.heads[:1])
        self._fit_draws()

    @property
    def is_slow(self) -> bool:
        """Whether every new shape costs much, as in JAX, which compiles each operation for it."""
        return self.subject.library.name == "jax" and self.effort != "thorough"

    def _fit_draws(self) -> None:
        """Leave out masks whose axes of size 1 the implementation does not take."""
        draws = dict(self.profile.draws)
        for name in self.profile.options:
            words = draws.get(name, tuple(OPTIONS[name].draws))
            shared = [word for word in words if word.startswith("shared")]
            refused = [word for word in shared if isinstance(self._try(self._alone(name, word)), Crash)]
            if refused and not isinstance(self._try(self._alone(name, "drawn")), Crash):
                draws[name] = tuple(word for word in words if word not in refused)
                self.findings.append(
                    Finding("refused", f"It does not take a {name} with axes of size 1 that is {', '.join(refused)}.", "note")
                )
        self.profile = replace(self.profile, draws=draws)

    def _alone(self, name: str, word: str) -> Choice:
        needed = {other: next(iter(OPTIONS[other].draws)) for other in OPTIONS[name].needs if other in self.profile.options}
        tokens = next((word for word in ("self", "square") if word in self.profile.tokens), self.profile.tokens[0])
        return {"tokens": tokens if OPTIONS[name].square else self.profile.tokens[0], **needed, name: word}

    def _try(self, choice: Choice) -> Any:
        return self.subject.answer(draw(self.profile, choice, seed=self.seed))

    def put(self, problems: Iterable[Problem], precision: str) -> list[Verdict]:
        """Put problems in a precision; what is suspect is asked again with fresh numbers."""
        found = []
        for problem in problems:
            roundings = self.inside if precision == "float64" else ROUNDINGS[precision]
            self.counts[precision] += 1
            found.append(self._certain(answered(self.subject, ask(problem, precision=precision, roundings=roundings))))
        return found

    def _certain(self, verdict: Verdict) -> Verdict:
        """Make up the mind about an answer: allow for rougher ways to compute, then ask again with other numbers."""
        verdict = self.forgiven(verdict)
        question = verdict.question
        if verdict.status != "suspect":
            return verdict
        again = [self._jittered(question, index) for index in range(RETRIES)]
        return replace(verdict, status="wrong" if sum(v.status != "right" for v in again) > RETRIES // 2 else "right")

    def forgiven(self, verdict: Verdict, /) -> Verdict:
        """Allow for rougher ways to compute, where that explains an answer."""
        question = verdict.question
        if verdict.status == "right" or not verdict.ratio < ROUGH or self.inside != ROUNDINGS["float64"]:
            return verdict
        rougher = judge(ask(question.problem, precision=question.precision, roundings=LENIENT[question.precision]), verdict.answer)
        if rougher.status != "right":
            return verdict
        self.rough.add(question.precision)
        return rougher

    def _jittered(self, question: Question, index: int) -> Verdict:
        rng = np.random.default_rng([question.problem.seed, index])
        factors: dict[int, Any] = {}

        def moved(x: Any) -> Any:
            return factors.setdefault(id(x), x * (1 + rng.uniform(-(2.0**-7), 2.0**-7, x.shape)))

        problem = question.problem
        sources = {name: moved(getattr(problem, name)) for name in ("queries", "keys", "values")}
        return answered(self.subject, ask(replace(problem, **sources), precision=question.precision, roundings=question.roundings))

    def values(self) -> None:
        """Compare with the specification in float64, then in every other precision."""
        wanted = choices(self.profile)
        if self.effort == "quick":
            wanted = wanted[:40]
        drawn = [
            draw(self.profile, choice, seed=self.seed + index, spread=spread)
            for index in range(SEEDS[self.effort])
            for choice in wanted
            for spread in SPREADS
        ]
        for index in range(0, len(drawn), 20):
            self.tell("values", index, len(drawn))
            self.verdicts += self.put(drawn[index : index + 20], "float64")
        self._detect_precision()
        if all(verdict.status == "right" for verdict in self.verdicts):
            self._lengthen()
        if all(verdict.status == "right" or verdict.question.problem.empty_rows.any() for verdict in self.verdicts):
            self._strain()
        wrong = sum(verdict.status != "right" for verdict in self.verdicts)
        self.checks.append(Check("values, float64", wrong == 0, counted(self.verdicts)))

    def _lengthen(self) -> None:
        """Put a few long problems, since kernels take keys in tiles; what takes only so many tokens may refuse them."""
        first = self.profile.tokens[0]
        wanted: list[Choice] = [{"tokens": first}, *({"tokens": first, name: "on"} for name in ("causal",) if name in self.profile.options)]
        for choice in [] if self.is_slow else wanted:
            lengths = {"seq_q": LONG if first in ("self", "square") else FEW, "seq_k": LONG}
            found = self.put([draw(self.profile, choice, seed=self.seed, sizes=lengths)], "float64")
            if isinstance(found[0].answer, Crash):
                self.findings.append(Finding("refused", f"It does not take {LONG} tokens ({found[0].answer.error}).", "note"))
            else:
                self.verdicts += found

    def _strain(self) -> None:
        """Put scores that are large, so that a finite fill of dropped keys is beaten by true scores."""
        wanted = [choice for choice in choices(self.profile) if len(choice) == 2 and ("causal" in choice or set(choice) & set(_MASKS))]
        if self.profile.causal:
            wanted.append({"tokens": self.profile.tokens[0]})
        wanted = [choice for choice in wanted if choice.get("keep") != "with an empty row" and choice.get("lengths") != "with an empty one"]
        if self.profile.policy.cap is None:
            drawn = [draw(self.profile, choice, seed=self.seed + i, spread=5e4) for choice in wanted for i in range(2)]
            for verdict in self.put(drawn, "float64"):
                (self.stood if verdict.status == "right" else self.strained).append(verdict)

    def _detect_precision(self) -> None:
        """Find out whether an implementation works in float32 inside, whatever it is given."""
        failing = [verdict for verdict in self.verdicts if verdict.status != "right"]
        if not failing:
            return
        inside = ROUNDINGS["float64_float32_inside"]
        again = [judge(ask(verdict.question.problem, roundings=inside), verdict.answer) for verdict in self.verdicts]
        better = sum(verdict.status == "right" for verdict in again) - sum(verdict.status == "right" for verdict in self.verdicts)
        plain = [new for new, old in zip(again, self.verdicts, strict=True) if len(old.question.problem.options) == 0]
        if better > len(failing) / 2 or (better and all(verdict.status == "right" for verdict in plain)):
            self.verdicts, self.inside = [self._certain(verdict) for verdict in again], inside
            self.findings.append(Finding("precision", "It computes in float32 inside, also where it is given float64.", "note"))

    def narrow(self) -> list[Verdict]:
        """Compare in every precision below float64, where float64 is right."""
        failing = []
        singles = [choice for choice in choices(self.profile) if len(choice) <= 2]
        wanted = singles if self.effort == "quick" else [*singles, *choices(self.profile)[len(singles) : len(singles) + 8]]
        for precision in self.narrower:
            self.tell(precision, 0, 1)
            if isinstance(self.subject.answer(draw(self.profile, wanted[0], seed=self.seed), precision=precision), Crash):
                self.findings.append(Finding("refused", f"It does not take {precision}.", "note"))
                continue
            drawn = [draw(self.profile, choice, seed=self.seed + 1, spread=spread) for choice in wanted for spread in SPREADS]
            found = self.put(drawn, precision)
            wrong = [verdict for verdict in found if verdict.status != "right"]
            self.checks.append(Check(f"values, {precision}", not wrong, counted(found)))
            failing += wrong
        return failing

    @property
    def narrower(self) -> tuple[str, ...]:
        """The precisions below float64 that are asked for."""
        precisions = self.subject.library.precisions[1:]
        return precisions[:1] if self.is_slow else precisions

    def power(self) -> Power:
        """Measure how much the run could have seen: the smallest error of the scale."""
        smallest = {}
        for precision in ("float64", *self.narrower):
            roundings = self.inside if precision == "float64" else ROUNDINGS[precision]
            problem = draw(self.profile, {"tokens": self.profile.tokens[0]}, seed=self.seed, spread=SPREADS[-1])
            smallest[precision] = _smallest_scale_error(ask(problem, precision=precision, roundings=roundings))
        spreads = tuple(sorted({verdict.question.problem.spread for verdict in self.verdicts}))
        options = tuple(name for name in OPTIONS if any(name in verdict.question.problem.options for verdict in self.verdicts))
        return Power(spreads, smallest, options, tuple(smallest))

    def note(self, outcomes: Iterable[Outcome]) -> None:
        """Note what came of properties: one check for each, the worst that was seen of it."""
        order = {"wrong": 0, "warning": 1, "note": 2}
        worst: dict[str, Outcome] = {}
        for outcome in sorted(outcomes, key=lambda outcome: (outcome.passed is not False, order[outcome.level])):
            worst.setdefault(outcome.name, outcome)
        self.checks += [Check(o.name, o.passed, o.detail, o.sentence if o.passed is False else "", o.level) for o in worst.values()]

    @property
    def rounding(self) -> float:
        """By how much two right answers to the same question may differ, relative to their size."""
        return 1e-9 if self.inside == ROUNDINGS["float64"] else 1e-4

    def properties(self) -> list[Outcome]:
        """Check what must hold for any weights."""
        self.tell("properties", 0, 1)
        outcomes = check_properties(self.subject, self.profile, seed=self.seed, rounding=self.rounding)
        if strange := set(self.strict) - PROPERTIES.keys():
            raise ConfigError(f"strict={sorted(strange)} are no properties; the properties are {', '.join(PROPERTIES)}.")
        outcomes = [
            replace(outcome, level="wrong") if outcome.name in self.strict and outcome.level == "warning" else outcome
            for outcome in outcomes
        ]
        self.note(outcomes)
        return outcomes


def counted(verdicts: list[Verdict], /) -> str:
    """Say how many of some answers are wrong."""
    wrong = sum(verdict.status != "right" for verdict in verdicts)
    worst = max((verdict.ratio for verdict in verdicts if np.isfinite(verdict.ratio)), default=0.0)
    return f"{wrong} of {len(verdicts)} problems wrong, at most {worst:.3g} of the tolerance" if verdicts else "no problem"


def _smallest_scale_error(question: Question) -> float:
    """Find by halving the smallest relative error of the scale that exceeds the tolerance."""
    problem, low, high = question.problem, -15.0, 0.0
    factor = problem.options.get("scale", problem.policy.scale)
    factor = problem.sizes["d_k"] ** -0.5 if factor is None else factor
    while high - low > 0.1:  # in powers of ten
        middle = (low + high) / 2
        moved = problem.change(scale=float(factor * (1 + 10**middle))).run()
        seen = np.any(np.abs(moved.y - question.expected.y) > question.limit)
        low, high = (low, middle) if seen else (middle, high)
    return float(10**high)
