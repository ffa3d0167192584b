"""The pages of the specification, from what its steps say of themselves."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import attnspec
from attnspec.axes import Shape, evaluate, shapes_of
from attnspec.bookkeeping.figures import chain_figure, colour_of, step_figure
from attnspec.bookkeeping.glossary import GLOSSARY
from attnspec.bookkeeping.ledger import OPTIONAL, Ledger, Line, outline_run
from attnspec.bookkeeping.proof import prove
from attnspec.step import Step, function_of, step_of

from .blocks import block
from .sources import cited_in
from .writing import figure, first_line, table

STAGES = {"fan out": "Fan out", "attend": "Attend", "fan in": "Fan in"}
SIZES = {
    "batch": 2, "seq_q": 6, "seq_k": 9, "seq": 6, "d_model": 512, "d_key_in": 512, "d_value_in": 512, "h": 8, "h_kv": 2, "heads": 8,
    "d_k": 64, "d_v": 64, "width": 64, "past": 5, "extra": 1, "buckets": 32, "boundaries": 4,
}  # fmt: skip
"""The sizes at which pages show a step: those of the running example, with fewer key/value heads than query heads."""

_EVERYTHING = attnspec.Policy(cap=30.0, window=(3, 0), normalise="rms", rotation=attnspec.Rotation())


@cache
def all_steps() -> dict[str, Step]:
    """Every public step, by name: stage by stage, first those that always run, then those that an option adds, then the rest."""
    public = [step_of(function) for name in dir(attnspec) if hasattr(function := getattr(attnspec, name), "__step__")]
    order = [*always(), *(call.step.name for call in outline_run(SIZES, present=OPTIONAL, causal=True, policy=_EVERYTHING).calls)]
    public.sort(key=lambda step: order.index(step.name) if step.name in order else len(order))
    return {step.name: step for stage in STAGES for step in public if step.stage == stage}


@cache
def always() -> tuple[str, ...]:
    """The steps that run whatever the options are, in order."""
    return tuple(outline_run({**SIZES, "h_kv": SIZES["h"]}, absent=("keep",)))


def axes_of(name: str, /) -> dict[str, str]:
    """The axes of each array that a step takes, and of its result, as Markdown with links to the glossary."""
    shapes = shapes_of(function_of(name, "axes_of"))
    return {label: _linked_axes(found[0]) for label, found in shapes.items()}


def _linked_axes(shape: Shape) -> str:
    return " ".join(linked_axis(axis.text, broadcast=axis.broadcast) for axis in shape.axes)


def linked_axis(text: str, /, *, broadcast: bool = False) -> str:
    """An axis in its colour, as Markdown with a link to the glossary."""
    marked = f'`{"#" * broadcast}{text}`{{ .axis style="color:{colour_of(text)}" }}'
    return f"[{marked}][axis-{text}]" if text in GLOSSARY else marked


def _sizes(name: str, label: str, at: Mapping[str, int]) -> str:
    shape = shapes_of(function_of(name, "sizes"))[label][0]
    return _times(evaluate(axis.text, at) for axis in shape.axes)


@block
def step(name: str) -> str:
    """The page of one step."""
    info, function = all_steps()[name], function_of(name, "step")
    cost = _cost(info)
    rows = [("**gives**" if label == "return" else f"`{label}`", axes, _sizes(name, label, SIZES)) for label, axes in axes_of(name).items()]
    return "\n".join([
        f"{first_line(function)} A step of [{info.stage}](index.md#{info.stage.replace(' ', '-')}).",
        "",
        rf"\[ {info.equation} \]",
        "",
        figure(step_figure(name)),
        "",
        table(("array", "axes", "for example"), rows, numbers_from=3),
        "",
        cost,
        "",
        f"::: attnspec.{name}",
        "",
        "## The code",
        "",
        "```python",
        code_of(function),
        "```",
        *_sources(function),
    ])  # fmt: skip


def code_of(function: Any, /) -> str:
    """The source of a function without its docstring, which stands above it on the page."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    node = ast.parse(source).body[0]
    if not isinstance(node, ast.FunctionDef):
        raise TypeError(f"{function} is no function.")
    docstring = node.body[0]
    lines = source.splitlines()
    return "\n".join(lines[: docstring.lineno - 1] + lines[docstring.end_lineno :])


def latex_of(expression: str, /) -> str:
    """Write arithmetic on axes as a formula, in the symbols of the glossary."""
    names = re.sub(r"[^\W\d]\w*", lambda match: GLOSSARY[match[0]].symbol if match[0] in GLOSSARY else match[0], expression)
    return names.replace("*", r" \, ").replace("(", "").replace(")", "")


