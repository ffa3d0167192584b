# ruff: noqa: INP001
"""How fast the layers are: `python benchmarks/layer.py --json benchmarks/results/layer.json`.

Each number is a ratio within one process: the layer and what it is compared with run by turns, and the median of the
ratios of neighbouring runs counts. Compared are `torch.nn.MultiheadAttention`, the bare fused code (one packed
projection, `scaled_dot_product_attention`, one projection), and the layer without its checks; for NumPy also
onnxruntime. Needs the `test` and `peers` extras; `--only eval,train` picks modes, `--seconds` is the time for each point.
"""

import argparse
import gc
import importlib.metadata
import itertools
import json
import math
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import attnspec.numpy
import attnspec.torch
from attnspec.layers.promises import CACHED

H = {64: 4, 512: 8, 1024: 16}
SEQS = (1, 16, 128, 1024, 4096)
BATCHES = (1, 8)
FEWEST_ROUNDS = 3
REST = 0.06

Run = Callable[[], Any]


@dataclass
class Point:
    """One place of the grid: what is timed, and what it is compared with."""

    mode: str
    d_model: int
    seq: int
    batch: int
    ours: Run
    others: dict[str, Run]
    rest: float = 0.0
    """Seconds before each turn: the threads of one library go on spinning for a while, and would slow the next one down."""
    ratios: dict[str, float] = field(default_factory=dict)
    microseconds: dict[str, float] = field(default_factory=dict)

    def measure(self, seconds: float) -> None:
        """Run all by turns."""
        runs = {"ours": self.ours, **self.others}
        for run in runs.values():
            run()
            run()
        times: dict[str, list[float]] = {name: [] for name in runs}
        repeat = max(1, int(2e-3 / _time(self.ours, 1)))
        start = time.perf_counter()
        gc.collect()
        while len(times["ours"]) < FEWEST_ROUNDS or time.perf_counter() - start < seconds:
            for name in _turns(runs, len(times["ours"])):
                if self.rest:
                    time.sleep(self.rest)
                    runs[name]()
                times[name].append(_time(runs[name], repeat))
        for name in self.others:
            pairs = zip(times["ours"], times[name], strict=True)
            self.ratios[name] = round(statistics.median(one / other for one, other in pairs), 3)
        self.microseconds = {name: round(statistics.median(found) * 1e6, 1) for name, found in times.items()}

    def to_dict(self) -> dict[str, Any]:
        """The point as plain data."""
        return {
            "mode": self.mode, "d_model": self.d_model, "seq": self.seq, "batch": self.batch, "ratios": self.ratios,
            "microseconds": self.microseconds,
        }  # fmt: skip


def _turns(runs: dict[str, Run], count: int) -> list[str]:
    """Forwards and backwards by turns, so that none always follows the same."""
    return list(runs) if count % 2 else list(runs)[::-1]


