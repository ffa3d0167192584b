"""The ledger as data for another language: formulas in the names of sizes, in the place of numbers."""

import itertools
from dataclasses import asdict
from typing import Any

from ..spec.sizes import MERGED, OF_HEADS, OF_INPUTS, OF_RANKS, SENTENCES, SHARE
from .ledger import BIASES, Cell, Ledger, Line, ledger_of, outline_run
from .network import SENT, crossings
from .proof import symbols_of_axes

DTYPES = ("float64", "float32", "bfloat16", "float16")
_CHOSEN = "float32"  # stands for whatever dtype is chosen
_RULES = {"heads": OF_HEADS, "ranks": OF_RANKS, "inputs": OF_INPUTS}


def formulas() -> dict[str, Any]:
    """Export what `Heads`, `ledger` and `crossings` work out. Needs sympy.

    A formula is a text of names of sizes and whole numbers with `+`, `-`, `*`, `//` and brackets. An array has axes, formulas of
    their sizes, and a dtype, which is empty where it is the chosen one.

    Returns:
        Plain data: `chains`, the lines of the ledger under three digits: whether `h_kv` is not `h`, whether there are biases,
        whether it is causal; `dtypes`, the bytes of a number; `network`, what crosses it, and what a rank sends of it; `rules`,
        how sizes are checked and filled in, and `sentences`, what is said where that fails; the sizes of one `merged` head, and
        of the `share` of a rank.
    """
    choices = itertools.product((False, True), repeat=3)
    chains = {f"{grouped:d}{bias:d}{causal:d}": _books(grouped=grouped, bias=bias, causal=causal) for grouped, bias, causal in choices}
    dtypes = {cell.dtype for books in chains.values() for line in books.lines for cell in (*line.arguments.values(), line.result)}
    alone, both = (crossings(chains["111"], 1, cross=cross) for cross in (False, True))
    return {
        "chains": {choices: [_line(line) for line in books.lines] for choices, books in chains.items()},
        "dtypes": {dtype: Cell((), (), dtype).bytes for dtype in (*DTYPES, *sorted(dtypes - {*DTYPES}))},
        "network": [{"array": one.array, "cross": one not in alone, **_cell(one.cell)} for one in both],
        "sent": SENT,
        "rules": {name: [asdict(rule) for rule in rules] for name, rules in _RULES.items()},
        "sentences": SENTENCES,
        "merged": MERGED,
        "share": SHARE,
    }


def _books(*, grouped: bool, bias: bool, causal: bool) -> Ledger:
    return ledger_of(outline_run(symbols_of_axes(grouped=grouped), absent=() if bias else BIASES, causal=causal, dtype=_CHOSEN))


def _line(line: Line) -> dict[str, Any]:
    numbers = {"multiply_adds": str(line.multiply_adds), "parameters": str(line.parameters)}
    arguments = {name: _cell(cell) for name, cell in line.arguments.items()}
    return {"step": line.step, "stage": line.stage, "arguments": arguments, "result": _cell(line.result), **numbers}


def _cell(cell: Cell) -> dict[str, Any]:
    return {"axes": cell.axes, "shape": [str(size) for size in cell.shape], "dtype": "" if cell.dtype == _CHOSEN else cell.dtype}
