# ruff: noqa: INP001
"""How exact the float64 specification is: `python benchmarks/exactness.py --problems 300 --json benchmarks/results/exactness.json`.

Every pair of options and random choices of options and sizes, with logits of standard deviation about 1 and 8, are held
to an independent evaluator in ball arithmetic; then it is measured how small a defect the comparison still finds.
`tests/condition.py` defines what is measured. Needs the `test` extra.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import options
from condition import UNIT, compare
from enclosure import DIGITS, enclose
from options import NEUTRAL, PAIRWISE, VALUES, Drawn
from small_defects import DEFECTS
from variations import fit, sharpen, spread

import attnspec

LARGEST = {"batch": 2, "seq_q": 16, "seq_k": 24, "d_model": 32, "d_key_in": 32, "d_value_in": 32, "d_k": 16, "d_v": 16}
FAR = 9973  # given positions lie below 9, or below 9 times this
TOLERANCE = 4 * UNIT
MEASURES = ("relative", "relative_to_largest", "units_of_condition", "radius")


def problems(count: int, seed: int) -> Iterator[tuple[dict[str, Any], Drawn]]:
    """Draw problems: every pair of options, sharp and not, then random choices and sizes."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        if index < 2 * len(PAIRWISE):
            choice, sizes, sharpness, distance = PAIRWISE[index // 2], options.SIZES, (1, 8)[index % 2], 1
        else:
            choice = {name: values[rng.integers(len(values))] for name, values in VALUES.items()}
            sizes = fit(choice, {name: int(rng.integers(1, largest + 1)) for name, largest in LARGEST.items()})
            sharpness, distance = int(rng.choice((1, 8))), int(rng.choice((1, FAR)))
        turns_far = choice["places"] == "given" and choice["rotation"] and distance == FAR
        more = {"logits' deviation": sharpness, "positions": "up to 80000" if turns_far else "up to 30"}
        yield {**choice, **more}, spread(sharpen(options.draw(choice, int(rng.integers(1 << 30)), sizes), sharpness), distance)


def measure(drawn: Drawn, library: str) -> dict[str, Any]:
    """Compare one result with its enclosure."""
    enclosure = enclose(drawn.x, drawn.parameters, drawn.options)
    agreement = compare(enclosure, _in(library, drawn).run())
    return {
        "relative": agreement.relative,
        "relative_to_largest": agreement.relative_to_largest,
        "units_of_condition": agreement.share / UNIT,
        "radius": enclosure.radius,
        "elements": agreement.error.size,
        "within": agreement.within(TOLERANCE),
    }


def _in(library: str, drawn: Drawn) -> Drawn:
    if library == "numpy":
        return drawn
    import torch

    return drawn.convert(torch.asarray)


def summary(measures: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of some problems, and how the worst elements of all are spread."""
    worst = {name: max(row[name] for row in measures) for name in MEASURES}
    quantiles = np.quantile([row["units_of_condition"] for row in measures], (0.5, 0.9, 0.99)).tolist()
    return {
        "problems": len(measures),
        "elements": sum(row["elements"] for row in measures),
        "failures": sum(not row["within"] for row in measures),
        **worst,
        "quantiles_of_units": dict(zip(("50 %", "90 %", "99 %"), quantiles, strict=True)),
    }


def by_option(labels: list[dict[str, Any]], measures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The summary of the problems with each value of each option."""
    results = []
    for option in labels[0]:
        values = [*VALUES.get(option, ()), *(label[option] for label in labels)]
        for value in dict.fromkeys(values):
            chosen = [row for label, row in zip(labels, measures, strict=True) if label[option] == value]
            if chosen:
                results.append({"option": option, "value": str(value), **summary(chosen)})
    return results


def smallest_caught(name: str, seeds: int = 5) -> float | None:
    """The smallest power of ten that is caught in all of some problems, as all larger ones are."""
    more, plant, _ = DEFECTS[name]
    drawn = [options.draw(NEUTRAL | {"source": "cross", "heads": "contiguous"} | more, seed) for seed in range(seeds)]
    enclosures = [enclose(d.x, d.parameters, d.options) for d in drawn]
    caught = None
    for exponent in range(4, 18):
        with attnspec.substitute(**plant(10.0**-exponent)):
            if any(compare(e, d.run()).within(TOLERANCE) for e, d in zip(enclosures, drawn, strict=True)):
                break
        caught = 10.0**-exponent
    return caught


def machine() -> dict[str, Any]:
    """Where, when and with what this ran."""
    cpu = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    packages = ("attnspec", "numpy", "torch", "python-flint", "allpairspy")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "simd": np.show_config(mode="dicts")["SIMD Extensions"]["found"],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure all that is asked for."""
    started = time.perf_counter()
    labels, drawn = zip(*problems(asked.problems, asked.seed), strict=True)
    measures = [measure(problem, asked.library) for problem in drawn]
    return {
        "machine": machine(),
        "settings": {"problems": asked.problems, "seed": asked.seed, "library": asked.library, "digits": DIGITS, "tolerance": TOLERANCE},
        "overall": summary(measures),
        "by_option": by_option(labels, measures),
        "smallest_caught": {name: smallest_caught(name) for name in DEFECTS},
        "seconds": round(time.perf_counter() - started, 1),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the worst errors by option and value, and the smallest defects that were found."""
    title = f"Worst errors of the float64 specification on {report['settings']['library']}"
    caption = f"1 unit = 2^-53 of the condition (tests/condition.py); allowed {TOLERANCE / UNIT:.0f}"
    errors = Table("option", "value", title=title, caption=caption)
    for name in ("problems", "relative", "relative to the largest", "units of condition", "radius"):
        errors.add_column(name, justify="right")
    for row in [*report["by_option"], {"option": "all", "value": "", **report["overall"]}]:
        numbers = (f"{row[name]:.1e}" if name != "units_of_condition" else f"{row[name]:.2f}" for name in MEASURES)
        errors.add_row(row["option"], row["value"], str(row["problems"]), *numbers)
    defects = Table("defect", "smallest relative size caught", title="What the comparison finds")
    for name, size in report["smallest_caught"].items():
        defects.add_row(name, "none" if size is None else f"{size:.0e}")
    console.print(errors, defects)
    overall = report["overall"]
    console.print(f"{overall['problems']} problems, {overall['elements']} elements, {overall['failures']} failures, {report['seconds']} s.")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pairs = 2 * len(PAIRWISE)
    parser.add_argument("--problems", type=int, default=300, help=f"how many problems; the first {pairs} hold every pair of options")
    parser.add_argument("--seed", type=int, default=0, help="of the random ones")
    parser.add_argument("--library", choices=("numpy", "torch"), default="numpy", help="the arrays' library")
    parser.add_argument("--json", type=Path, help="where to write the results")
    asked = parser.parse_args()
    report = run(asked)
    show(report, Console(width=None if sys.stdout.isatty() else 140))
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(report["overall"]["failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
