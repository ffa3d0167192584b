"""Tables of what was measured, from the results that the benchmarks wrote."""

import json
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .blocks import block

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_TARGETS = {"torch": 1.0, "bare": 2.0}
"""How long a layer may take, as a multiple of `torch.nn.MultiheadAttention`; on NumPy, of the fused computation in PyTorch."""


@cache
def results(name: str) -> Any:
    """What a benchmark wrote.

    Args:
        name: the file, without its ending.
    """
    return json.loads((_RESULTS / f"{name}.json").read_text())


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], /, *, numbers_from: int = 1) -> str:
    """Write a Markdown table; columns of numbers stand to the right."""
    line = [("---:" if place >= numbers_from else "---") for place in range(len(head))]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, line, *rows))


@block
def measured(name: str, part: str = "") -> str:
    """When, on what machine and with which versions a result was measured."""
    found = results(name)[part] if part else results(name)
    flat = {**found, **found.get("machine", {}), **found.get("versions", {})}
    machine = [str(flat[key]) for key in ("cpu", "processor") if key in flat][:1]
    cores = [f"{flat['cores']} cores"] if "cores" in flat else []
    versions = [f"{key} {flat[key]}" for key in ("python", "numpy", "torch", "onnxruntime", "python-flint") if key in flat]
    return f"Measured on {str(flat['date'])[:10]}: {', '.join(machine + cores + versions)}."


@block
def speed(mode: str, beside: str = "torch") -> str:
    """A layer beside another, over all lengths and batches: `[[speed eval]]`, `[[speed numpy bare]]`."""
    rows = []
    for width, ratios in _ratios(mode, beside).items():
        rows.append((width, len(ratios), *(f"{ratio:.2f}" for ratio in (min(ratios), statistics.median(ratios), max(ratios)))))
    return table(("`d_model`", "points", "best", "median", "worst"), rows, numbers_from=0)


def _ratios(mode: str, beside: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for point in results("layer")["points"]:
        if point["mode"] == mode:
            found.setdefault(point["d_model"], []).append(point["ratios"][beside])
    if not found:
        raise ValueError(f"[[speed {mode}]]: layer.json has no point of this mode.")
    return found


@block
def speed_misses() -> str:
    """Where a layer takes longer than its target: every mode and width, counted."""
    rows = []
    for mode in dict.fromkeys(point["mode"] for point in results("layer")["points"] if "decode" not in point["mode"]):
        beside = "bare" if mode.startswith("numpy") else "torch"
        for width, ratios in _ratios(mode, beside).items():
            if over := [ratio for ratio in ratios if ratio > _TARGETS[beside]]:
                rows.append((mode, width, _TARGETS[beside], f"{len(over)} of {len(ratios)}", f"{max(over):.2f}"))
    return table(("mode", "`d_model`", "target", "points above it", "worst"), rows) if rows else "Every point meets its target."


@block
def memory() -> str:
    """What the NumPy layer needs as sequences grow."""
    return table(
        ("`seq`", "MiB at the peak"), [(f"{row['seq']:,}", row["mebibytes"]) for row in results("layer")["memory"]], numbers_from=0
    )


@block
def exactness() -> str:
    """The specification against a hundred digits."""
    found = results("exactness")["overall"]
    rows = [
        ("problems", f"{found['problems']:,}"),
        ("elements compared", f"{found['elements']:,}"),
        ("elements off by more than their bound", f"{found['failures']:,}"),
        ("largest error, relative to the largest element", f"{found['relative_to_largest']:.1e}"),
        ("largest error, in roundings of what the problem amplifies", f"{found['units_of_condition']:.2f}"),
    ]
    return table(("the specification in float64, on NumPy", ""), rows)


@block
def found() -> str:
    """What the oracle finds, names, and reports by mistake."""
    faults, packages = results("oracle")["faults"], results("oracle")["packages"]
    rows = [
        ("faults that were reported in public, written again", faults["faults"], faults["found"], faults["named"], faults["false_alarms"]),
        ("wrong implementations of others", packages["wrong"], packages["found"], packages["named"], ""),
        ("right implementations of others", packages["right"], "", "", packages["false_alarms"]),
    ]
    head = ("", "how many", "found", "named first", "right ones reported")
    return table(head, rows) + (
        f"\n\nThe right ones of the last line solved {packages['problems_of_right_ones']:,} problems. A fault was found after "
        f"{faults['median_problems']} problems and {faults['median_seconds']} s (median), {faults['most_seconds']} s at most."
    )


@block
def not_named() -> str:
    """The faults that were found under another name."""
    rows = [
        (case["fault"], f"`{case['kind']}`", case["wrong"]["sentence"])
        for case in results("oracle")["faults"]["cases"]
        if case["wrong"]["kind"] != case["kind"]
    ]
    return table(("fault", "its kind", "what was said"), rows, numbers_from=9) if rows else "None."


@block
def wrong_ones() -> str:
    """The implementations of others that were found wrong."""
    rows = [(case["name"], case["sentence"]) for case in results("oracle")["packages"]["cases"] if case["verdict"] == "deviates"]
    return table(("implementation", "what was said"), rows, numbers_from=9)


@block
def smallest() -> str:
    """The smallest defects that are caught, beside what other rules catch, and which of those report right code."""
    parts = []
    for dtype, found in results("oracle")["smallest"]["table"].items():
        kinds = [kind for kind in found if kind != "false reports"]
        rules = list(found[kinds[0]])
        rows = [(rule, *(_size(found[kind][rule]) for kind in kinds), "yes" if rule in found["false reports"] else "no") for rule in rules]
        parts.append(f"**{dtype}**\n\n" + table(("rule", *kinds, "reports right code"), rows))
    return "\n\n".join(parts)


def _size(size: float | None) -> str:
    return "none" if size is None else f"{size:.1e}"


@block
def times() -> str:
    """How long the oracle takes."""
    found = results("oracle")["time"]
    whole = [(name, one["problems"], f"{one['seconds']:.1f}") for name, one in found["whole"].items()]
    single = [(name, f"{1000 * seconds:,.0f}") for name, seconds in found["one_problem"].items()]
    return (
        table(("layer, default effort", "problems", "seconds"), whole) + "\n\n" + table(("one problem in float64", "milliseconds"), single)
    )
