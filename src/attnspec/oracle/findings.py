"""From answers to findings: what is wrong, in sentences."""

from dataclasses import replace

import numpy as np

from .diagnosis import Diagnosis, diagnose, rough_precision
from .examination import Examination
from .problem import Crash, Problem
from .properties import Outcome
from .report import Finding
from .subject import Subject
from .verdict import Verdict


def findings_of(examination: Examination, narrow: list[Verdict], outcomes: list[Outcome], /) -> list[Finding]:
    """Say what was found: what explains wrong answers first, then what else fails."""
    failed = [outcome for outcome in outcomes if outcome.passed is False]
    random = any(outcome.name == "same_twice" and outcome.level == "wrong" for outcome in failed)
    wrong = [verdict for verdict in examination.verdicts if verdict.status != "right"]
    explained, unexplained = ([], wrong) if random else diagnose([*examination.verdicts, *examination.stood])
    if examination.strained:
        fills, others = diagnose(examination.strained)
        explained += [diagnosis for diagnosis in fills if diagnosis.faults[0].kind == "mask_finite_fill"]
        if others or len(explained) < len(fills):
            text = "Where scores are as large as 1e5, masks and softmax lose what they should keep."
            examination.findings.append(Finding("large_scores", text, "warning", f"{len(examination.strained)} problems"))
    examination.faults = explained[0].faults if explained else ()
    found = [_as_meant(finding_of(diagnosis), examination.subject) for diagnosis in explained]
    if unexplained and sum(diagnosis.explained for diagnosis in explained) <= len(wrong) / 4:
        right = [verdict for verdict in examination.verdicts if verdict.status == "right"]
        found = _unnamed(unexplained, right, [outcome for outcome in failed if outcome.level == "wrong"]) + found
    if narrow:
        found.append(_narrow_finding(narrow))
    named = {finding.kind for finding in found}
    for outcome in failed:
        if not named or outcome.kind in named or outcome.name in APART:
            found.append(Finding(outcome.kind, outcome.sentence, outcome.level, outcome.detail))
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
    text = "It is multi-head attention, but the additive mask is taken for a boolean one: where it is not 0, keys are kept."
    return replace(finding, kind="mask_type_confusion", sentence=text)


def _unnamed(unexplained: list[Verdict], right: list[Verdict], failed: list[Outcome]) -> list[Finding]:
    """What is known where no fault of the catalogue explains an answer: where it happens, and which property fails."""
    first = unexplained[0]
    if (precision := rough_precision(unexplained)) is not None:
        text = f"It is multi-head attention, but {precision} would explain how far it is off: somewhere numbers are rounded too early."
        return [Finding("precision_range", text, "wrong", f"off by up to {max(v.ratio for v in unexplained):.3g} times the tolerance")]
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


APART = ("dtype", "inputs_stay", "bad_shapes", "same_twice", "strides", "training")
"""Properties that are about something else than values: where values are wrong, all others mostly follow from that."""

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
