"""Isolation: an implementation is examined in a process of its own, with limits of time and memory."""

import base64
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from typing import IO, Any, Literal

from ..errors import ConfigError
from .examination import Progress
from .job import Job
from .report import Finding, Report

SECONDS = 300.0
MEMORY_MB = 4096
_TICK = 0.05
_STUCK = 0.25
"""Without progress for this share of the time, it hangs; else the time was too short."""


@dataclass(eq=False)
class _Child:
    """The child process, and what it has said so far."""

    process: subprocess.Popen[bytes]
    noise: IO[bytes]
    progress: Progress | None
    said: dict[str, Any] = field(default_factory=dict)
    stage: str = "import"
    moved: float = field(default_factory=time.monotonic)

    def listen(self) -> None:
        """Take in what it says until it ends."""
        for line in self.process.stdout or ():
            with suppress(ValueError):  # a line that was cut off
                what, *values = json.loads(line)
                if what == "progress":
                    self.stage, self.moved = values[0], time.monotonic()
                    if self.progress is not None:
                        self.progress(*values)
                else:
                    self.said[what] = values[0] if values else True

    def wait(self, seconds: float, memory_mb: int) -> Literal["ended", "time", "memory"]:
        """Wait until it ends, or has taken too much; then stop it."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            late, large = time.monotonic() > end, _resident_mb(self.process.pid) > memory_mb
            if late or large:
                self._point_out()
                self.process.kill()
                self.process.wait()
                return "memory" if large else "time"
            time.sleep(_TICK)
        return "ended"

    def _point_out(self) -> None:
        """Let it write down where it is."""
        if os.name == "posix":
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(5 * _TICK)

    def stop_others(self) -> bool:
        """Stop what the process started and left running; tell whether there was something."""
        if os.name != "posix":
            return False
        for _ in range(10):  # what is just ending is not left
            try:
                os.killpg(self.process.pid, 0)
            except (ProcessLookupError, PermissionError):
                return False
            time.sleep(_TICK)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return True

    def written(self, start: int = 0) -> str:
        """What it wrote to its standard output and error."""
        self.noise.seek(max(start, self.noise.seek(0, os.SEEK_END) - 100_000))
        return self.noise.read().decode(errors="replace").strip()


def run_isolated(job: Job, /, *, seconds: float = SECONDS, memory_mb: int = MEMORY_MB, progress: Progress | None = None) -> Report:
    """Do a job in a process of its own.

    Args:
        job: the job.
        seconds: how long it may take.
        memory_mb: how much memory it may have; watched on Linux only.
        progress: is told what is being done, how much of it is done, and how much there is.

    Returns:
        The report; where the implementation crashes, hangs, exits or takes too much memory, it is about that.

    Raises:
        ConfigError: the implementation cannot be imported or made, it is said wrongly how to call it, or the job holds
            something that cannot be handed to another process.
    """
    try:
        message = pickle.dumps(job)
    except Exception as error:
        raise ConfigError(f"isolation: the settings cannot be handed to another process ({error}); give call= as text.") from error
    start = time.monotonic()
    with TemporaryFile() as noise:
        child = _Child(_start(noise), noise, progress)
        listener = Thread(target=child.listen, daemon=True)
        listener.start()
        with child.process, suppress(BrokenPipeError):
            if child.process.stdin is not None:
                child.process.stdin.write(message)
                child.process.stdin.close()
            ended = child.wait(seconds, memory_mb)
            left = child.stop_others()
            listener.join(timeout=1)
        report = _concluded(job, child, ended, seconds, memory_mb)
        notes = _notes(child, left=left) if "report" in child.said else []
        return replace(report, findings=(*report.findings, *notes), seconds=report.seconds or time.monotonic() - start)


def _start(noise: IO[bytes]) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", "attnspec.oracle.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=noise,
        start_new_session=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def _concluded(job: Job, child: _Child, ended: str, seconds: float, memory_mb: int) -> Report:
    """What follows from how it ended."""
    said, code = child.said, child.process.returncode
    if "report" in said:
        report: Report = pickle.loads(base64.b64decode(said["report"]))  # from the child  # noqa: S301  # the child wrote it
        return report
    if "misuse" in said:
        raise ConfigError(said["misuse"])
    if "defect" in said:
        return _failed(
            job, "defect", f"Nothing could be decided: the examination itself failed with {said['defect']}", child, decided=False
        )
    if ended == "memory" or "memory" in said:
        return _failed(job, "memory", f"It takes too much memory; it was given {memory_mb} MB.", child)
    if ended == "time":
        return _out_of_time(job, child, seconds)
    if code < 0:
        return _failed(job, "crash", f"It crashes the process, with {signal.Signals(-code).name}.", child)
    return _failed(job, "exit", f"It ends the process, with {said.get('exit', f'the exit status {code}')}.", child)


def _out_of_time(job: Job, child: _Child, seconds: float) -> Report:
    if (still := time.monotonic() - child.moved) >= _STUCK * seconds:
        return _failed(job, "hang", f"It hangs: nothing has happened for {still:.3g} s.", child)
    text = f"Nothing could be decided: {seconds:.3g} s were not enough. Give it more time, or ask for less with effort quick."
    return _failed(job, "time", text, child, decided=False)


def _failed(job: Job, kind: str, sentence: str, child: _Child, *, decided: bool = True) -> Report:
    evidence = f"while it was busy with: {child.stage}{_place(child.written())}"
    finding = Finding(kind, sentence, "wrong" if decided else "note", evidence)
    return Report(
        job.target, "deviates" if decided else "undecided", sentence, (finding,), seed=int(job.settings.get("seed", 0))
    )  # fmt: skip


def _place(written: str) -> str:
    """Read from a traceback where the implementation was."""
    _, found, trace = written.rpartition("(most recent call first):")
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', trace) if found else []
    libraries = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[1]}
    own = [frame for frame in frames if not libraries & set(Path(frame[0]).parents)]
    return next((f"; in {function}, line {line} of {path}" for path, line, function in own or frames), "")


def _notes(child: _Child, *, left: bool) -> list[Finding]:
    notes = []
    if "threads" in child.said:
        notes.append(Finding("threads", f"It leaves threads behind: {', '.join(child.said['threads'])}.", "note"))
    if left:
        notes.append(Finding("processes", "It leaves processes behind.", "note"))
    if noise := child.written(child.said.get("made", 0)):
        notes.append(Finding("noise", f"It prints while it works, first: {noise.splitlines()[0][:80]}", "note", f"{len(noise)} letters"))
    return notes


def _resident_mb(pid: int) -> float:
    """How much memory a process has; 0 where nobody tells."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
