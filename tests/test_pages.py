"""The pages say what the code says: laws that are tests, steps and axes that are all there, and no shape written by hand."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import attnspec
from attnspec.axes import parse
from attnspec.bookkeeping.glossary import GLOSSARY
from attnspec_docs.laws import claims, law_tests, laws_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STEPS = attnspec.step._steps
COMPOSITIONS = ("multi_head_attention", "attend", "decode")

# --- laws and edge cases


def test_every_law_is_claimed_by_a_docstring_and_tested():
    """In one wording, which is the title on the page of the laws."""
    assert claims().keys() == law_tests().keys()
    assert [list(wordings) for wordings in claims().values() if len(wordings) > 1] == []


@pytest.mark.parametrize("name", [*STEPS, *COMPOSITIONS])
def test_every_step_has_laws_and_edge_cases(name):
    """Two to four edge cases, each a sentence and an example, which test_examples.py runs."""
    function = getattr(attnspec, name)
    assert laws_of(function)
    edges = inspect.getdoc(function).partition("\nExamples: Edge cases\n")[2]
    sentences = re.findall(r"^    (?!>>>)(.+[.:])\n\n    >>> ", edges, re.MULTILINE)
    assert 2 <= len(sentences) <= 4, sentences


# --- steps and axes


def entries(nav: Any, above: str = "") -> dict[str, str]:
    """Every page of a navigation, with the title above it."""
    found = {}
    for entry in nav:
        for title, below in entry.items() if isinstance(entry, dict) else [(above, entry)]:
            found |= {below: above} if isinstance(below, str) else entries(below, title)
    return found


def test_every_step_has_a_page_and_a_place_under_its_stage():
    places = entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    for name, step in STEPS.items():
        assert f"[[step {name}]]" in (DOCS / f"spec/{name}.md").read_text().splitlines()
        assert places[f"spec/{name}.md"] == step.stage.capitalize(), f"{name} is a step of {step.stage}"


@cache
def annotated_axes() -> set[str]:
    """The names in every shape that the specification annotates."""
    found = set()
    for path in ROOT.glob("src/attnspec/spec/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Subscript(ast.Name("Bool" | "Float" | "Int"), ast.Tuple([_, ast.Constant(str(text))])):
                    found |= {name for axis in parse(text) for name in axis.names}
    return found


def test_the_axes_of_the_annotations_are_those_of_the_glossary():
    assert annotated_axes() == GLOSSARY.keys()


# --- no shape is written by hand

_AXIS = "|".join(sorted(GLOSSARY, key=len, reverse=True))
_SIZE = rf"(?:\d[\d,_]*|(?:{_AXIS}|[BTSdhnN])(?:\*(?:{_AXIS}))?)"
_LETTERS = r"(?<![\w.])"
WRITTEN = re.compile(
    rf"[(\[]{_SIZE}(?:, ?| ){_SIZE}(?:(?:, ?| ){_SIZE})*,?[)\]]"  # in brackets, with commas or blanks
    rf"|{_LETTERS}{_SIZE} ?(?:×|\\times|\\,) ?{_SIZE}(?!\w)"
    rf"|{_LETTERS}[1-9]\d*(?:x[1-9]\d*)+(?!\w)"
    rf"|`[^`\n]*{_LETTERS}(?:{_AXIS}) (?:{_AXIS})(?!\w)[^`\n]*`"
)
GENERATED = re.compile(r"\[\[[a-z_]+( [^\]]*)?\]\]|\]\([^)]*\)|<[^>]*>")
"""What is no prose: calls of blocks, targets of links, tags."""


def written_shapes(page: str) -> list[tuple[int, str]]:
    """The shapes that stand in the prose of a page, with the numbers of their lines."""
    found, fence = [], ""
    for number, line in enumerate(page.splitlines(), 1):
        mark = re.match(r"[\s>]*(```+|~~~+)", line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        elif not fence:
            found += [(number, match[0]) for match in WRITTEN.finditer(GENERATED.sub("", line))]
    return found


@pytest.mark.parametrize("page", sorted(DOCS.glob("**/*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_no_shape_is_written_by_hand(page):
    """A block computes it, so that it cannot be wrong: `axes`, `sizes`, `ledger` and others of attnspec_docs."""
    shapes = [f"{page.relative_to(ROOT)}:{number}: {shape}" for number, shape in written_shapes(page.read_text())]
    assert not shapes, "\n".join(shapes)


@pytest.mark.parametrize(
    "shape",
    ["(2, 6, 512)", "`(2, 6)`", "(5,7)", "[batch, seq]", "(batch seq_q d_model)", "batch × seq × d_model", "2 × 6 × 512",
     "2x6x512", "`batch h seq_q d_k`", "`h*d_v d_model`", "(B, T, d)", r"\( B \times T \)", '`Float[A, "batch seq_q d_model"]`'],
)  # fmt: skip
def test_a_shape_written_by_hand_is_found(shape):
    page = f"# A page\n\n```python\nnp.ones((2, 3))\n```\n\nThe scores have the shape {shape}, always."
    assert [number for number, _ in written_shapes(page)] == [7]


@pytest.mark.parametrize(
    "prose",
    ["[[sizes score return seq_q=6]] and [[axes score return]]", "the axes (`batch`, `h`) in turn", "`batch`, `seq_q` and `d_k`",
     "`h*d_v`", "`h = h_kv * group`", "8 heads (of 64)", "(2017), (1, of two)", "[text](page.md#a-2x3)", '<svg viewBox="(0, 1)">',
     "[a link][axis-seq_q]", "section 3.2, 8 x more", "`x + d_k`", "0x12"],
)  # fmt: skip
def test_what_is_no_shape_is_left_alone(prose):
    assert written_shapes(f"# A page\n\n{prose}\n\n~~~\n(2, 3)\n~~~\n") == []
