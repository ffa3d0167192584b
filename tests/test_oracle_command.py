"""The commands `check` and `faults`: what is written becomes what is meant, and the exit status says how it ended."""

import contextlib
import inspect
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnspec import Heads, Policy, Rotation
from attnspec.errors import ConfigError
from attnspec.oracle.faults import KINDS
from attnspec.oracle.settings import gathered, job_of
from attnspec.oracle.written import arguments_of, function_of, layout_of, named_arguments, target_of

COMMAND = Path(sys.executable).with_name("attnspec")
MINE = """
import numpy as np

def right(queries, keys, values, *, causal=False):
    scores = queries @ np.swapaxes(keys, -1, -2) * queries.shape[-1] ** -0.5
    if causal:
        seen = np.tri(*scores.shape[-2:], dtype=bool)
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ values).astype(queries.dtype)

def unscaled(queries, keys, values, *, causal=False):
    return right(queries * queries.shape[-1] ** 0.5, keys, values, causal=causal)

def transposed(queries, keys, values):
    return np.swapaxes(right(*(np.swapaxes(x, 1, 2) for x in (queries, keys, values))), 1, 2)

class Attend:
    def __init__(self, factor, *, power=1):
        self.factor = factor**power

    def __call__(self, queries, keys, values):
        return right(queries * self.factor, keys, values)
"""
QUICK = ("--effort", "quick")


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments, columns=80):
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"}
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("where", [[], ["--in-process"]])
def test_the_exit_status_says_how_it_ended(place, where):
    right, wrong = run("check", "mine:right", *QUICK, *where), run("check", "mine:unscaled", *QUICK, *where)
    assert (right.returncode, right.stderr) == (0, "")
    assert right.stdout.startswith("right conforms. It is multi-head attention")
    assert (wrong.returncode, wrong.stderr) == (1, "")
    assert wrong.stdout.startswith("unscaled deviates. It is multi-head attention, but")
    assert "scale" in wrong.stdout.splitlines()[0]


def test_what_could_not_be_decided_has_a_status_of_its_own(place):
    with (place / "mine.py").open("a") as file:
        file.write("\ndef slow(q, k, v, causal=False):\n    import time; time.sleep(0.06)\n    return right(q, k, v)\n")
    assert run("check", "mine:slow", "--effort", "thorough", "--timeout", "9").returncode == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere_at_all:x"], "nowhere_at_all cannot be imported"),
        (["mine"], "'mine' is no target"),
        (["mine:absent"], "there is no absent in mine"),
        (["mine:Attend"], "missing 1 required positional argument"),
        (["mine:Attend", "--args", "1,,"], "is no Python"),
        (["mine:right", "--call", "m(queries, keys, values, what)"], "nobody knows what 'what' stands for"),
        (["mine:right", "--mask", "perhaps"], "it is one of keep, drop"),
        (["mine:right", "--heads", "24, 4"], "needs a name before each value"),
        (["mine:right", "--heads", "d_model=24, h=7"], "h=7 does not divide d_model=24"),
        (["mine:right", "--policy", "no_such=1"], "no_such"),
        (["mine:right", "--layout", "absent.toml"], "cannot be read"),
        (["mine:right", "--attention", "--cache"], "exclude each other"),
        (["mine:right", "--no-such-option"], "No such option"),
    ],
)
def test_wrong_use_is_one_sentence_and_status_2(place, arguments, said):
    done = run("check", *arguments, columns=200)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_data_and_a_page_come_from_the_same_report(place):
    done = run("check", "mine:unscaled", *QUICK, "--json", "--seed", "3", "--report", "report.html")
    data = json.loads(done.stdout)
    assert (done.returncode, data["verdict"], data["seed"]) == (1, "deviates", 3)
    assert data["counterexample"]["expected"] != data["counterexample"]["got"]
    assert data["sentence"] in (place / "report.html").read_text()


def test_how_to_make_and_to_call_it_can_be_said(place):
    assert run("check", "mine:transposed", *QUICK, "--order", "bshd").returncode == 0
    assert run("check", "mine:transposed", *QUICK).returncode == 1
    assert run("check", "mine:Attend", "--args", "1.0, power=2", "--attention", *QUICK).returncode == 0
    assert run("check", "mine:Attend", "--args", "2.0, power=2", "--attention", *QUICK).returncode == 1
    swapped = "m(queries, values, keys)"
    assert run("check", "mine:right", "--call", swapped, *QUICK).returncode == 1


def test_settings_come_from_pyproject_and_the_command_line_has_the_last_word(place):
    (place / "pyproject.toml").write_text(
        '[tool.attnspec]\neffort = "quick"\nin-process = true\n'
        '[tool.attnspec.subjects.mine]\ntarget = "mine:transposed"\norder = "bshd"\nattention = true\n'
    )
    assert run("check", "mine").returncode == 0
    assert run("check", "mine", "--order", "bhsd").returncode == 1
    found = gathered("mine", {"order": None, "seed": 5}, directory=place)
    assert found == {"target": "mine:transposed", "effort": "quick", "in_process": True, "order": "bshd", "attention": True, "seed": 5}
    with pytest.raises(ConfigError, match=r"subjects of pyproject[.]toml are mine"):
        gathered("yours", {}, directory=place)
    (place / "pyproject.toml").write_text("[tool.attnspec]\nefort = 1\n")
    with pytest.raises(ConfigError, match="'efort', which is not known"):
        gathered("mine:right", {}, directory=place)


