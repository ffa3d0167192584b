# ruff: noqa: INP001, T201
"""Evidence for the oracle: what it finds, what it names, and that it raises no false alarm.

    python benchmarks/oracle.py faults [O-001 ...]     the faults of the corpus, and their right twins
    python benchmarks/oracle.py packages [DIR [NAME ...]]  right and wrong implementations of others; DIR: where install.py put them
    python benchmarks/oracle.py seeds [NAME ...]       right implementations again, until each dtype has 10,000 problems
    python benchmarks/oracle.py smallest               the smallest defects that are caught, beside other rules
    python benchmarks/oracle.py time                   seconds for a layer, and for a problem as sizes grow

Each writes its part of `benchmarks/results/oracle.json`.
"""

import itertools
import json
import platform
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from attnspec import oracle

RESULTS = Path(__file__).parent / "results" / "oracle.json"
DTYPES = ("float64", "float32", "bfloat16", "float16")
ENOUGH, ROUNDS, CHEAP = 10_000, 40, 5.0
"""How many problems each dtype needs, how often right implementations are asked for that, and how many seconds one may take."""


def keep(name: str, found: dict[str, Any]) -> None:
    """Write one part of the results."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    machine = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__, "processor": platform.machine()}
    results[name] = {"date": time.strftime("%Y-%m-%d"), **machine, **found}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def asked(entry: str, make: Callable[[], Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Ask the oracle about one implementation."""
    start = time.perf_counter()
    try:
        report = getattr(oracle, entry)(make(), **settings)
    except Exception as error:  # noqa: BLE001  # it counts as no verdict
        sentence = f"{type(error).__name__}: {error}"[:300]
        return {"verdict": "error", "kind": None, "sentence": sentence, "problems": 0, "by_dtype": {}, "seconds": 0.0}
    return {
        "verdict": report.verdict, "kind": report.kind, "sentence": report.sentence, "problems": report.problems,
        "by_dtype": report.by_precision, "seconds": round(time.perf_counter() - start, 2),
    }  # fmt: skip


