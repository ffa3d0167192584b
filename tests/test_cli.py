"""The command line: what it prints, that it is legible without colour at 80 columns, and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import attnspec

COMMAND = Path(sys.executable).with_name("attnspec")


def run(*arguments, columns=80):
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"}
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False, env=environment)


def test_shapes_prints_every_array_and_step_at_the_sizes_given():
    done = run("shapes", "--d-model", "512", "--h", "8", "--batch", "2", "--seq", "6")
    assert done.returncode == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "w_q h=8 d_model=512 d_k=64" in lines
    assert "project_queries batch=2 h=8 seq_q=6 d_k=64 263 k 3.15 M 24 KiB" in lines
    assert "score batch=2 h=8 seq_q=6 seq_k=6 36.9 k 2.25 KiB" in lines
    assert "mix batch=2 seq_q=6 d_model=512 263 k 3.15 M 24 KiB" in lines
    assert "total 8 heads of width 64 1 head of width 512 ratio" in lines
    assert "parameters 1,050,624 1,050,624 1.000" in lines
    assert "multiply-adds 12,656,640 12,656,640 1.000" in lines
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("columns", [80, 120])
def test_shapes_stays_legible_at_large_sizes(columns):
    done = run("shapes", "--h", "8", "--h-kv", "2", "--batch", "64", "--seq", "4096", "--seq-k", "8192", columns=columns)
    assert max(map(len, done.stdout.splitlines())) <= columns
    assert "1.1 T" in done.stdout
    assert "64 GiB" in done.stdout
    assert "…" not in done.stdout


def test_shapes_as_data_is_the_ledger():
    done = run("shapes", "--d-model", "24", "--h", "4", "--h-kv", "2", "--d-k", "5", "--d-v", "3", "--seq", "7", "--seq-k", "11", "--json")
    data = json.loads(done.stdout)
    heads = attnspec.Heads(d_model=24, h=4, h_kv=2, d_k=5, d_v=3)
    books = attnspec.ledger(heads, batch=2, seq=7, seq_k=11)
    assert data["totals"] == books.totals()
    assert [line["step"] for line in data["steps"]] == list(books)
    assert data["steps"][0]["result"]["axes"] == ["batch", "h", "seq_q", "d_k"]
    assert data["one_full_width_head"] == attnspec.ledger(heads.merged(), batch=2, seq=7, seq_k=11).totals()


def test_shapes_of_a_rank_are_its_shares_and_what_it_sends():
    done = run("shapes", "--d-model", "512", "--h", "8", "--h-kv", "4", "--tp", "4", "--seq-k", "9")
    assert done.returncode == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "Every array of one of 4 ranks in float32; a step's line is what it gives" in lines
    assert "w_q h=2 d_model=512 d_k=64" in lines
    assert "project_keys batch=2 h_kv=1 seq_k=9 d_k=64 32.8 k 590 k 4.5 KiB" in lines
    assert "w_o h*d_v=128 d_model=512" in lines
    assert "multiply-adds 2,780,160 11,120,640 0.250" in lines
    sent = lines[lines.index("What crosses the network, by an all-reduce each") :]
    assert [line for line in sent if "KiB" in line] == [
        "output batch=2 seq_q=6 d_model=512 24 KiB 36 KiB",
        "gradient of x batch=2 seq_q=6 d_model=512 24 KiB 36 KiB",
        "gradient of context batch=2 seq_k=9 d_key_in=512 36 KiB 54 KiB",
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_shapes_of_a_rank_as_data_are_its_ledger():
    sizes = ("--d-model", "24", "--h", "4", "--h-kv", "2", "--d-k", "5", "--d-v", "3", "--seq", "7")
    data, alone = (json.loads(run("shapes", *sizes, "--tp", tp, "--json").stdout) for tp in ("2", "1"))
    whole, share = (attnspec.Heads(d_model=24, h=h, h_kv=h // 2, d_k=5, d_v=3) for h in (4, 2))
    assert data["steps"] == json.loads(json.dumps(attnspec.ledger(share, batch=2, seq=7).to_dict()))["steps"]
    assert data["whole_layer"] == attnspec.ledger(whole, batch=2, seq=7).totals()
    assert (data["heads"]["h"], data["tp"]) == (4, 2)
    assert [(one["array"], one["bytes"], one["sent"]) for one in data["network"]] == [
        ("output", 2 * 7 * 24 * 4, 2 * 7 * 24 * 4),
        ("gradient of x", 2 * 7 * 24 * 4, 2 * 7 * 24 * 4),
    ]
    assert [one["sent"] for one in alone["network"]] == [0, 0]


def test_ranks_that_do_not_divide_the_heads_are_one_sentence_and_status_2():
    done = run("shapes", "--tp", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "attnspec: Heads: tp=3 does not divide h=8; tp=2 and tp=4 would.\n"


def test_an_impossible_setting_is_one_sentence_and_status_2():
    done = run("shapes", "--h", "7")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "attnspec: Heads: h=7 does not divide d_model=512; h=4 and h=8 would, or give d_k.\n"


def test_heads_shows_what_a_real_head_looks_at():
    done = run("heads", "--layer", "0", "--head", "2")
    assert done.returncode == 0
    assert "Layer 0, head 2: previous word" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    refused = run("heads", "a dog")
    assert refused.returncode == 2
    assert "--model DIR runs any text" in refused.stderr


def test_help_names_the_commands():
    done = run("--help")
    assert done.returncode == 0
    assert "shapes" in done.stdout
    assert "heads" in done.stdout
