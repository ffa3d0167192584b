"""The layer whose heads are split among two processes, which talk over gloo: it is the layer in one piece."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch

import attnspec

PROGRAM = Path(ranks.__file__)
SECONDS = 240


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each rank found, by task; the processes are ended if they hang."""
    folder = tmp_path_factory.mktemp("ranks")
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(ranks.RANKS)]
    processes = [
        subprocess.Popen([sys.executable, PROGRAM, str(rank), folder], stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    try:
        for process in processes:
            process.wait(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pass
    found = []
    for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
        process.kill()
        process.wait()
        log.seek(0)
        report = folder / f"{rank}.jsonl"
        lines = dict(map(json.loads, report.read_text().splitlines())) if report.exists() else {}
        found.append((lines, log.read()[-3000:]))
        log.close()
    return found


def require_passed(reports, task):
    for rank, (report, log) in enumerate(reports):
        assert task in report, f"rank {rank} did not come so far:\n{log}"
        assert not report[task], f"rank {rank}: {report[task]}"


@pytest.mark.parametrize(("setup", "case"), ranks.COMPARED)
def test_a_step_of_training_is_that_of_one_piece(reports, setup, case):
    """Output, weights, every gradient, and the state after a step of AdamW."""
    require_passed(reports, f"{setup}: {case}")


@pytest.mark.parametrize("scene", ranks.SCENES)
def test_split(reports, scene):
    require_passed(reports, scene)


def test_the_heads_of_a_rank_are_as_wide_as_before():
    whole = attnspec.Heads(d_model=24, h=8, h_kv=4, d_k=5, d_v=3, d_key_in=7, d_value_in=11)
    assert whole.split(4) == attnspec.Heads(d_model=24, h=2, h_kv=1, d_k=5, d_v=3, d_key_in=7, d_value_in=11)
    assert whole.split(1) == whole
    assert whole.split(4, name="h") == whole.split(4)  # what ranks are called is no size


@pytest.mark.parametrize(
    ("h", "h_kv", "tp", "said"),
    [
        (8, 8, 3, "Heads: tp=3 does not divide h=8; tp=2 and tp=4 would."),
        (8, 2, 4, "Heads: tp=4 does not divide h_kv=2; tp=2 would."),
        (8, 2, 3, "Heads: tp=3 does not divide h=8; tp=2 would."),
        (8, 8, 0, "Heads: tp=0 must be a positive whole number."),
        (8, 8, True, "Heads: tp=True must be a positive whole number."),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(h, h_kv, tp, said):
    with pytest.raises(attnspec.ConfigError) as error:
        attnspec.Heads(d_model=64, h=h, h_kv=h_kv).split(tp)
    assert str(error.value) == said


def test_a_layer_can_be_copied_and_pickled():
    layer = ranks.CASES["a gain for all heads"].layer()
    x = ranks.draw(2, 3, ranks.D_MODEL)
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301  # of our own making
        assert torch.equal(made(x), layer(x))
