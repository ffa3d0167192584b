"""The heads in the terminal: which word looks at which."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from .habits import Habit, habit
from .replay import Replay
from .run import Run

_WIDEST = 8  # of a word, in columns of the terminal
_NARROWEST = 4  # of a weight
_BRIEF = 21  # 19 of 23, weight 0.43
_NOTHING = 0.005  # below it a weight is written 0.00
_PALE, _DEEP = (219, 234, 254), (30, 58, 138)
_INK_TURNS = 0.67  # where black and white stand out equally from the ground
_RANKS = 3
LEGEND = Text("Each word on the left shares an attention of 1 among the words of the text.\n", style="dim")


def head_view(replayed: Replay, head: int, tokens: Sequence[str], /, *, width: int) -> RenderableType:
    """Show which word looks at which in one head.

    Args:
        replayed: the layer.
        head: which head.
        tokens: the words.
        width: how many columns the terminal has.

    Returns:
        A table of words by words; where they do not fit, a line for each word.
    """
    weights = replayed.weights[head]
    found = habit(weights, replayed.keep[head], tokens)
    title = Text(f"Layer {replayed.layer.index}, head {head}: {found}", style="bold")
    size = _size(tokens)
    fits = (len(tokens) + 1) * (size + 1) <= width
    return Group(title, _matrix(weights, tokens, size) if fits else _ranking(weights, tokens), Text())


def _matrix(weights: Float[np.ndarray, "seq_q seq_k"], tokens: Sequence[str], size: int) -> Table:
    view = _plain_table()
    for token in ("", *tokens):
        view.add_column(Text(_cut(token)), width=size, justify="right", no_wrap=True)
    for token, row in zip(tokens, weights, strict=True):
        view.add_row(Text(_cut(token), style="bold"), *(_shaded(float(weight)) for weight in row))
    return view


def _ranking(weights: Float[np.ndarray, "seq_q seq_k"], tokens: Sequence[str]) -> Table:
    view = _plain_table()
    for title in ("", "word", "looks at"):
        view.add_column(title, justify="left" if title == "looks at" else "right")
    for i, row in enumerate(weights):
        best = [int(j) for j in np.argsort(-row, kind="stable")[:_RANKS] if row[j] >= _NOTHING]
        looks = Text(", ").join(Text.assemble(f"{j} {_cut(tokens[j])} ", _shaded(float(row[j]))) for j in best)
        view.add_row(str(i), Text(_cut(tokens[i]), style="bold"), looks)
    return view


def layer_view(replayed: Replay, tokens: Sequence[str], /, *, width: int) -> RenderableType:
    """Show for each head of a layer which word each word looks at most, and how much.

    Args:
        replayed: the layer.
        tokens: the words.
        width: how many columns the terminal has.

    Returns:
        A table with a row for each head; where the words do not fit, only with what most of them look at.
    """
    size = _size(tokens)
    fits = 5 + _BRIEF + len(tokens) * (size + 1) <= width
    view = _plain_table()
    view.add_column("head", justify="right")
    view.add_column("most words look at", min_width=_BRIEF, no_wrap=True)
    for word in tokens if fits else ():
        view.add_column(Text(_cut(word)), width=size, justify="right", no_wrap=True)
    for head, (weights, found) in enumerate(zip(replayed.weights, _habits(replayed, tokens), strict=True)):
        cells = [_favourite(row, tokens) for row in weights] if fits else []
        brief = f"{found.name}\n{found.hits} of {found.words}, weight {found.weight:.2f}" if found.name and fits else str(found)
        view.add_row(Text(str(head), style="bold"), Text(brief), *cells)
    title = f"Layer {replayed.layer.index}: what {'each word (column) looks' if fits else 'words look'} at most, in each head (row)"
    return Group(Text(title, style="bold"), view, Text())


def _favourite(row: Float[np.ndarray, " seq_k"], tokens: Sequence[str]) -> Text:
    return Text("\n").join([Text(_cut(tokens[int(row.argmax())])), _shaded(float(row.max()))])


def summary(replays: Iterable[Replay], tokens: Sequence[str], /) -> RenderableType:
    """Gather the heads of all layers by what they look at.

    Args:
        replays: the layers.
        tokens: the words.

    Returns:
        A table with a row for each pattern in each layer, the commonest first.
    """
    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("layer", "most words look at", "in heads", "words", "weight"):
        view.add_column(title, justify="left" if title in {"most words look at", "in heads"} else "right")
    for replayed in replays:
        groups: dict[str, dict[int, Habit]] = {}
        for head, found in enumerate(_habits(replayed, tokens)):
            groups.setdefault(found.name, {})[head] = found
        view.add_section()
        label = str(replayed.layer.index)
        for name, heads in sorted(groups.items(), key=lambda group: (not group[0], -len(group[1]))):
            hits, weights = ([getattr(found, number) for found in heads.values()] for number in ("hits", "weight"))
            words = next(iter(heads.values())).words  # the same in each head
            numbers = (f"{_range(hits, 'd')} of {words}", _range(weights, ".2f")) if name else ("", "")
            view.add_row(label, Text(name or "no one pattern"), " ".join(map(str, heads)), *numbers)
            label = ""
    return Group(Text("What most words look at most, in every head", style="bold"), view)


def comparison(run: Run, replays: Sequence[Replay], /) -> RenderableType:
    """Say how far the specification and the model are apart, and whether rounding explains it.

    Args:
        run: the model on its text.
        replays: the layers.

    Returns:
        A table with a row for each step that the model shows the result of, and what a reader should know beside.
    """
    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("\nstep", "largest\ndifference", "share of what\nrounding explains", ""):
        view.add_column(header, justify="left" if header in {"\nstep", ""} else "right")
    for step in dict.fromkeys(step for replayed in replays for step in replayed.distances):
        of_layer = {replayed.layer.index: replayed.distances[step] for replayed in replays if step in replayed.distances}
        difference, share = (max(getattr(distance, number) for distance in of_layer.values()) for number in ("difference", "share"))
        wrong = [str(index) for index, distance in of_layer.items() if not distance.is_rounding]
        verdict = Text(f"NOT ROUNDING in layer {', '.join(wrong)}" if wrong else "rounding", style="bold red" if wrong else "")
        view.add_row(step, f"{difference:.1e}", f"{share:.2%}" if share <= 1 else f"{share:.3g} times", verdict)
    notes = [run.note] if run.note else []
    for why in dict.fromkeys(replayed.layer.why for replayed in replays if replayed.layer.why):
        layers = ", ".join(str(replayed.layer.index) for replayed in replays if replayed.layer.why == why)
        notes.append(f"Layer {layers}: fan out is the model's own: it {why}.")
    title = Text(f"Compared with the model's own attention: {run.model}", style="bold")
    return Group(title, view, *map(Text, notes))


def _habits(replayed: Replay, tokens: Sequence[str]) -> list[Habit]:
    return [habit(weights, keep, tokens) for weights, keep in zip(replayed.weights, replayed.keep, strict=True)]


def _range(numbers: Sequence[float], form: str) -> str:
    return "-".join(dict.fromkeys(format(number, form) for number in (min(numbers), max(numbers))))


def _plain_table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)


def _size(tokens: Sequence[str]) -> int:
    return max(_NARROWEST, min(max(map(cell_len, tokens)), _WIDEST))


def _cut(word: str) -> str:
    return word if cell_len(word) <= _WIDEST else set_cell_size(word, _WIDEST - 1) + "…"


def _shaded(weight: float) -> Text:
    """Write a weight on a ground that is the deeper the larger it is."""
    if weight < _NOTHING:
        return Text("·", style="dim")
    ground = tuple(round(pale + (deep - pale) * weight) for pale, deep in zip(_PALE, _DEEP, strict=True))
    ink = "#000000" if weight < _INK_TURNS else "#ffffff"
    return Text(f"{weight:.2f}", style=Style(color=ink, bgcolor="#{:02x}{:02x}{:02x}".format(*ground)))
