"""What the project wants to reach, beside what was measured."""

import statistics
from collections.abc import Sequence

from .blocks import block
from .numbers import TARGETS, ratios_of, results
from .writing import table

_MICROSECONDS, _A_STEP, _SECONDS, _WIDTH = 5.0, 3.0, 20.0, 512
"""What a call may add to the bare computation, what a step's check may take; how long the oracle may; the width NumPy's target is about."""


@block
def targets() -> str:
    """What the project wants to reach, what was measured, and whether that reaches it."""
    return table(("target", "measured", "reached"), [*_fast(), *_lean(), *_sound()], numbers_from=9)


def _fast() -> list[tuple[str, str, str]]:
    ratios = [point["ratios"]["torch"] for point in results("layer")["points"] if "torch" in point["ratios"]]
    wide = ratios_of("numpy", "bare")[_WIDTH]
    return [
        (
            "the PyTorch layer, with its checks on, takes no longer than `torch.nn.MultiheadAttention`, at any size",
            *_within(ratios, TARGETS["torch"], "times"),
        ),
        (
            f"the NumPy layer takes at most {TARGETS['bare']:g} times the bare fused computation in PyTorch, at width {_WIDTH}",
            *_within(wide, TARGETS["bare"], "times"),
        ),
    ]


def _lean() -> list[tuple[str, str, str]]:
    evaluated = [point for point in results("layer")["points"] if point["mode"] == "eval"]
    width = min(point["d_model"] for point in evaluated)  # where the computation itself is least of all
    times = [point["microseconds"] for point in evaluated if point["d_model"] == width]
    checks = statistics.median(time["ours"] - time["unchecked"] for time in times)
    first, *_, last = results("layer")["memory"]
    longer, larger = last["seq"] / first["seq"], last["mebibytes"] / first["mebibytes"]
    return [
        (
            f"a call adds at most {_MICROSECONDS:g} µs to the bare fused computation (here at width {width})",
            *_within([time["ours"] - time["bare"] for time in times], _MICROSECONDS, "µs"),
        ),
        (
            f"the check of a known signature takes at most {_A_STEP:g} µs a step",
            f"all checks of a call at width {width} together: {checks:.1f} µs (median)",
            "not measured step by step",
        ),
        (
            "the memory of the NumPy layer grows with the length of the sequence, not with its square",
            f"{longer:g} times as long: {larger:.1f} times as much",
            _said(larger < 1.5 * longer),
        ),
    ]


def _sound() -> list[tuple[str, str, str]]:
    faults, packages, times = (results("oracle")[part] for part in ("faults", "packages", "time"))
    slowest, layer = max((one["seconds"], name) for name, one in times["whole"].items())
    alarms, right = faults["false_alarms"] + packages["false_alarms"], packages["right"] + faults["faults"]
    return [
        ("every fault of the corpus is found", f"{faults['found']} of {faults['faults']}", _said(faults["found"] == faults["faults"])),
        ("no right implementation is reported", f"{alarms} of {right} were", _said(alarms == 0)),
        (f"a layer is examined in less than {_SECONDS:g} s", f"{slowest:.1f} s for `{layer}`", _said(slowest < _SECONDS)),
    ]


def _within(found: Sequence[float], limit: float, unit: str) -> tuple[str, str]:
    """How many of several points miss a target, and whether that is none."""
    above = sum(one > limit for one in found)
    middle, worst = (f"{one:,.0f}" if one >= 100 else f"{one:.2f}" for one in (statistics.median(found), max(found)))  # noqa: PLR2004
    return f"above it at {above} of {len(found)} points; {middle} {unit} (median), {worst} at worst", _said(not above)


def _said(reached: bool) -> str:  # noqa: FBT001  # there is but one flag
    return "yes" if reached else "**no**"
