"""Isolation: what an implementation does to its process is found out, and does not reach the one that asks."""

import subprocess
import sys
import time

import pytest

from attnspec.errors import ConfigError
from attnspec.oracle.isolation import run_isolated
from attnspec.oracle.job import Job

HAZARDS = """
import ctypes, os, subprocess, sys, threading, time
import numpy as np

def right(queries, keys, values):
    scores = queries @ np.swapaxes(keys, -1, -2) * queries.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ values).astype(queries.dtype)

def crashes(queries, keys, values):
    ctypes.string_at(0)

def hangs(queries, keys, values):
    time.sleep(1000)

def dawdles(queries, keys, values, keep=None):
    time.sleep(0.06)
    return right(queries, keys, values)

def leaves(queries, keys, values):
    os._exit(7)

def exits(queries, keys, values):
    sys.exit(3)

def hoards(queries, keys, values, hoard=[]):
    while True:
        hoard.append(np.ones(5_000_000))

def threads(queries, keys, values):
    if threading.active_count() == 1:
        threading.Thread(target=time.sleep, args=(1000,), name="left-over").start()
    return right(queries, keys, values)

def spawns(queries, keys, values, known=[]):
    if not known:
        known.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]))
    return right(queries, keys, values)

def prints(queries, keys, values):
    print("look at me", flush=True)
    os.write(2, b"and me\\n")
    return right(queries, keys, values)

class Fails:
    def __init__(self, width):
        raise ValueError("no luck")
"""


@pytest.fixture(autouse=True)
def hazards(tmp_path, monkeypatch):
    (tmp_path / "hazards.py").write_text(HAZARDS)
    (tmp_path / "unimportable.py").write_text("import sys\nsys.exit(5)\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def examine(name, *, seconds=60, memory_mb=4096, effort="quick", **more):
    return run_isolated(Job(f"hazards:{name}", settings={"effort": effort}), seconds=seconds, memory_mb=memory_mb, **more)


def test_what_is_right_conforms_and_nothing_is_noted():
    told = []
    report = examine("right", progress=lambda *progress: told.append(progress))
    assert report.verdict == "conforms"
    assert not {"noise", "threads", "processes"} & {finding.kind for finding in report.findings}
    assert {"import", "values", "properties"} <= {what for what, _, _ in told}
    assert "hazards" not in sys.modules


@pytest.mark.parametrize(
    ("name", "kind", "said", "place"),
    [
        ("crashes", "crash", "SIGSEGV", "first calls; in crashes, line 11 of"),
        ("leaves", "exit", "exit status 7", "while it was busy with: first calls"),
    ],
)
def test_what_ends_its_process_deviates(name, kind, said, place):
    report = examine(name)
    assert (report.verdict, report.kind) == ("deviates", kind)
    assert said in report.sentence
    assert place in report.findings[0].evidence


def test_what_calls_exit_deviates():
    report = examine("exits")
    assert report.verdict == "deviates"
    assert "exit" in report.sentence.lower()


def test_what_hangs_is_stopped_and_it_is_said_where(hazards):
    report = examine("hangs", seconds=8)
    assert (report.verdict, report.kind) == ("deviates", "hang")
    line = HAZARDS.splitlines().index("    time.sleep(1000)") + 1
    assert f"in hangs, line {line} of {hazards / 'hazards.py'}" in report.findings[0].evidence
    assert report.seconds < 20


def test_what_is_only_slow_is_not_said_to_hang():
    report = examine("dawdles", seconds=10, effort="thorough")
    assert (report.verdict, report.kind) == ("undecided", None)
    assert "10 s were not enough" in report.sentence


def test_what_takes_too_much_memory_is_stopped():
    report = examine("hoards", memory_mb=1000)
    assert (report.verdict, report.kind) == ("deviates", "memory")
    assert "in hoards" in report.findings[0].evidence


def test_noise_does_not_reach_the_caller(capfd):
    report = examine("prints")
    assert report.verdict == "conforms"
    [note] = [finding for finding in report.findings if finding.kind == "noise"]
    assert "look at me" in note.sentence
    assert capfd.readouterr() == ("", "")


def test_threads_that_are_left_are_named_and_do_not_hold_it_up():
    start = time.monotonic()
    report = examine("threads", seconds=30)
    assert time.monotonic() - start < 30
    [note] = [finding for finding in report.findings if finding.kind == "threads"]
    assert (report.verdict, note.level) == ("conforms", "note")
    assert "left-over" in note.sentence


def test_processes_that_are_left_are_ended():
    report = examine("spawns")
    assert "processes" in {finding.kind for finding in report.findings}
    running = subprocess.run(["/usr/bin/ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "time.sleep(1000)" not in running


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (Job("nowhere_to_be_found:x"), "nowhere_to_be_found cannot be imported: ModuleNotFoundError"),
        (Job("unimportable:x"), "unimportable cannot be imported: SystemExit: 5"),
        (Job("broken:x"), "broken cannot be imported: ZeroDivisionError"),
        (Job("hazards:nothing"), "there is no nothing in hazards"),
        (Job("hazards"), "write it as module:attribute"),
        (Job("hazards:Fails", arguments="24"), "hazards:Fails cannot be called with (24): ValueError: no luck"),
        (Job("hazards:Fails"), "hazards:Fails cannot be called with (): TypeError"),
        (Job("hazards:right", settings={"layout": "separate"}), "check_attention: it takes no layout"),
        (Job("hazards:right", call="m(q, k, v, nonsense)"), "nobody knows what 'nonsense' stands for"),
    ],
)
def test_wrong_use_is_told_apart_from_faults(job, said):
    with pytest.raises(ConfigError) as caught:
        run_isolated(job)
    assert said in str(caught.value)


def test_what_cannot_be_handed_over_is_refused():
    with pytest.raises(ConfigError, match="cannot be handed to another process"):
        run_isolated(Job("hazards:right", settings={"call": lambda f, q, k, v: f(q, k, v)}))