def _cost(info: Step) -> str:
    if info.multiply_adds == "0":
        return "**Cost**: no matrix product; work in proportion to the elements of the result."
    example = evaluate(info.multiply_adds, SIZES)
    return rf"**Cost**: \( {latex_of(info.multiply_adds)} \) multiply-adds, `{info.multiply_adds}`; {example:,} for the example."


def _sources(function: Any) -> list[str]:
    found = cited_in(inspect.getdoc(function) or "")
    return ["", "## Sources", "", *(f"- {source.full}" for source in found)] if found else []


@block
def steps() -> str:
    """Every step, stage by stage, with what it gives."""
    parts = []
    for stage, title in STAGES.items():
        rows = [
            (f"[`{name}`]({name}.md)", first_line(function_of(name, "steps")), axes_of(name)["return"])
            for name, info in all_steps().items()
            if info.stage == stage
        ]
        parts += [f"## {title}", table(("step", "what it does", "what it gives"), rows, numbers_from=3)]
    return "\n\n".join(parts)


@block
def glossary() -> str:
    """Every axis: its symbol, its meaning, and which steps have it."""
    users: dict[str, list[str]] = {name: [] for name in GLOSSARY}
    for name in all_steps():
        shapes = [found[0] for found in shapes_of(function_of(name, "glossary")).values()]
        for axis in dict.fromkeys(axis for shape in shapes for found in shape.axes for axis in found.names):
            if axis not in users:
                raise ValueError(f"{name}: the axis {axis!r} has no entry in attnspec.bookkeeping.glossary.")
            users[axis].append(name)
    return "\n\n".join(
        f'### `{name}`{{ .axis style="color:{colour_of(name)}" }} {{ #axis-{name} }}\n\n\\( {word.symbol} \\): {word.meaning}.\n\n'
        f"In {', '.join(f'[`{user}`]({user}.md)' for user in users[name])}."
        for name, word in GLOSSARY.items()
    )


@block
def chain() -> str:
    """The whole chain as a picture."""
    return figure(chain_figure(), kind="chain")


@block
def proof() -> str:
    """Every array on its way from one step to the next, for all sizes."""
    rows = [
        (_origin(link.source), f"[`{link.target}`]({link.target}.md) `{link.argument}`", _linked_axes(link.taken), _symbols(link.shape))
        for link in prove().links
    ]
    return table(("from", "to", "its axes there", "its size, for all sizes"), rows, numbers_from=4)


def _origin(source: str) -> str:
    return f"[`{source}`]({source}.md)" if source in all_steps() else f"`{source}`, an input"


def _symbols(shape: tuple[Any, ...]) -> str:
    sizes = r" \times ".join(latex_of(str(size)) for size in shape)
    return rf"\( {sizes} \)"


@block
def ledger(**sizes: str) -> str:
    """What each step gives at given sizes and what it costs: `[[ledger d_model=512 h=8 batch=2 seq=6]]`."""
    given: dict[str, Any] = {name: int(size) for name, size in sizes.items()}
    layer = {name: size for name, size in given.items() if name not in {"batch", "seq", "seq_k"}}
    books = attnspec.ledger(attnspec.Heads(**layer), **{name: size for name, size in given.items() if name not in layer})
    head = ("step", "what it gives", "size", "parameters", "multiply-adds", "bytes")
    rows = [
        (_link(line.step), " ".join(map(linked_axis, line.result.axes)), _times(line.result.shape), *_costs(line)) for line in books.lines
    ]
    return table(head, [*rows, ("**together**", "", "", *_costs(books))], numbers_from=3)


def _link(name: str) -> str:
    return f"[`{name}`][attnspec.{name}]"


def _times(shape: Iterable[int]) -> str:
    return " × ".join(f"{size:,}" for size in shape)


def _costs(books: Line | Ledger) -> list[str]:
    return [f"{number:,}" if number else "" for number in (books.parameters, books.multiply_adds, books.bytes)]


@block
def axes(name: str, label: str) -> str:
    """The axes of one array of a step, or of its result (`return`), for the middle of a sentence: `[[axes score return]]`."""
    return axes_of(name)[label]


@block
def sizes(name: str, label: str, **given: str) -> str:
    """The sizes of one array of a step, for the middle of a sentence: `[[sizes score return seq_k=6]]`."""
    return _sizes(name, label, {**SIZES, **{axis: int(size) for axis, size in given.items()}})