def _time(run: Run, repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        run()
    return (time.perf_counter() - start) / repeat


class Bare(torch.nn.Module):
    """What a programmer writes without a library: packed projections around the fused kernel."""

    def __init__(self, d_model: int, h: int) -> None:
        super().__init__()
        self.h = h
        self.fan_out = torch.nn.Linear(d_model, 3 * d_model)
        self.fan_in = torch.nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor, causal: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002
        """Fan out, attend, fan in."""
        batch, seq, width = x.shape
        queries, keys, values = self.fan_out(x).view(batch, seq, 3, self.h, width // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        blended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=causal)
        return self.fan_in(blended.transpose(1, 2).reshape(batch, seq, width))

    def decode(self, x: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], past: int) -> torch.Tensor:
        """One token more, in rooms that are large enough."""
        batch, seq, width = x.shape
        queries, keys, values = self.fan_out(x).view(batch, seq, 3, self.h, width // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        for row, new in zip(rows, (keys, values), strict=True):
            row[:, :, past : past + seq] = new
        blended = functional.scaled_dot_product_attention(queries, *(row[:, :, : past + seq] for row in rows))
        return self.fan_in(blended.transpose(1, 2).reshape(batch, seq, width))


def _with_gradients(run: Run) -> Run:
    def both() -> None:
        run().sum().backward()

    return both


def _without_gradients(run: Run) -> Run:
    def forward() -> Any:
        with torch.no_grad():
            return run()

    return forward


def eager(d_model: int, seq: int, batch: int, *, train: bool) -> Iterator[Point]:
    """The layer and the drop-in, plain, causal, and with weights."""
    h, name = H[d_model], "train" if train else "eval"
    wrap = _with_gradients if train else _without_gradients
    x = torch.randn(batch, seq, d_model)
    theirs = torch.nn.MultiheadAttention(d_model, h, batch_first=True).train(train)
    ours, bare = attnspec.torch.MultiHeadAttention.from_layer(theirs).train(train), Bare(d_model, h)
    dropin = attnspec.torch.MultiheadAttention(d_model, h, batch_first=True).train(train)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(seq)
    causal = {"attn_mask": mask, "is_causal": True, "need_weights": False}

    def unchecked(*, causal: bool = False) -> torch.Tensor:
        found = ours._plain(x, ours._view(), causal=causal, need_weights=False)  # noqa: SLF001
        return found[0]

    def point(mode: str, run: Run, **others: Run) -> Point:
        return Point(f"{name}{mode}", d_model, seq, batch, wrap(run), {other: wrap(one) for other, one in others.items()})

    yield point("", lambda: ours(x), torch=lambda: theirs(x, x, x, need_weights=False)[0], bare=lambda: bare(x), unchecked=unchecked)
    yield point(
        ", causal", lambda: ours(x, causal=True), torch=lambda: theirs(x, x, x, **causal)[0],
        bare=lambda: bare(x, causal=True), unchecked=lambda: unchecked(causal=True),
    )  # fmt: skip
    yield point(", drop-in", lambda: dropin(x, x, x, need_weights=False)[0], torch=lambda: theirs(x, x, x, need_weights=False)[0])
    if seq * seq * batch * h <= 1 << 27:  # the weights of the others are left out: gigabytes
        yield point(", weights", lambda: ours(x, need="weights")[0], torch=lambda: theirs(x, x, x, average_attn_weights=False)[0])
        yield point(", drop-in with weights", lambda: dropin(x, x, x)[0], torch=lambda: theirs(x, x, x)[0])


def compiled(d_model: int, seq: int, batch: int) -> Iterator[Point]:
    """The layer under torch.compile, forward, and forward and backward."""
    h, x = H[d_model], torch.randn(batch, seq, d_model)
    for train, wrap in ((False, _without_gradients), (True, _with_gradients)):
        torch.compiler.reset()
        theirs = torch.nn.MultiheadAttention(d_model, h, batch_first=True).train(train)
        ours, bare = attnspec.torch.MultiHeadAttention.from_layer(theirs).train(train), Bare(d_model, h)
        fast, fast_theirs, fast_bare = (torch.compile(module, fullgraph=True) for module in (ours, theirs, bare))
        others = {"torch": wrap(lambda m=fast_theirs: m(x, x, x, need_weights=False)[0]), "bare": wrap(lambda m=fast_bare: m(x))}
        yield Point(f"compiled {'train' if train else 'eval'}", d_model, seq, batch, wrap(lambda m=fast: m(x)), others)


def decoding(d_model: int, past: int, batch: int) -> Iterator[Point]:
    """One token more, with a cache."""
    h, x = H[d_model], torch.randn(batch, 1, d_model)
    bare, ours = Bare(d_model, h).eval(), attnspec.torch.MultiHeadAttention(d_model, h).eval()
    rows = tuple(torch.randn(batch, h, past + 1, d_model // h) for _ in "kv")
    numpy = attnspec.numpy.MultiHeadAttention.from_layer(ours).eval()
    with torch.no_grad():
        _, cache = ours(torch.randn(batch, past, d_model), cache=ours.new_cache(batch=batch, room=past + 1))
    _, cache_numpy = numpy(
        np.random.default_rng(0).normal(size=(batch, past, d_model)).astype("float32"), cache=numpy.new_cache(batch=batch, room=past + 1)
    )

    def step() -> Any:
        cache._room.taken = past  # noqa: SLF001  # the same step again, not a branch that would copy
        return ours(x, cache=cache)

    def unchecked() -> Any:
        cache._room.taken = past  # noqa: SLF001
        return ours._run(x, ours._view(), {"cache": cache}, None, None)  # noqa: SLF001

    def step_numpy() -> Any:
        cache_numpy._room.taken = past  # noqa: SLF001
        return numpy(x.numpy(), cache=cache_numpy)

    others = {"bare": _without_gradients(lambda: bare.decode(x, rows, past)), "unchecked": _without_gradients(unchecked)}
    yield Point("decode", d_model, past, batch, _without_gradients(step), others)
    yield Point("numpy decode", d_model, past, batch, step_numpy, {"bare": others["bare"]}, rest=REST)


def with_numpy(d_model: int, seq: int, batch: int) -> Iterator[Point]:
    """The layer of NumPy beside fused PyTorch and onnxruntime."""
    import onnxruntime

    theirs = attnspec.torch.MultiHeadAttention(d_model, H[d_model]).eval()
    layer, bare, x = (
        attnspec.numpy.MultiHeadAttention.from_layer(theirs).eval(),
        Bare(d_model, H[d_model]).eval(),
        torch.randn(batch, seq, d_model),
    )
    others = {"bare": _without_gradients(lambda: bare(x))}
    if batch * H[d_model] * seq * seq <= 1 << 29:  # onnxruntime keeps the scores
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(theirs, (x,), f"{folder}/layer.onnx", dynamo=True, verbose=False)
            settings = onnxruntime.SessionOptions()
            settings.intra_op_num_threads = torch.get_num_threads()
            settings.log_severity_level = 3
            session = onnxruntime.InferenceSession(f"{folder}/layer.onnx", settings, providers=["CPUExecutionProvider"])
        entry = session.get_inputs()[0].name
        others["onnxruntime"] = lambda: session.run(None, {entry: x.numpy()})
    yield Point("numpy", d_model, seq, batch, lambda: layer(x.numpy()), others, rest=REST)
    causal = {"bare": _without_gradients(lambda: bare(x, causal=True))}
    yield Point("numpy, causal", d_model, seq, batch, lambda: layer(x.numpy(), causal=True), causal, rest=REST)


def memory(seqs: tuple[int, ...]) -> list[dict[str, float]]:
    """How much memory the layer of NumPy takes beyond its arguments and parameters, in a process of its own."""
    code = (
        "import sys, re, numpy as np; from attnspec.numpy import MultiHeadAttention\n"
        "def peak(): return int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read()).group(1))\n"
        "layer = MultiHeadAttention(512, 8); x = np.ones((1, int(sys.argv[1]), 512), np.float32); layer(x[:, :8])\n"
        "before = peak(); layer(x); print((peak() - before) / 1024)"
    )
    import subprocess
    import sys

    measured = ((seq, subprocess.run([sys.executable, "-c", code, str(seq)], check=True, capture_output=True, text=True)) for seq in seqs)  # noqa: S603
    return [{"seq": seq, "mebibytes": round(float(done.stdout), 1)} for seq, done in measured]


def points(modes: set[str], widths: list[int], seqs: list[int], most: float) -> Iterator[Point]:
    """The grid."""
    for d_model, seq, batch in itertools.product(widths, seqs, BATCHES):
        if batch * seq * (4 * d_model**2 + 2 * seq * d_model) > most:
            continue
        if "eval" in modes:
            yield from eager(d_model, seq, batch, train=False)
        if "train" in modes:
            yield from eager(d_model, seq, batch, train=True)
        if "compiled" in modes:
            yield from compiled(d_model, seq, batch)
        if "numpy" in modes:
            yield from with_numpy(d_model, seq, batch)
    for d_model, past, batch in itertools.product(widths, seqs, BATCHES):
        if "decode" in modes:
            yield from decoding(d_model, past, batch)


def show(console: Console, found: list[dict[str, Any]]) -> None:
    """Print the ratios."""
    table = Table("mode", "d_model", "seq or cache", "batch", "us", "/ torch", "/ bare", "us over bare", "/ unchecked", "/ onnxruntime")
    for line in found:
        ratios, times = line["ratios"], line["microseconds"]
        over = f"{times['ours'] - times['bare']:.1f}" if "bare" in times else ""
        shown = [f"{ratios[name]:.3f}" if name in ratios else "" for name in ("torch", "bare", "unchecked", "onnxruntime")]
        table.add_row(
            line["mode"], *(str(line[name]) for name in ("d_model", "seq", "batch")), f"{times['ours']:.1f}", *shown[:2], over, *shown[2:]
        )
    console.print(table)


def report(found: list[dict[str, Any]], curve: list[dict[str, float]], earlier: dict[str, Any]) -> dict[str, Any]:
    """What is written down: where, when, with what, and all points, the new ones in the place of the old."""
    where = ("mode", "d_model", "seq", "batch")
    points = {tuple(line[name] for name in where): line for line in (*earlier["points"], *found)}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "python": platform.python_version(), "processor": platform.machine(), "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {name: importlib.metadata.version(name) for name in ("attnspec", "numpy", "torch", "onnxruntime")},
        "points": list(points.values()),
        "memory": curve or earlier["memory"],
    }  # fmt: skip


def main() -> None:
    """Measure the grid, print it, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="eval,train,compiled,decode,numpy,memory")
    parser.add_argument("--widths", default="64,512,1024")
    parser.add_argument("--seqs", default=",".join(map(str, SEQS)))
    parser.add_argument("--most", type=float, default=math.inf, help="leave out points of more multiply-adds")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path, help="where to write it down; what is there and was not measured again stays")
    arguments = parser.parse_args()
    modes, console = set(arguments.only.split(",")), Console(width=140)
    found = []
    torch.manual_seed(0)
    CACHED.signature  # noqa: B018  # loaded before anything is timed
    widths, seqs = ([int(size) for size in asked.split(",")] for asked in (arguments.widths, arguments.seqs))
    for point in points(modes, widths, seqs, arguments.most):
        point.measure(arguments.seconds)
        found.append(point.to_dict())
        console.print(json.dumps(found[-1]), soft_wrap=True)
    curve = memory((1024, 4096, 16384)) if "memory" in modes else []
    show(console, found)
    for line in curve:
        console.print(f"numpy, d_model 512, h 8, seq {line['seq']}: {line['mebibytes']} MiB beyond arguments and parameters")
    for name in ("torch", "bare", "onnxruntime"):
        ratios = [line["ratios"][name] for line in found if name in line["ratios"]]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            above = sum(ratio > 1 for ratio in ratios)
            console.print(f"/ {name}: {len(ratios)} points, geometric mean {mean:.3f}, largest {max(ratios):.3f}, above 1.0: {above}")
    if arguments.json:
        earlier = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"points": [], "memory": []}
        arguments.json.write_text(json.dumps(report(found, curve, earlier), indent=1) + "\n")


if __name__ == "__main__":
    main()
