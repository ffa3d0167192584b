"""Every example runs: the blocks of each page from the top down, and those of each docstring by themselves.

Sybil finds and runs them. A page is one test, not one for each of its blocks, since they share their names and tests that
run side by side do not. Docstrings are read from the source: what a decorator has wrapped, `doctest` would pass over.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.parsers.rest import DocTestParser

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
PYTHON = re.compile(r"^[\s>]*(```|~~~)[^`\n]*\bpy", re.MULTILINE)


def docstrings(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """Read every docstring that has an example, with the lines before it left blank, so that errors name the right ones."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        if ">>>" in (ast.get_docstring(node) or ""):
            yield name, "\n" * (node.body[0].lineno - 1) + node.body[0].value.value
        for child in node.body:
            yield from docstrings(child, f"{name}.{getattr(child, 'name', '')}")


EXAMPLES = [
    pytest.param(path, text, id=name)
    for path in sorted((ROOT / "src").rglob("*.py"))
    for name, text in docstrings(ast.parse(path.read_text()), ".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
]


def run(text: str, path: Path, parser: Any) -> int:
    """Run the examples of a text in one new namespace, and count them."""
    document = Document(text, str(path))
    for region in parser(document):
        document.add(region)
    examples = list(document)
    for example in examples:
        example.evaluate()
    return len(examples)


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON.search(page.read_text())], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    """All of them: a fence that says more than `python` would be passed over."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    assert run(text, page, PythonCodeBlockParser()) == len(PYTHON.findall(text))


@pytest.mark.parametrize(("path", "text"), EXAMPLES)
def test_the_examples_of_a_docstring_run(path, text):
    assert run(text, path, DocTestParser()) > 0
