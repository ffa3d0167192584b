"""A report as text, as data and as a page: what stands where, and that nothing in it lies about the numbers."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from attnspec import Heads, Policy
from attnspec.oracle.problem import Problem
from attnspec.oracle.report import Check, Counterexample, Finding, Power, Report
from attnspec.oracle.show import error_of, standing
from attnspec.spec.parameters import Parameters

SENTENCE = "It is multi-head attention, but causality starts at the wrong corner, where there are fewer queries than keys."
RNG = np.random.default_rng(0)


def core_example(**changes):
    queries, keys, values = (RNG.normal(size=size) for size in ((2, 3, 5, 7), (2, 3, 11, 7), (2, 3, 11, 6)))
    problem = Problem(queries, keys, values, options={"causal": True}, seed=4)
    expected = problem.run().y
    got = expected + 1e-9 * (np.arange(5) == 3)[:, None]
    return replace(Counterexample(problem, "float64", expected, got, np.full(expected.shape, 1e-12), "if 1 < 2:\n    f('<b>&')"), **changes)


def layer_example():
    x = RNG.normal(size=(2, 3, 10))
    shapes = {"w_q": (2, 10, 5), "w_k": (2, 10, 5), "w_v": (2, 10, 5), "w_o": (10, 10)}
    parameters = Parameters(**{name: RNG.normal(size=shape) for name, shape in shapes.items()})
    assert parameters.heads == Heads(d_model=10, h=2)
    problem = Problem(x, x, x, parameters=parameters)
    expected = problem.run().y
    return Counterexample(problem, "float32", expected, expected.copy(), np.full(expected.shape, 1e-3), "f(x)")


def make_report(**changes):
    diagnosis = Finding("causal_alignment", SENTENCE, "wrong", "reproduces 12 of 12 wrong answers")
    findings = (diagnosis, Finding("shape", "It broadcasts.", "warning", "11 keys"))
    checks = (
        Check("values", False, "12 of 96 wrong"),
        Check("no future", True),
        Check("shapes", False, "11 keys", level="warning"),
        Check("gradients", None),
    )
    report = Report(
        "attend", "deviates", SENTENCE, findings, checks, core_example(),
        Power((1.0, 8.0), {"float64": 1e-14}, ("keep", "causal"), ("float64",)),
        problems=412, seconds=3.21, seed=4, stages=(("score", "batch=2 h=3", False), ("softmax", "batch=2 h=3", True)),
    )  # fmt: skip
    return replace(report, **changes)


def test_the_text_says_the_sentence_first_then_what_it_rests_on():
    text = str(make_report())
    joined = " ".join(text.split())
    assert joined.startswith(f"attend deviates. {SENTENCE} Wrong, causal_alignment: (reproduces 12 of 12 wrong answers)")
    found = ["Warning, shape: It broadcasts.", "batch=2, seq_q=5, seq_k=11", "1e+03 times the tolerance", "f('<b>&')"]
    order = [*found, "Holds: no future.", "Warns: shapes.", "Fails: values (12 of 96 wrong)", "Not decided: gradients", "412 problems"]
    assert sorted(order, key=joined.index) == order
    assert joined.count(SENTENCE) == 1
    assert len(text.splitlines()) <= 40


def test_a_long_snippet_is_cut_in_the_text_and_says_so():
    report = make_report(counterexample=core_example(snippet="\n".join(f"line {i}" for i in range(100))))
    assert "# 80 more lines are in the report as HTML or JSON" in str(report)
    assert len(str(report).splitlines()) <= 40
    assert report.to_dict()["counterexample"]["snippet"].endswith("line 99")


def test_a_check_of_which_only_a_warning_came_does_not_fail():
    report = make_report()
    assert [standing(check) for check in report.checks] == ["fails", "holds", "warns", "not decided"]
    assert standing(Check("shapes", False, level="warning")) == "warns"


def test_the_error_is_in_units_of_the_tolerance():
    example = core_example()
    error = error_of(example)
    assert error[..., 3, :] == pytest.approx(1000, rel=1e-3)
    assert error[..., :3, :].max() == error[..., 4, :].max() == 0
    got = example.expected.copy()
    got[0, 0, 0, 0] = np.nan
    assert error_of(replace(example, got=got)).max() == np.inf
    assert error_of(replace(example, got=got, expected=got)).max() == 0
    assert error_of(replace(example, got="it raised ValueError")) is None


def test_where_nothing_is_promised_nothing_is_wrong():
    keep = np.ones((2, 1, 5, 11), bool)
    keep[0, 0, 2] = False
    problem = core_example().problem.change(keep=keep, causal=False, policy=Policy(empty_row="any"))
    expected = problem.run().y
    error = error_of(core_example(problem=problem, expected=expected, got=expected + np.nan))
    assert (error[0, :, 2] == 0).all()
    assert np.isinf(np.delete(error, 2, axis=2)).all()


@pytest.mark.parametrize("example", [core_example(), layer_example(), core_example(got="it raised ValueError: no"), None])
def test_the_data_goes_through_json(example):
    report = make_report(counterexample=example)
    data = json.loads(report.to_json())
    assert (data["sentence"], data["kind"], data["conforms"]) == (SENTENCE, "causal_alignment", False)
    if example is None:
        assert data["counterexample"] is None
        return
    found = data["counterexample"]
    assert np.array_equal(found["expected"], example.expected)
    assert np.array_equal(found["problem"]["queries"], example.problem.queries)
    assert (found["problem"]["parameters"] is None) == (example.problem.parameters is None)
    if example.problem.parameters is not None:
        assert np.array_equal(found["problem"]["parameters"]["w_o"], example.problem.parameters.w_o)


def test_what_json_has_no_number_for_is_text():
    got = np.full((2, 3, 5, 6), np.nan)
    got[0, 0, 0, :2] = np.inf, -np.inf
    data = json.loads(make_report(counterexample=core_example(got=got)).to_json(), parse_constant=pytest.fail)
    assert data["counterexample"]["got"][0][0][0][:3] == ["Infinity", "-Infinity", "NaN"]


class Page(HTMLParser):
    """What a page holds, by tag; its tags must close."""

    VOID = ("meta", "link", "wbr")

    def __init__(self, text):
        super().__init__()
        self.open, self.cells, self.tags, self.links = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self.links += [attributes[name] for name in ("src", "href") if name in attributes]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["td"] and self.tags[-1][1].get("class", "").startswith("g"):
            self.cells.append((self.tags[-1][1]["class"], data))


@pytest.mark.parametrize("example", [core_example(), layer_example(), core_example(got="it raised <ValueError>"), None])
def test_the_page_is_one_file_that_loads_nothing(example, tmp_path):
    make_report(counterexample=example, subject="<script>").to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert page.links == ["data:,"]
    assert "script" not in {tag for tag, _ in page.tags}
    assert "url(" not in text
    assert "@import" not in text
    first = text.index("<h1>")
    assert SENTENCE in text[first : text.index("</h1>")]
    assert text.index("<main>") + len("<main>\n") == first
    assert text.count("here it deviates") == 1


def test_the_map_of_heads_shows_the_row_that_is_wrong():
    page = Page(html_of(make_report()))
    assert len(page.cells) == 2 * 3 * 5
    assert page.cells[:5] == [("g0", "0"), ("g0", "0"), ("g0", "0"), page.cells[3], ("g0", "0")]
    assert page.cells[3][0] in {"g2", "g3"}  # a thousand times, give or take the last bit
    assert page.cells[3][1] in {"1000", "1e3"}


def html_of(report):
    from attnspec.oracle.html import page

    return page(report)


def test_the_maps_of_a_layer_are_by_channel_and_every_grade_has_its_colour():
    example = layer_example()
    got = example.expected.copy()
    got[1, 2, :6] += 1e-3 * np.array([0.5, 5, 50, 5e4, 5e8, np.inf])
    cells = Page(html_of(make_report(counterexample=replace(example, got=got)))).cells
    assert len(cells) == 2 * 3 * 10
    assert cells[50:56] == [("g0", "0.5"), ("g1", "5"), ("g2", "50"), ("g3", "5e4"), ("g4", "5e8"), ("g5", "inf")]


def test_a_wide_layer_is_bundled_and_the_largest_error_stays():
    width = 1000
    x = RNG.normal(size=(1, 2, width))
    problem = layer_example().problem.change(queries=x, keys=x, values=x)
    expected = np.zeros((1, 2, width))
    got = expected.copy()
    got[0, 1, 777] = 3.0
    example = Counterexample(problem, "float64", expected, got, np.ones((1, 2, width)), "")
    cells = Page(html_of(make_report(counterexample=example))).cells
    assert len(cells) == 2 * 64
    assert [text for _, text in cells if text != "0"] == ["3"]
