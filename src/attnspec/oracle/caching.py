"""The examination of a decoder: many calls, each over all tokens so far."""

import time
from dataclasses import replace
from typing import Any

from ..spec.parameters import Heads
from .decoder import CHUNKS, Decoder, Stream, stream
from .design import choices, draw
from .diagnosis import diagnose
from .examination import SEEDS, SPREADS, Examination, counted
from .findings import finding_of
from .problem import Crash
from .report import Check, Counterexample, Finding, Report
from .rounding import ROUNDINGS
from .run import conclude
from .verdict import Verdict, ask, judge, settled

_SMALL = ((1,), (1, 1), (2,), (2, 1), (1, 2), (1, 1, 1), (2, 2), (2, 1, 1), (3, 1, 1), (1, 4, 1, 1), (3, 1, 1, 2))
"""Streams to look for the smallest counterexample in."""


def examine_decoder(examination: Examination, decoder: Decoder, /) -> Report:
    """Examine a decoder, and report."""
    start = time.monotonic()
    streams = _streams(examination, decoder)
    for index, (calls, precision) in enumerate(streams):
        examination.tell("streams", index, len(streams))
        examination.verdicts += put(examination, decoder, calls, precision)
    examination.verdicts = settled(examination.verdicts)
    double = [verdict for verdict in examination.verdicts if verdict.question.precision == "float64"]
    for precision in dict.fromkeys(verdict.question.precision for verdict in examination.verdicts):
        found = [verdict for verdict in examination.verdicts if verdict.question.precision == precision]
        right = all(verdict.status == "right" for verdict in found)
        examination.checks.append(Check(f"values, {precision}", right, counted(found)))
    examination.tell("diagnosis", 0, 1)
    explained, unexplained = diagnose(double)
    findings = [finding_of(diagnosis) for diagnosis in explained]
    if unexplained and not findings:
        findings.append(_unnamed(unexplained[0], double))
    wrong = [verdict for verdict in double if verdict.status != "right"]
    narrow = [verdict for verdict in examination.verdicts if verdict.status != "right"] if not wrong else []
    if narrow:
        text = (
            f"It is right in float64, but not in {narrow[0].question.precision}: {narrow[0].reason or 'it is off by more than rounding'}."
        )
        findings.append(Finding("precision_range", text))
    report = conclude(examination, [*findings, *examination.findings], [], start)
    return replace(report, counterexample=_smallest(examination, decoder)) if wrong else report


def _streams(examination: Examination, decoder: Decoder) -> list[tuple[Stream, str]]:
    found = []
    reorder = decoder.can_reorder
    for seed in range(SEEDS[examination.effort]):
        for choice in choices(examination.profile)[:12]:
            for index, sizes in enumerate(CHUNKS):
                whole = _whole(examination, choice, sizes, seed, SPREADS[index % 2])
                found.append((stream(whole, sizes), "float64"))
                if reorder and len(sizes) > 1:
                    found.append((stream(whole, sizes, reorder=len(sizes) - 1), "float64"))
    plain = [stream(_whole(examination, {"tokens": "square"}, sizes, 0, 1.0), sizes) for sizes in CHUNKS[1:3]]
    return found + [(calls, precision) for precision in examination.narrower for calls in plain]


def _whole(examination: Examination, choice: Any, sizes: tuple[int, ...], seed: int, spread: float, **more: int) -> Any:
    seq = sum(sizes)
    lengths = {"seq_q": seq, "seq_k": seq, **more}
    return draw(examination.profile, choice, seed=examination.seed + seed, spread=spread, sizes=lengths)


def put(examination: Examination, decoder: Decoder, calls: Stream, precision: str, /) -> list[Verdict]:
    """Put the problems of a stream, and judge what is answered."""
    roundings = examination.inside if precision == "float64" else ROUNDINGS[precision]
    questions = [ask(problem, precision=precision, roundings=roundings) for problem in calls.calls]
    asked = Stream(tuple(question.problem for question in questions))
    examination.counts[precision] += len(questions)
    verdicts = [judge(question, answer) for question, answer in zip(questions, decoder.answers(asked, precision=precision), strict=False)]
    return [examination.forgiven(verdict) for verdict in verdicts]


def _unnamed(verdict: Verdict, verdicts: list[Verdict]) -> Finding:
    """What is known where no fault of the catalogue explains an answer."""
    first_calls = [other for other in verdicts if not other.question.problem.past]
    fresh = all(other.status == "right" for other in first_calls)
    reason = verdict.reason or f"its output is off by {verdict.ratio:.3g} times what rounding explains"
    problem = verdict.question.problem
    where = f"with {problem.past or 0} tokens in the cache and {problem.sizes['seq_q']} new ones"
    kind = "cache_structure" if fresh or isinstance(verdict.answer, Crash) else "unknown"
    text = "It is right as long as the cache is empty, but not behind that" if fresh else "It is not even right with an empty cache"
    return Finding(kind, f"{text}: {where}, {reason}.")


def _smallest(examination: Examination, decoder: Decoder) -> Counterexample | None:
    """Look for the smallest failing stream, beginning with the shortest."""
    sizes_of_heads = [Heads(d_model=1, h=1, d_k=2, d_v=1), Heads(d_model=2, h=2, d_k=2, d_v=2), *examination.profile.heads]
    for heads in sizes_of_heads:
        small = Examination(examination.subject, replace(examination.profile, heads=(heads,)), seed=examination.seed)
        for sizes in _SMALL:
            for reorder in (None, len(sizes) - 1) if decoder.can_reorder and len(sizes) > 1 else (None,):
                for batch in (1, 2):
                    whole = _whole(small, {"tokens": "square"}, sizes, 0, 1.0, batch=batch, **vars(heads))
                    verdicts = put(small, decoder, stream(whole, sizes, reorder=reorder), "float64")
                    if verdicts[-1].status == "wrong":
                        return _told(verdicts, sizes)
    return None


def _told(verdicts: list[Verdict], sizes: tuple[int, ...]) -> Counterexample:
    last = verdicts[-1]
    question, answer = last.question, last.answer
    lines = [
        "import numpy as np",
        "",
        f"# {len(sizes)} calls with {', '.join(map(str, sizes))} new tokens; only the last answer is compared",
    ]
    lines.append("step = make_decoder()")
    arrays = {name: getattr(question.problem, name) for name in ("keys", "values")}
    lines += [f"{name} = np.array({array.tolist()})  # of all tokens" for name, array in arrays.items()]
    start = 0
    for index, verdict in enumerate(verdicts):
        end = start + sizes[index]
        if verdict.question.problem.reordered is not None:
            lines.append(
                f"step.reorder(np.array({verdict.question.problem.reordered.tolist()}))  # keys and values above are those after it"
            )
        lines.append(f"queries = np.array({verdict.question.problem.queries.tolist()})")
        lines.append(f"got = step(queries, keys[:, :, {start}:{end}], values[:, :, {start}:{end}])")
        start = end
    lines.append(f"expected = np.array({question.expected.y.tolist()})")
    got: Any = last.reason if isinstance(answer, Crash) or answer.y.shape != question.expected.y.shape else answer.y
    lines.append(f"# got is {got if isinstance(got, str) else got.tolist()}")
    return Counterexample(question.problem, question.precision, question.expected.y, got, question.limit, "\n".join(lines))