def by_dtype(answers: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Count the problems of some answers in each dtype; those that looked only at properties put none."""
    total: Counter[str] = Counter()
    for answer in answers:
        total.update(answer["by_dtype"])
    return {dtype: total[dtype] for dtype in DTYPES}


def faults(wanted: Iterable[str]) -> None:
    """Ask about every fault of the corpus and its right twin."""
    from corpus import cases

    chosen = [case for case in cases() if not wanted or case.fault in wanted or case.kind in wanted]
    rows = []
    for case in chosen:
        wrong, right = (asked(case.entry, make, case.settings) for make in (case.wrong, case.right))
        row = {"fault": case.fault, "name": case.name, "kind": case.kind, "wrong": wrong, "right": right}
        rows.append(row)
        found, named = wrong["verdict"] == "deviates", wrong["kind"] == case.kind
        line = (
            f"{'found' if found else 'MISSED'} {'named' if named else 'MISNAMED'} {'' if right['verdict'] == 'conforms' else 'FALSE ALARM'}"
        )
        print(f"{case.fault} {case.kind}: {line} {wrong['seconds']} s, {right['seconds']} s", flush=True)
        for part in (wrong if not (found and named) else None, right if right["verdict"] != "conforms" else None):
            if part:
                print(f"    {part['verdict']} {part['kind']}: {part['sentence'][:250]}")
    if wanted:  # those that were asked again take the place of what they were
        before = json.loads(RESULTS.read_text())["faults"]["cases"] if RESULTS.exists() else []
        rows = list({row["fault"]: row for row in [*before, *rows]}.values())
    found = [row for row in rows if row["wrong"]["verdict"] == "deviates"]
    named = [row for row in found if row["wrong"]["kind"] == row["kind"]]
    summary = {
        "faults": len(rows), "kinds": len({row["kind"] for row in rows}), "found": len(found), "named": len(named),
        "false_alarms": sum(row["right"]["verdict"] == "deviates" for row in rows),
        "problems_of_right_ones": by_dtype(row["right"] for row in rows),
        "median_problems": statistics.median(row["wrong"]["problems"] for row in rows),
        "median_seconds": statistics.median(row["wrong"]["seconds"] for row in rows),
        "most_seconds": max(max(row["wrong"]["seconds"], row["right"]["seconds"]) for row in rows),
    }  # fmt: skip
    print(summary)
    keep("faults", {**summary, "cases": rows})


def packages(rest: list[str]) -> None:
    """Ask about implementations of others, right and wrong, and about everything right that looks wrong."""
    from packages import negatives, peers

    entries = [("negatives", entry) for entry in negatives.ENTRIES] + [("peers", entry) for entry in peers.ENTRIES]
    if rest:
        from packages import real

        entries += [("packages", entry) for entry in real.entries(Path(rest[0]))]
    rows, only = [], rest[1:]
    for group, entry in [pair for pair in entries if not only or any(word in pair[1].name for word in only)]:
        found = asked(entry.entry, entry.build, entry.settings)
        rows.append({"group": group, "name": entry.name, "known": entry.wrong, **found})
        right = entry.wrong is None
        good = found["verdict"] == ("conforms" if right else "deviates")
        named = right or not entry.wrong or found["kind"] in entry.wrong.split()
        print(
            f"{group} {entry.name}: {'as known' if good else 'NOT AS KNOWN'}{'' if named else ' MISNAMED'} {found['seconds']} s", flush=True
        )
        if not (good and named):
            print(f"    known: {entry.wrong}; {found['verdict']} {found['kind']}: {found['sentence'][:250]}")
    if only:  # those that were asked again take the place of what they were
        before = json.loads(RESULTS.read_text())["packages"]["cases"] if RESULTS.exists() else []
        rows = list({row["name"]: row for row in [*before, *rows]}.values())
    right, wrong = ([row for row in rows if (row["known"] is None) is is_right] for is_right in (True, False))
    summary = {
        "right": len(right), "false_alarms": sum(row["verdict"] == "deviates" for row in right),
        "not_decided": [row["name"] for row in right if row["verdict"] not in ("conforms", "deviates")],
        "problems_of_right_ones": by_dtype(right), "wrong": len(wrong),
        "found": sum(row["verdict"] == "deviates" for row in wrong),
        "named": sum(not row["known"] or row["kind"] in row["known"].split() for row in wrong if row["verdict"] == "deviates"),
    }  # fmt: skip
    print(summary)
    keep("packages", {**summary, "cases": rows})


def seeds(wanted: list[str]) -> None:
    """Ask right implementations again with other seeds, until each dtype has enough problems."""
    from corpus import cases
    from packages import negatives

    asked_of = {f"{case.fault} {case.name}": (case.entry, case.right, case.settings) for case in cases()}
    asked_of |= {entry.name: (entry.entry, entry.build, entry.settings) for entry in negatives.ENTRIES}
    subjects = {n: s for n, s in asked_of.items() if s[0] != "check_properties" and (not wanted or any(word in n for word in wanted))}
    rows: list[dict[str, Any]] = []
    for seed, name in itertools.product(range(100, 100 * (ROUNDS + 1), 100), list(subjects)):  # far apart: a run uses some behind its own
        missing = {dtype for dtype, problems in by_dtype(rows).items() if problems < ENOUGH}
        if name not in subjects or not missing:
            continue
        entry, make, settings = subjects[name]
        found = asked(entry, make, {**settings, "seed": seed})
        rows.append({"name": name, "seed": seed, **found})
        if found["verdict"] != "conforms":
            print(f"{name}, seed {seed}: {found['verdict']} {found['kind']}: {found['sentence'][:250]}", flush=True)
        if found["seconds"] > CHEAP or not missing & found["by_dtype"].keys():
            del subjects[name]
        if len(rows) % 20 == 0:
            print(f"seed {seed}, {len(rows)} runs: {by_dtype(rows)}", flush=True)
    summary = {
        "runs": len(rows), "false_alarms": sum(row["verdict"] == "deviates" for row in rows),
        "not_decided": sum(row["verdict"] not in ("conforms", "deviates") for row in rows),
        "problems_of_right_ones": by_dtype(rows),
    }  # fmt: skip
    print(summary)
    subjects_of = {name: by_dtype(row for row in rows if row["name"] == name) for name in dict.fromkeys(row["name"] for row in rows)}
    keep("seeds", {**summary, "subjects": subjects_of, "not_as_known": [row for row in rows if row["verdict"] != "conforms"]})


def textbook(queries: Any, keys: Any, values: Any, *, defect: str = "", size: float = 0.0) -> Any:
    """Compute attention step by step, with a defect of a given size in one of them."""
    if defect == "operands":
        queries, keys, values = (x * (1 + size * torch.sign(torch.sin(1e4 * x))) for x in (queries, keys, values))
    scale = queries.shape[-1] ** -0.5 * (1 + size * (defect == "scale"))
    scores = queries @ keys.mT * scale
    shares = torch.exp(scores - scores.amax(-1, keepdim=True))
    if defect == "exponential":
        shares[..., ::2] *= 1 + size
    weights = shares / shares.sum(-1, keepdim=True)
    if defect == "weights":
        weights = weights * (1 + size * torch.sign(torch.sin(1e4 * weights)))
    y = weights @ values
    if defect == "one element":
        y[0, 0, 0, 0] *= 1 + size
    return y


def _problems(seeds: int) -> list[Any]:
    from attnspec import Heads
    from attnspec.oracle.design import Profile, draw

    profile = Profile(heads=(Heads(d_model=97, h=3, d_k=10, d_v=13), Heads(d_model=97, h=4, d_k=64)), tokens=("wide", "square", "tall"))
    return [
        draw(profile, {"tokens": tokens}, seed=seed, spread=s) for seed in range(seeds) for tokens in profile.tokens for s in (1.0, 8.0)
    ]


def _rules(precision: str, problems: list[Any]) -> Callable[[str, float], dict[str, bool]]:
    """Ask once, so that every defect is judged on the same problems: by the oracle and by other rules."""
    from attnspec.oracle.libraries import LIBRARIES
    from attnspec.oracle.problem import Answer
    from attnspec.oracle.verdict import ask, judge

    shelf, dtype = LIBRARIES["torch"], getattr(torch, precision)
    questions = [ask(problem, precision=precision) for problem in problems]

    def caught(defect: str, size: float) -> dict[str, bool]:
        found = dict.fromkeys(("oracle", "torch.testing.assert_close", "numpy.allclose", "twice the error of a naive run"), False)
        for question in questions:
            arrays = [shelf.give(array, precision) for array in (question.problem.queries, question.problem.keys, question.problem.values)]
            y, expected = textbook(*arrays, defect=defect, size=size), torch.from_numpy(question.expected.y)
            naive = torch.nn.functional.scaled_dot_product_attention(*arrays)
            off = (y.double() - expected).abs().max()
            found["oracle"] |= judge(question, Answer(shelf.take(y))).status != "right"
            found["torch.testing.assert_close"] |= not _close(y, expected.to(dtype))
            found["numpy.allclose"] |= not np.allclose(shelf.take(y), question.expected.y)
            found["twice the error of a naive run"] |= bool(off > 2 * (naive.double() - expected).abs().max())
        return found

    return caught


def _close(y: Any, expected: Any) -> bool:
    try:
        torch.testing.assert_close(y, expected)
    except AssertionError:
        return False
    return True


def smallest(_: Iterable[str]) -> None:
    """Find the smallest size of each defect that each rule catches, where it does not report the right thing too."""
    table: dict[str, Any] = {}
    for precision in ("float64", "float32", "bfloat16", "float16"):
        caught = _rules(precision, _problems(4))
        clean = caught("", 0.0)
        table[precision] = {"false reports": [rule for rule, reported in clean.items() if reported]}
        for defect in ("scale", "exponential", "operands", "weights", "one element"):
            table[precision][defect] = found = dict.fromkeys(clean)
            for power in np.arange(0, -16.01, -0.25):
                now = caught(defect, float(10**power))
                found |= {rule: float(f"{10**power:.2g}") for rule, is_caught in now.items() if is_caught and not clean[rule]}
                if not any(is_caught and not clean[rule] for rule, is_caught in now.items()):
                    break
            print(precision, defect, found, flush=True)
        print(precision, "false reports:", table[precision]["false reports"])
    keep("smallest", {"problems": 24, "table": table})


def seconds(_: Iterable[str]) -> None:
    """Time default effort on layers, and one problem as sizes grow."""
    from attnspec import Heads
    from attnspec.oracle.design import Profile, draw
    from attnspec.oracle.verdict import ask

    layers = {"torch.nn.MultiheadAttention(24, 4)": torch.nn.MultiheadAttention(24, 4, batch_first=True)}
    layers["torch.nn.MultiheadAttention(512, 8)"] = torch.nn.MultiheadAttention(512, 8, batch_first=True)
    whole = {}
    for name, layer in layers.items():
        report = oracle.check(layer)
        whole[name] = {"verdict": report.verdict, "problems": report.problems, "seconds": round(report.seconds, 2)}
        print(name, whole[name], flush=True)
    grown = {}
    for seq, d_k in ((8, 8), (32, 16), (64, 32), (128, 64), (256, 64), (512, 64)):
        profile = Profile(heads=(Heads(d_model=8 * d_k, h=8),), tokens=("square",))
        problem = draw(profile, {"tokens": "square"}, seed=0, sizes={"seq_q": seq, "seq_k": seq})
        start = time.perf_counter()
        ask(problem, precision="float32")
        grown[f"seq {seq}, h 8, d_k {d_k}"] = round(time.perf_counter() - start, 4)
    print(grown)
    keep("time", {"whole": whole, "one_problem": grown})


def main() -> None:
    """Run the part that is named."""
    warnings.simplefilter("ignore")
    part, *rest = sys.argv[1:] or ["faults"]
    {"faults": faults, "packages": packages, "seeds": seeds, "smallest": smallest, "time": seconds}[part](rest)


if __name__ == "__main__":
    main()
