"""The pages as they are written: what is public is documented once, and what pages say of it covers all of it. Needs no build."""

import dataclasses
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

import attnspec
from attnspec.layouts import LAYOUTS

pytest.importorskip("markdown", reason="the documentation's tools are not installed")

from attnspec_docs import commands, conventions, guides, layouts
from attnspec_docs.blocks import render

DOCS = Path(__file__).parents[1] / "docs"
ROOMS = ("attnspec", *(f"attnspec.{room}" for room in ("bookkeeping", "distributed", "layouts", "numpy", "oracle", "torch")))


def thing_of(path):
    """The object at a dotted path; a module that is not imported yet is no attribute yet."""
    found, done = attnspec, "attnspec"
    for name in path.split(".")[1:]:
        done += f".{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            found = importlib.import_module(done)
    return found


def public_names():
    for room in ROOMS:
        module = importlib.import_module(room)
        names = [name for name in vars(module) if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)]
        yield from (f"{room}.{name}" for name in names)


@pytest.fixture(scope="module")
def entries():
    """Each object that a page documents, with the page."""
    found = []
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        paths = [
            *re.findall(r"^::: (\S+)", text, re.MULTILINE),
            *(f"attnspec.{name}" for name in re.findall(r"^\[\[step (\w+)\]\]", text, re.MULTILINE)),
        ]
        found += [(id(thing_of(path)), path, page.name) for path in paths]
    return found


@pytest.mark.parametrize("name", list(public_names()))
def test_everything_public_is_documented_once(name, entries):
    places = [(path, page) for thing, path, page in entries if thing == id(thing_of(name))]
    assert len(places) == 1, places


def test_every_entry_stands_on_one_page(entries):
    assert len({thing for thing, *_ in entries}) == len(entries)


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md\b", (DOCS.parent / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} <= listed


@pytest.mark.parametrize(("kind", "entries"), [(attnspec.Policy, conventions.POLICY), (attnspec.Rotation, conventions.ROTATION)])
def test_every_field_of_a_policy_says_who_does_what(kind, entries):
    assert list(entries) == [field.name for field in dataclasses.fields(kind)]
    for name, convention in entries.items():
        for fact in convention.facts:
            kind(**{name: fact.value})
            assert conventions.version_of(fact.project)
        assert len({(fact.value, fact.project, fact.where) for fact in convention.facts}) == len(convention.facts) > 1


def test_a_missing_field_a_value_that_is_none_and_an_unknown_test_stop_the_build(monkeypatch):
    for facts, complaint in (
        (conventions.Fact("nothing", "PyTorch", "", "torch"), "empty_row"),
        (conventions.Fact("zero", "PyTorch", "", "tensorflow"), "'tensorflow' is no test of peers"),
        (conventions.Fact("zero", "Theano", "", "read"), "Theano"),
    ):
        with monkeypatch.context() as patch, pytest.raises((attnspec.AttnspecError, ValueError, KeyError), match=complaint):
            patch.setitem(conventions.POLICY, "empty_row", conventions.Convention((facts,)))
            render("conventions")
    monkeypatch.delitem(conventions.POLICY, "cap")
    with pytest.raises(ValueError, match="but the fields of Policy are"):
        render("conventions")


def test_every_layout_says_whose_it_is():
    assert layouts.WHOSE.keys() == LAYOUTS.keys()


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("timm", "query 0 · query 1 · query 2 · query 3 · key 0"),
        ("gpt_neox", "query 0 · key 0 · value 0 · query 1"),
        ("phi3", "query 3 · key 0 · key 1 · value 0 · value 1."),
        ("falcon", "query 0 · query 1 · key 0 · value 0 · query 2"),
        ("codegen", "query 0 · query 1 · value 0 · value 1 · key 0 · key 1 · query 2"),
    ],
)
def test_the_order_of_heads_is_that_of_the_project(name, order):
    section = re.search(rf"### {name} .*?(?=\n### |\Z)", render("layouts"), re.DOTALL)
    assert order in section.group()


def test_options_are_read_from_docstrings():
    assert "| `h_kv` | `None` | How many key/value heads; None for `h`. |" in render(
        "options layers.torch_layer.MultiHeadAttention.__init__"
    )
    with pytest.raises(ValueError, match="no section of parameters"):
        guides.described("spec.policy.Policy", "parameters")


def test_every_command_has_a_section():
    page = (DOCS / "use" / "cli.md").read_text()
    for name in re.findall(r"\(#(\w+)\)", commands.commands()):
        assert f"## {name}\n" in page
        assert f"[[command {name}]]" in page


def test_what_a_command_prints_is_shown_with_its_exit_status():
    wrong = render("output shapes --h 7")
    assert "Heads: h=7 does not divide d_model=512" in wrong
    assert wrong.endswith("Its exit status is 2.")
    assert "exit status" not in render("output shapes --d-model 24 --h 4")


def test_a_step_is_shown_in_all_its_places_or_the_build_stops():
    shown = render("places gate gates")
    assert "blended = gate(blended, parameters.gates)" in shown
    assert '"gates": (False, True),' in shown
    with pytest.raises(ValueError, match=r"is not in .*, where every step has its place"):
        render("places gait")
