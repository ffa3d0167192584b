"""The order of an examination: values, precisions, properties, gradients, diagnosis; and the report of it."""

import re
import time
from collections.abc import Callable
from dataclasses import replace

from ..errors import ConfigError
from .decoder import CHUNKS, CachingLayer, Stream, stream
from .design import Choice, choices, draw
from .examination import SPREADS, Examination, NeverAnsweredError, counted
from .findings import crash_kind, findings_of
from .libraries import LIBRARIES
from .problem import Crash
from .properties import PROPERTIES, Outcome
from .report import Check, Finding, Report
from .shrink import counterexample
from .stages import stages
from .verdict import Verdict, ask, judge, settled

_CACHE = "cache: several calls give what one gives"
_VALUES = tuple(dict.fromkeys(f"values, {precision}" for library in LIBRARIES.values() for precision in library.precisions))
_ANY_WEIGHTS = tuple(name for name, prop in PROPERTIES.items() if not prop.core_only)

CHECKS = {
    "check": (*_VALUES, _CACHE, *_ANY_WEIGHTS, "gradients"),
    "check_attention": (*_VALUES, *PROPERTIES, "gradients"),
    "check_properties": _ANY_WEIGHTS,
    "check_cache": _VALUES,
}
"""The names of the checks that each entry may make; which of them apply is seen only when it runs."""

WEAK = 0.05
"""A run that would not see a scale off by this much decides nothing."""


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
        examination.note(found)
        outcomes = [*outcomes, *found]
    examination.tell("diagnosis", 0, 1)
    findings = findings_of(examination, narrow, outcomes)
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
        verdict, sentence = (
            "conforms",
            f"All {len(decided)} properties that must hold for any weights hold; whether its values are right was not asked.",
        )
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
    examination.counts["float64"] += len(found)
    found = settled([examination.forgiven(verdict) for verdict in found])
    right = all(verdict.status == "right" for verdict in found)
    examination.checks.append(Check(_CACHE, right, counted(found)))
    return found


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
    kind = "exit" if crash.error.startswith("SystemExit") else "crash"
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
    if not plain and wrong and wrong[0].kind == "mask_finite_fill":
        plain = examination.strained
    example = counterexample(examination.subject, plain[0]) if plain else None
    subject = examination.subject.name
    return Report(
        subject, verdict, sentence, tuple(findings), tuple(examination.checks), example, power,  # type: ignore[arg-type]
        examination.counts.total(), dict(examination.counts), time.monotonic() - start, examination.seed,
        stages(example.problem, examination.faults, [finding.kind for finding in wrong[:1]]) if example else (),
    )  # fmt: skip
