"""Tables of what was measured, from the results that the benchmarks wrote."""

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from .blocks import block
from .writing import folded, table

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_BENCHMARKS = _RESULTS.parent
TARGETS = {"torch": 1.0, "bare": 2.0}
"""How long a layer may take, as a multiple of `torch.nn.MultiheadAttention`; on NumPy, of the fused computation in PyTorch."""


class _Found(dict[str, Any]):
    """Part of a result, which says what it lacks."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"a page shows {key!r} of a result in {_RESULTS.name}/, which has only {', '.join(self)}: measure again.")


@cache
def results(name: str) -> Any:
    """What a benchmark wrote.

    Args:
        name: the file, without its ending.

    Returns:
        What stands in it; asked for what it lacks, it raises a ValueError.
    """
    return json.loads((_RESULTS / f"{name}.json").read_text(), object_hook=_Found)


@block
def measured(name: str, part: str = "") -> str:
    """When and where a result was measured, with which versions, and by which command: `[[measured oracle faults]]`."""
    if not (_BENCHMARKS / f"{name}.py").is_file():
        raise ValueError(f"[[measured {name}]]: there is no benchmarks/{name}.py to measure it again.")
    found = results(name)[part] if part else results(name)
    flat = _Found({**found, **found.get("machine", {}), **found.get("versions", {})})
    machine = flat["cpu"] if "cpu" in flat else flat["processor"]
    cores = f", {flat['cores']} cores" if "cores" in flat else ""
    versions = ", ".join(f"{said} {flat[key]}" for key, said in _VERSIONS.items() if key in flat)
    command = f"python benchmarks/{name}.py {part}".rstrip()
    return f"Measured on {flat['date'][:10]} ({machine}{cores}), with {versions}. To measure it again: `{command}`"


_VERSIONS = {"python": "Python", "numpy": "NumPy", "torch": "PyTorch", "onnxruntime": "ONNX Runtime", "python-flint": "python-flint"}


@block
def measured_number(name: str, *path: str) -> str:
    """One number of a result, for the middle of a sentence: `[[measured_number oracle faults faults]]`."""
    found = results(name)
    for key in path:
        found = found[key]
    return f"{found:,}"


@block
def speed(mode: str, beside: str = "torch") -> str:
    """A layer beside another, over all lengths and batches: `[[speed eval]]`, `[[speed numpy bare]]`."""
    rows = []
    for width, ratios in ratios_of(mode, beside).items():
        rows.append((width, len(ratios), *(f"{ratio:.2f}" for ratio in (min(ratios), statistics.median(ratios), max(ratios)))))
    return table(("`d_model`", "points", "best", "median", "worst"), rows, numbers_from=0)


def ratios_of(mode: str, beside: str, /) -> dict[int, list[float]]:
    """The times of a layer as multiples of another's, for each width.

    Args:
        mode: what the layer does.
        beside: what it is measured against.

    Returns:
        The ratios by `d_model`, one for each length and batch.

    Raises:
        ValueError: that was not measured.
    """
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
        for width, ratios in ratios_of(mode, beside).items():
            if over := [ratio for ratio in ratios if ratio > TARGETS[beside]]:
                rows.append((mode, width, TARGETS[beside], f"{len(over)} of {len(ratios)}", f"{max(over):.2f}"))
    return table(("mode", "`d_model`", "target", "points above it", "worst"), rows) if rows else "Every point meets its target."


@block
def memory() -> str:
    """What the NumPy layer needs as sequences grow."""
    return table(
        ("`seq`", "MiB at the peak"), [(f"{row['seq']:,}", row["mebibytes"]) for row in results("layer")["memory"]], numbers_from=0
    )


@block
def exactness() -> str:
    """The specification against arithmetic in many digits."""
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
def smallest_seen() -> str:
    """How small a change of each part of the specification that comparison sees."""
    rows = [(part, f"{size:.0e}") for part, size in results("exactness")["smallest_caught"].items()]
    return folded("The smallest change that this comparison sees, part by part", table(("what is off", "by this share"), rows))


@block
def found() -> str:
    """What the oracle finds, names, and reports by mistake."""
    faults, packages = results("oracle")["faults"], results("oracle")["packages"]
    rows = [
        ("faults that were reported in public, written again", faults["faults"], faults["found"], faults["named"], ""),
        ("their right twins", faults["faults"], "", "", faults["false_alarms"]),
        ("wrong implementations of others", packages["wrong"], packages["found"], packages["named"], ""),
        ("right implementations of others", packages["right"], "", "", packages["false_alarms"]),
    ]
    head = ("", "how many", "found", "named right", "reported by mistake")
    return table(head, rows) + (
        f"\n\nThe right ones of the last line solved {_problems(packages['problems_of_right_ones'])}. A fault was found after "
        f"{faults['median_problems']} problems and {faults['median_seconds']} s (median), {faults['most_seconds']} s at most."
    )


def _problems(count: int | dict[str, int]) -> str:
    """A number of problems, or one for each dtype."""
    if isinstance(count, int):
        return f"{count:,} problems"
    return f"{sum(count.values()):,} problems: {', '.join(f'{number:,} in {dtype}' for dtype, number in count.items())}"


@block
def again() -> str:
    """How right implementations did with many other seeds; nothing where they were not asked."""
    found = results("oracle").get("seeds")
    if found is None:
        return ""
    return (
        f"Right implementations were asked again with other seeds, {found['runs']:,} times: {_problems(found['problems_of_right_ones'])}. "
        f"Reported by mistake: {found['false_alarms']}; not decided: {found['not_decided']}.\n\n{measured('oracle', 'seeds')}"
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
        table(("layer, default effort", "problems", "seconds"), whole)
        + "\n\n"
        + table(("one problem in float32, with its tolerance", "milliseconds"), single)
    )


@block
def mutation() -> str:
    """Which small changes of the code the tests notice; nothing where that was not measured."""
    if not (_RESULTS / "mutation.json").exists():
        return ""
    rows, parts = [], []
    for area, one in results("mutation").items():
        noticed = one["killed"] + one["timed out"]
        rows.append((f"`attnspec/{area}/`", one["files"], f"{one['mutants']:,}", one["asked"], noticed, one["survived"]))
        parts += [_survivors(area, one), measured("mutation", area)]
    head = ("part", "files", "possible changes", "of which tried", "noticed", "not noticed")
    how = "Operators, numbers and conditions of the code are changed, one at a time, at places drawn from all; then the tests run."
    return "\n\n".join(["## What the tests notice", how, table(head, rows), *filter(None, parts)])


def _survivors(area: str, found: dict[str, Any]) -> str:
    cases = [case for case in found["cases"] if case["outcome"] == "survived"]
    rows = [
        (f"{case['file']}:{case['line']}", _code(case["before"]), _code(case["after"]), case["explanation"] or "not yet looked into")
        for case in cases
    ]
    if not rows:
        return ""
    return folded(f"What was not noticed in {area}, and why", table(("where", "before", "after", "why"), rows, numbers_from=9))


def _code(line: str) -> str:
    """Code in a cell of a table, with no sign that Markdown would read."""
    return f"<code>{''.join(sign if sign.isalnum() or sign == ' ' else f'&#{ord(sign)};' for sign in line.strip())}</code>"
