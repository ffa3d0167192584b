"""The child process in which an implementation is examined; it is told a job, and tells what became of it."""

import base64
import faulthandler
import json
import os
import pickle
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import AttnspecError
from .job import Job

Say = Callable[..., None]


def main() -> None:
    """Do the job that is on the standard input, and say line by line, as JSON, what happens."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the implementation prints goes where its errors go

    def say(what: str, *values: Any) -> None:
        lines.write(json.dumps([what, *values]) + "\n")
        lines.flush()

    faulthandler.enable()
    with suppress(AttributeError):  # Windows has no such signal
        faulthandler.register(signal.SIGUSR1)
    _do(pickle.load(sys.stdin.buffer), say)  # from the parent  # noqa: S301  # the parent wrote it
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if left:
        say("threads", left)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that are left would keep it alive


def _do(job: Job, say: Say) -> None:
    made = None
    try:
        say("progress", "import", 0, 1)
        made = job.make()
        sys.stdout.flush()
        say("made", os.fstat(2).st_size)
        say("progress", "first calls", 0, 1)
        warnings.simplefilter("ignore")  # what a library warns of is no noise of the implementation
        report = job.examine(made, lambda *progress: say("progress", *progress))
        say("report", base64.b64encode(pickle.dumps(report)).decode())
    except AttnspecError as error:
        if made is not None and (code := re.search(r"SystemExit: ?(-?\w*)", str(error))):
            say("exit", f"sys.exit({code[1]})")  # it does so whenever it is called, which looks as if it could not be called
        else:
            say("misuse", str(error))
    except MemoryError:
        say("memory")
    except SystemExit as error:
        say("exit", f"sys.exit({error.code})")
    except Exception as error:  # a defect of the examination
        say("defect", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