def test_a_bar_is_shown_where_the_standard_error_is_a_terminal(place):
    mine, theirs = pty.openpty()
    with subprocess.Popen([COMMAND, "check", "mine:right", *QUICK], stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # which is how a terminal says that nobody writes to it any more
            while chunk := os.read(mine, 4096):
                shown += chunk
        said = process.stdout.read()
    assert process.returncode == 0
    assert "conforms" in said
    assert "━" in shown.decode()


def test_settings_become_what_the_oracle_takes(place):
    (place / "layout.toml").write_text('w_q = ["q.weight", "(h d_k) d_model"]\n')
    job = job_of({
        "target": "a:b", "heads": "d_model=24, h=4", "layout": "layout.toml", "options": "causal, scale", "effort": "thorough",
        "policy": 'empty_row="any", rotation=Rotation(base=5.0)', "mask_axes": "batch seq_k; batch seq_q seq_k",
        "args": "24", "causal": True,
    })  # fmt: skip
    assert (job.target, job.entry, job.arguments) == ("a:b", None, "24")
    assert job.settings == {
        "heads": Heads(d_model=24, h=4), "layout": {"w_q": ("q.weight", "(h d_k) d_model")}, "options": ("causal", "scale"),
        "policy": Policy(empty_row="any", rotation=Rotation(base=5.0)), "mask_axes": ("batch seq_k", "batch seq_q seq_k"),
        "causal": True, "effort": "thorough",
    }  # fmt: skip
    assert job_of({"target": "a:b", "properties": True, "heads": "d_model=24", "effort": "quick"}).settings == {"d_model": 24}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("m(x, mask=keep)", "m x keep"),
        ("m(x, mask=keep[:, None] if keep is not None else None)[0]", "m x keep"),
        ("m(mask=padding, v=values, q=queries, k=keys)", "m queries keys values padding"),
        ("f(q, k, v, bias=np.zeros(3) if bias is None else bias)", "f q k v bias"),
        ("m(*[part for part in (q, k, v)], len(q))", "m q k v"),
        ("m.forward(x)", "m x"),
    ],
)
def test_a_call_is_a_function_of_the_names_in_it(text, names):
    assert list(inspect.signature(function_of(text)).parameters) == names.split()


def test_a_call_does_what_it_says():
    call = function_of("f(k, q, v, np.float64(scale))")
    assert call(lambda *given: given, "q", "k", "v", 2) == ("k", "q", "v", 2.0)
    for wrong in ("x + 1", "m(", "m(x, unknown)", "lambda: 3"):
        with pytest.raises(ConfigError):
            function_of(wrong)


def test_arguments_are_what_python_writes_out_and_names_in_libraries():
    import torch

    assert arguments_of("24, -4.5, 'a', (1, 2), None, dtype=torch.float64, flag=True") == (
        [24, -4.5, "a", (1, 2), None],
        {"dtype": torch.float64, "flag": True},
    )
    assert arguments_of("") == ([], {})
    assert named_arguments({"h": 4}, option="--heads") == {"h": 4}
    for wrong in ("open('x')", "__import__('os')", "torch.zeros(3)", "os.environ", "*x", "a b"):
        with pytest.raises(ConfigError):
            arguments_of(wrong)


def test_a_layout_is_a_name_a_file_or_a_table(tmp_path):
    assert layout_of("separate") == "separate"
    lines = {"w_q": ["q", "(h d_k) d_model"]}
    assert layout_of(lines) == {"w_q": ("q", "(h d_k) d_model")}
    (tmp_path / "a.toml").write_text('[layout]\nw_q = ["q", "(h d_k) d_model"]\n')
    assert layout_of(str(tmp_path / "a.toml")) == {"w_q": ("q", "(h d_k) d_model")}
    with pytest.raises(ConfigError, match="the layout's line w_q"):
        layout_of({"w_q": "q"})


def test_a_target_may_lie_deeper():
    assert target_of("os:path.join") is os.path.join


def test_faults_lists_every_kind_legibly():
    done = run("faults")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [name for name in KINDS if f" {name} " not in done.stdout] == []


def test_faults_explains_one_kind():
    done = run("faults", "causal_alignment")
    text = " ".join(done.stdout.split())
    kind = KINDS["causal_alignment"]
    assert done.returncode == 0
    assert kind.meaning in text
    assert kind.witness in text
    assert all(thread in text for thread in kind.threads)
    assert json.loads(run("faults", "causal_alignment", "--json").stdout)[0]["threads"] == list(kind.threads)
    assert "No public thread is known of" in run("faults", "inputs_modified").stdout
    unknown = run("faults", "causal_alignement")
    assert unknown.returncode == 2
    assert "did you mean causal_alignment?" in unknown.stderr


def test_the_kinds_are_complete():
    assert len(KINDS) == 48
    for name, kind in KINDS.items():
        assert name == kind.name
        assert re.fullmatch(r"[A-Z].*[.]", kind.meaning)
        assert kind.witness
        assert kind.threads
        assert len(set(kind.threads)) == len(kind.threads)
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in kind.threads)
