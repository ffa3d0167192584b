"""What the pages on the oracle and on numbers show, and that they refuse to show what is not there. Needs no build."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("markdown", reason="the documentation's tools are not installed")

from attnspec.oracle.faults.kinds import KINDS, OTHER
from attnspec_docs import numbers, oracle, targets, tolerance
from attnspec_docs.blocks import render

ROOT = Path(__file__).parents[1]
RESULTS = {name: json.loads((ROOT / f"benchmarks/results/{name}.json").read_text()) for name in ("exactness", "layer", "oracle")}


@pytest.fixture
def altered(monkeypatch, tmp_path):
    """Results that a test may change, and what then stands on a page."""

    def change(name, edit, call):
        found = json.loads(json.dumps(RESULTS[name]))
        edit(found)
        for other, text in (RESULTS | {name: found}).items():
            (tmp_path / f"{other}.json").write_text(json.dumps(text))
        monkeypatch.setattr(numbers, "_RESULTS", tmp_path)
        numbers.results.cache_clear()
        return render(call)

    yield change
    numbers.results.cache_clear()


def test_every_kind_of_fault_has_an_anchor_its_meaning_and_its_threads():
    page = render("faults")
    assert sorted(re.findall(r"\{ #fault-(\w+) \}", page)) == sorted([*KINDS, *OTHER])
    for kind in (*KINDS.values(), *OTHER.values()):
        section = page.partition(f"{{ #fault-{kind.name} }}")[2].partition("\n### ")[0]
        assert kind.meaning in section
        if kind.name in KINDS:
            assert f"**Smallest input that can show it**: {kind.witness}." in section
            assert "hat the report says" in section
            assert kind.threads
        assert all(f"https://github.com/{thread.replace('#', '/issues/')})" in section for thread in kind.threads)


def test_the_example_of_the_guide_is_named_as_the_guide_says():
    report = oracle._run("wrong")[2]["report"]
    assert report.kind == "mask_after_softmax"
    assert report.sentence in render("example wrong")
    assert f"faults.md#fault-{report.kind}" in (ROOT / "docs/use/oracle.md").read_text()
    names = dict(oracle._run("wrong")[2])
    exec(report.counterexample.snippet, names)
    assert not np.allclose(names["got"], names["expected"])


def test_one_tolerance_for_all_accepts_what_is_wrong_and_another_rejects_what_is_right():
    rows = [re.split(r" *\| *", row)[1:-1] for row in render("tolerance_numbers").splitlines()[2:]]
    right, slightly, clearly = [(float(row[2]), float(row[3]), row[4:]) for row in rows]
    assert right[0] < 1 < slightly[1] < clearly[1]
    assert (right[2], slightly[2][0], clearly[2]) == (["accepts", "rejects"], "accepts", ["rejects", "rejects"])


def test_every_step_of_the_worked_example_is_within_its_tolerance():
    rows = [re.split(r" *\| *", row)[1:-1] for row in render("tolerance_steps").splitlines()[2:]]
    assert len(rows) >= 4
    for _, error, _, share, of_worst in rows:
        assert float(error) > 0
        assert 0 < float(of_worst) <= float(share) < 1


def test_marks_stay_within_the_picture():
    shown = render("tolerance_picture")
    width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', shown).groups())
    marks = re.findall(r'<text x="(-?\d+)" y="(-?\d+)"[^>]*>[●×]<', shown)
    assert len(marks) > 100
    assert all(tolerance._LEFT <= int(x) <= width and 0 <= int(y) <= height for x, y in marks)


def test_what_misses_a_target_is_said(altered):
    def slower(found):
        for point in found["points"]:
            point["ratios"]["torch"] = 0.5
        found["points"][0]["ratios"]["torch"] = 1.5

    row = next(row for row in altered("layer", slower, "targets").splitlines() if "torch.nn.MultiheadAttention`, at any size" in row)
    assert row.endswith("above it at 1 of 396 points; 0.50 times (median), 1.50 at worst | **no** |")
    row = next(row for row in altered("oracle", lambda found: found["faults"].update(found=122), "targets").splitlines() if "corpus" in row)
    assert row.endswith("122 of 123 | **no** |")
    quick = altered("oracle", lambda found: [one.update(seconds=1.0) for one in found["time"]["whole"].values()], "targets")
    assert next(row for row in quick.splitlines() if "examined" in row).endswith("| yes |")
    assert targets._said(reached=True) == "yes"


@pytest.mark.parametrize(
    ("name", "edit", "call"),
    [
        ("oracle", lambda found: found.pop("time"), "times"),
        ("oracle", lambda found: found["faults"].pop("date"), "measured oracle faults"),
        ("oracle", lambda found: found["faults"].pop("named"), "found"),
        ("exactness", lambda found: found["overall"].pop("failures"), "exactness"),
        ("layer", lambda found: found["points"][0].pop("ratios"), "targets"),
    ],
)
def test_a_result_that_lacks_what_a_page_shows_stops_the_build(altered, name, edit, call):
    with pytest.raises(ValueError, match=r"a page shows '.*measure again"):
        altered(name, edit, call)


def test_a_mode_that_was_not_measured_and_a_script_that_is_not_there_stop_the_build(altered):
    with pytest.raises(ValueError, match="no point of this mode"):
        altered("layer", lambda found: None, "speed evaluation")
    with pytest.raises(ValueError, match=r"no benchmarks/speed\.py"):
        render("measured speed")


def test_counts_by_dtype_and_runs_with_other_seeds_are_shown(altered):
    def add(found):
        found["packages"]["problems_of_right_ones"] = {"float64": 1000, "float16": 20}
        found["seeds"] = {**found["faults"], "runs": 7, "false_alarms": 0, "not_decided": 1, "problems_of_right_ones": 12}

    assert "1,020 problems: 1,000 in float64, 20 in float16" in altered("oracle", add, "found")
    assert "7 times: 12 problems" in altered("oracle", add, "again")
    assert altered("oracle", lambda found: found.pop("seeds", None), "again") == ""


def test_mutants_that_live_are_shown_with_the_reason(altered, tmp_path):
    case = {"file": "spec/a.py", "line": 3, "before": "x | [y][z]", "after": "x * y_z", "outcome": "survived", "explanation": "It is so."}
    area = {"date": "2026-12-01", "python": "3", "numpy": "2", "processor": "x", "files": 1, "mutants": 1234, "asked": 5}
    counts = {"killed": 3, "timed out": 1, "survived": 1, "cases": [case, {**case, "outcome": "killed"}]}
    altered("oracle", lambda found: None, "found")
    assert render("mutation") == ""
    (tmp_path / "mutation.json").write_text(json.dumps({"spec": area | counts}))
    shown = render("mutation")
    assert "| `attnspec/spec/` | 1 | 1,234 | 5 | 4 | 1 |" in shown
    assert shown.count("spec/a.py:3") == 1
    assert "<code>x &#124; &#91;y&#93;&#91;z&#93;</code> | <code>x &#42; y&#95;z</code> | It is so. |" in shown
