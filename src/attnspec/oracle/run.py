"""The examination of one implementation: what is asked of it, in which order, and what follows from the answers."""

import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ..errors import ConfigError
from .decoder import CHUNKS, CachingLayer, Stream, stream
from .design import Choice, Profile, choices, draw
from .diagnosis import Diagnosis, diagnose
from .faults.fault import Fault
from .options import OPTIONS
from .problem import Crash, Problem
from .properties import PROPERTIES, Outcome, check_properties
from .report import Check, Finding, Power, Report
from .rounding import LENIENT, ROUNDINGS, Rounding
from .shrink import counterexample
from .stages import stages
from .subject import Subject
from .verdict import Question, Verdict, answered, ask, judge

Effort = Literal["quick", "default", "thorough"]
Progress = Callable[[str, int, int], None]

SEEDS = {"quick": 1, "default": 2, "thorough": 12}
SPREADS = (1.0, 8.0)
RETRIES = 4
ROUGH = 50.0
"""Answers that are off by at most so many tolerances may come from a rougher way to compute."""
WEAK = 0.05
"""A run that would not see a scale off by this much decides nothing."""


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
    problems: int = 0
    rough: set[str] = field(default_factory=set)
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
        kept, crashes = [], []
        for tokens in self.profile.tokens:
            answer = self._try({"tokens": tokens})
            (crashes if isinstance(answer, Crash) else kept).append((tokens, answer))
        if not kept:
            raise NeverAnsweredError(crashes[0][1])
        self.profile = replace(self.profile, tokens=tuple(tokens for tokens, _ in kept))
        for tokens, crash in crashes:
            said = {"wide": "fewer queries than keys", "tall": "more queries than keys", "square": "as many queries as keys", "one query": "one query"}
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
                self.findings.append(Finding("refused", f"It does not take a {name} with axes of size 1 that is {', '.join(refused)}.", "note"))
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
            self.problems += 1
            found.append(self._certain(answered(self.subject, ask(problem, precision=precision, roundings=roundings))))
        return found

    def _certain(self, verdict: Verdict) -> Verdict:
        """Make up the mind about an answer: allow for rougher ways to compute, then ask again with other numbers."""
        question = verdict.question
        if verdict.status != "right" and verdict.ratio < ROUGH and self.inside == ROUNDINGS["float64"]:
            rougher = judge(ask(question.problem, precision=question.precision, roundings=LENIENT[question.precision]), verdict.answer)
            if rougher.status == "right":
                self.rough.add(question.precision)
                return rougher
        if verdict.status != "suspect":
            return verdict
        again = [self._jittered(question, index) for index in range(RETRIES)]
        return replace(verdict, status="wrong" if sum(v.status != "right" for v in again) > RETRIES // 2 else "right")

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
        self._stress()
        wrong = sum(verdict.status != "right" for verdict in self.verdicts)
        self.checks.append(Check("values, float64", wrong == 0, counted(self.verdicts)))

    def _stress(self) -> None:
        """Put scores that are large, so that a finite fill of dropped keys is beaten by true scores."""
        wanted = [choice for choice in choices(self.profile) if len(choice) == 2 and ("causal" in choice or set(choice) & set(_MASKS))]  # noqa: PLR2004
        if self.profile.causal:
            wanted.append({"tokens": self.profile.tokens[0]})
        wanted = [choice for choice in wanted if choice.get("keep") != "with an empty row" and choice.get("lengths") != "with an empty one"]
        if self.profile.policy.cap is None:
            drawn = [draw(self.profile, choice, seed=self.seed + i, spread=5e4) for choice in wanted for i in range(2)]
            self.verdicts += self.put(drawn, "float64")

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
        singles = [choice for choice in choices(self.profile) if len(choice) <= 2]  # noqa: PLR2004
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

    def properties(self) -> list[Outcome]:
        """Check what must hold for any weights."""
        self.tell("properties", 0, 1)
        rounding = 1e-9 if self.inside == ROUNDINGS["float64"] else 1e-4
        outcomes = check_properties(self.subject, self.profile, seed=self.seed, rounding=rounding)
        if strange := set(self.strict) - PROPERTIES.keys():
            raise ConfigError(f"strict={sorted(strange)} are no properties; the properties are {', '.join(PROPERTIES)}.")
        outcomes = [replace(outcome, level="wrong") if outcome.name in self.strict and outcome.level == "warning" else outcome for outcome in outcomes]
        self.checks += [Check(outcome.name, outcome.passed, outcome.detail) for outcome in outcomes]
        return outcomes


_MASKS = ("keep", "padding", "lengths")


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
    while high - low > 0.1:  # noqa: PLR2004  # in powers of ten
        middle = (low + high) / 2
        moved = problem.change(scale=float(factor * (1 + 10**middle))).run()
        seen = np.any(np.abs(moved.y - question.expected.y) > question.limit)
        low, high = (low, middle) if seen else (middle, high)
    return float(10**high)


def examine(examination: Examination, /, *, gradients: Callable[[Examination], list[Outcome]] | None = None) -> Report:
    """Examine an implementation, and report."""
    start = time.monotonic()
    try:
        examination.fit_profile()
    except NeverAnsweredError as error:
        return _mute(examination, error.crash, start)
    examination.values()
    if "cache" in examination.subject.signature.roles:
        examination.verdicts += streams_of_layer(examination)
    wrong = [verdict for verdict in examination.verdicts if verdict.status != "right"]
    narrow = [] if wrong else examination.narrow()
    outcomes = examination.properties()
    if gradients is not None and not wrong:
        examination.tell("gradients", 0, 1)
        found = gradients(examination)
        examination.checks += [Check(outcome.name, outcome.passed, outcome.detail) for outcome in found]
        outcomes = [*outcomes, *found]
    examination.tell("diagnosis", 0, 1)
    findings = _findings(examination, narrow, outcomes)
    if examination.rough:
        text = f"In {', '.join(sorted(examination.rough))} it rounds more often than need be: after every operation, or in merging parts."
        findings.append(Finding("precision", text, "note"))
    return conclude(examination, findings, [*wrong, *narrow], start)


def examine_properties(examination: Examination, /) -> Report:
    """Look only at what must hold for any weights, and report."""
    start = time.monotonic()
    try:
        examination.fit_profile()
    except NeverAnsweredError as error:
        return _mute(examination, error.crash, start)
    outcomes = examination.properties()
    failed = [outcome for outcome in outcomes if outcome.passed is False]
    findings = [Finding(outcome.kind, outcome.sentence, outcome.level, outcome.detail) for outcome in failed]
    wrong = [finding for finding in findings if finding.level == "wrong"]
    decided = [outcome for outcome in outcomes if outcome.passed is not None]
    if wrong:
        verdict, sentence = "deviates", wrong[0].sentence
    elif not decided:
        verdict, sentence = "undecided", "None of the properties could be tried."
    else:
        verdict, sentence = "conforms", f"All {len(decided)} properties that must hold for any weights hold; whether its values are right was not asked."
    order = {"wrong": 0, "warning": 1, "note": 2}
    findings = sorted([*findings, *examination.findings], key=lambda finding: order[finding.level])
    return Report(
        examination.subject.name, verdict, sentence, tuple(findings), tuple(examination.checks),  # type: ignore[arg-type]
        problems=len(outcomes), seconds=time.monotonic() - start, seed=examination.seed,
    )  # fmt: skip


def streams_of_layer(examination: Examination, /) -> list[Verdict]:
    """Put streams to a layer that takes a cache and returns it."""
    layer, found = CachingLayer(examination.subject), []
    wanted = [choice for choice in choices(examination.profile) if choice["tokens"] == "self" and set(choice) <= {"tokens", "causal"}]
    flag = "causal" in examination.profile.options
    for index, sizes in enumerate(CHUNKS):
        for choice in wanted:
            seq = sum(sizes)
            whole = draw(examination.profile, choice, seed=index, spread=SPREADS[index % 2], sizes={"seq_q": seq, "seq_k": seq})
            whole = replace(whole, options={**whole.options, "causal": True}) if flag else whole
            calls = stream(whole, sizes)
            questions = [ask(problem, roundings=examination.inside) for problem in calls.calls]
            answers = layer.answers(Stream(tuple(question.problem for question in questions)))
            found += [judge(question, answer) for question, answer in zip(questions, answers, strict=False)]
    examination.problems += len(found)
    wrong = [verdict for verdict in found if verdict.status == "wrong"]
    examination.checks.append(Check("cache: several calls give what one gives", not wrong, counted(found)))
    return [replace(verdict, status="right") if verdict.status == "suspect" else verdict for verdict in found]


def _mute(examination: Examination, crash: Crash, start: float) -> Report:
    """Report on an implementation that raises an error whatever it is asked: in its own code, or because of the call.

    Raises:
        ConfigError: the error is raised where it is called.
    """
    subject = examination.subject
    if not crash.inside:
        raise ConfigError(f"{subject.name}: it cannot be called like this: {crash.error}. Say how, with call=.")
    sizes = examination.profile.sizes
    said = {name: size for name, size in sizes.items() if re.search(rf"\b{size}\b", crash.error)}
    kind = "crash"
    text = f"It raises an error in its own code whatever it is asked: {crash.error}."
    if sizes["h_kv"] < sizes["h"] and {"h", "h_kv"} <= said.keys():
        kind = "gqa_head_mapping"
        text += f" Here h={sizes['h']} query heads meet h_kv={sizes['h_kv']} key/value heads that are not shared out."
    elif not isinstance(subject.answer(problem := draw(examination.profile, _first(examination), seed=0), train=True), Crash):
        text += " In training it answers: the path for evaluation is broken."
        kind = crash_kind(problem, crash)
    text += " If the call or the layout that was given is not what it needs, say so with call= and layout=."
    return Report(subject.name, "deviates", text, (Finding(kind, text),), seconds=time.monotonic() - start, seed=examination.seed)


def _first(examination: Examination) -> Choice:
    return {"tokens": examination.profile.tokens[0]}


def _findings(examination: Examination, narrow: list[Verdict], outcomes: list[Outcome]) -> list[Finding]:
    explained, unexplained = diagnose(examination.verdicts)
    examination.faults = explained[0].faults if explained else ()
    found = [_as_meant(finding_of(diagnosis), examination.subject) for diagnosis in explained]
    failed = [outcome for outcome in outcomes if outcome.passed is False]
    if unexplained and not found:
        right = [verdict for verdict in examination.verdicts if verdict.status == "right"]
        found += _unnamed(unexplained, right, [outcome for outcome in failed if outcome.level == "wrong"])
    if narrow:
        found.append(_narrow_finding(narrow))
    named = {finding.kind for finding in found}
    for outcome in failed:  # where values are wrong, what else fails mostly follows from that
        level = "note" if outcome.level == "wrong" and named and outcome.kind not in named else outcome.level
        found.append(Finding(outcome.kind, outcome.sentence, level, outcome.detail))
    return [*found, *examination.findings]


def finding_of(diagnosis: Diagnosis, /) -> Finding:
    """Say what a diagnosis comes to."""
    fault = diagnosis.faults[0]
    declare = next((f" If that is meant, declare {f.declare}." for f in diagnosis.faults if f.declare), "")
    text = f"It is multi-head attention, but {diagnosis.sentence}.{declare}"
    return Finding(fault.kind, text, "wrong", f"reproduces {diagnosis.explained} of {diagnosis.of} wrong answers")


def _as_meant(finding: Finding, subject: Subject) -> Finding:
    """Say of a mask that is added to the scores that it was taken for a boolean one, where it means the opposite."""
    if finding.kind != "mask_polarity_inverted" or subject.mask != "additive":
        return finding
    text = "It is multi-head attention, but the additive mask is taken for a boolean one: keys are kept where it is not 0, and dropped where it is."
    return replace(finding, kind="mask_type_confusion", sentence=text)


def _unnamed(unexplained: list[Verdict], right: list[Verdict], failed: list[Outcome]) -> list[Finding]:
    """What is known where no fault of the catalogue explains an answer: where it happens, and which property fails."""
    first = unexplained[0]
    reason = first.reason or f"its output is off by {first.ratio:.3g} times what rounding explains"
    asked = ", ".join(first.question.problem.options) or "nothing else"
    if isinstance(first.answer, Crash):
        kind = crash_kind(first.question.problem, first.answer)
    elif "shape" in reason:
        kind = "returned_weights" if "weights" in reason else "output_shape"
    elif failed:
        kind = failed[0].kind
    else:
        kind = _family(unexplained, right)
    text = f"No fault of the catalogue explains it: where {asked} is asked for, {reason}."
    return [Finding(kind, text if not failed else f"{failed[0].sentence} {text}", "wrong", f"{len(unexplained)} wrong answers")]


FAMILIES = {
    "survivors": "dropout_arithmetic", "bias": "additive_position_bias", "slopes": "additive_position_bias", "sinks": "softmax_denominator",
    "softcap": "softcap_order_or_missing", "window": "window_wrong_region", "window_left": "window_wrong_region",
    "window_right": "window_wrong_region", "gates": "head_mask_prune", "cumulative": "ragged_packing", "documents": "ragged_packing",
    "positions": "rope_position", "offset": "causal_alignment", "scale": "scale_option_ignored", "padding": "mask_construction",
    "lengths": "mask_construction", "keep": "mask_construction", "causal": "causal_geometry", "return_weights": "returned_weights",
}  # fmt: skip
"""The kind of fault of an option, where all that is known is that answers are wrong wherever it is asked for."""


def _family(unexplained: list[Verdict], right: list[Verdict]) -> str:
    """Name the kind by the option that all wrong answers share, and that fewest right ones have."""
    shared = set.intersection(*(set(verdict.question.problem.options) for verdict in unexplained)) & FAMILIES.keys()
    if shared:
        return FAMILIES[min(shared, key=lambda name: sum(name in verdict.question.problem.options for verdict in right))]
    problem = unexplained[0].question.problem
    if problem.policy.rotation is not None:
        return "rope_pairing"
    return "gqa_head_mapping" if problem.sizes["h_kv"] != problem.sizes["h"] else "unknown"


def crash_kind(problem: Problem, crash: Crash, /) -> str:
    """Name the kind of fault by what was asked for where an implementation crashes, and nowhere else."""
    if problem.parameters is not None and problem.parameters.b_q is None and "NoneType" in crash.error:
        return "projection_bias"  # something uses a bias that there is not
    if problem.history is not None:
        return "cache_structure"
    if "return_weights" in problem.options:
        return "returned_weights"
    return "mask_construction" if {"keep", "padding", "lengths", "documents"} & set(problem.options) else "crash"


def _narrow_finding(narrow: list[Verdict]) -> Finding:
    first = narrow[0]
    precision, answer = first.question.precision, first.answer
    if isinstance(answer, Crash):
        text = f"{first.reason} in {precision}"
    elif not np.isfinite(answer.y).all():
        text = f"it gives infinities or NaN in {precision}, though it is right in float64"
    else:
        text = f"it is off by up to {first.ratio:.3g} times what rounding to {precision} explains, though it is right in float64"
    return Finding("precision_range", f"It is multi-head attention, but {text}.", "wrong", f"{len(narrow)} problems")


def conclude(examination: Examination, findings: list[Finding], failing: list[Verdict], start: float) -> Report:
    """Put a report together."""
    power = examination.power()
    wrong = [finding for finding in findings if finding.level == "wrong"]
    order = {"wrong": 0, "warning": 1, "note": 2}
    findings = sorted(findings, key=lambda finding: order[finding.level])
    if wrong:
        verdict, sentence = "deviates", wrong[0].sentence
    elif power.smallest_scale_error["float64"] > WEAK:
        verdict, sentence = "undecided", "Nothing was found, but the run was too weak to see a wrong scale of the scores."
    else:
        verdict, sentence = "conforms", "It is multi-head attention, as the specification says, to within rounding."
    plain = [verdict for verdict in failing if verdict.question.problem.history is None]
    example = counterexample(examination.subject, plain[0]) if plain else None
    subject = examination.subject.name
    return Report(
        subject, verdict, sentence, tuple(findings), tuple(examination.checks), example, power,  # type: ignore[arg-type]
        examination.problems, time.monotonic() - start, examination.seed,
        stages(example.problem, examination.faults, [finding.kind for finding in wrong[:1]]) if example else (),
    )  # fmt: skip
