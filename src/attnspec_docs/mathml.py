"""Formulas become MathML while the pages are built, so that a reader needs no script, and a mistake stops the build."""

import html
import re
from typing import Any

import math_core
from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

_CONVERTER = math_core.LatexToMathML()
_FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">(?P<formula>.*?)</(?P=tag)>', re.DOTALL)


def mathml(formula: str, /, *, display: bool) -> str:
    """Convert one formula.

    Args:
        formula: LaTeX, without what delimits it.
        display: whether it stands on a line of its own.

    Returns:
        MathML.

    Raises:
        ValueError: it does not convert.
    """
    try:
        return _CONVERTER.convert_with_local_state(formula, displaystyle=display)
    except math_core.LatexError as error:
        raise ValueError(f"the formula {formula!r} does not convert: {error}") from error


class _Formulas(Postprocessor):
    """Replaces what arithmatex has marked, with the delimiters that it leaves on."""

    def run(self, text: str) -> str:
        def converted(match: re.Match[str]) -> str:
            marked = html.unescape(match["formula"]).strip()
            formula = mathml(marked[2:-2], display=marked.startswith("\\["))
            return f'<{match["tag"]} class="formula">{formula}</{match["tag"]}>'

        return _FORMULA.sub(converted, text)


class MathML(Extension):
    """Registers the conversion behind all others."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # Python-Markdown's name
        """Register the conversion."""
        md.postprocessors.register(_Formulas(md), "mathml", 0)


def makeExtension(**settings: Any) -> MathML:  # noqa: N802  # Python-Markdown's name
    """Make the extension, as Python-Markdown asks for it."""
    return MathML(**settings)
