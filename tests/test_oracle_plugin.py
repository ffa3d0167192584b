"""The pytest plugin: each check is a test, a failure reads well, and who does not use it does not notice it."""

import subprocess
import sys

import pytest
import torch

import attnspec.numpy
import attnspec.torch
from attnspec import oracle
from attnspec.oracle.run import CHECKS

pytest_plugins = ["pytester"]

SUBJECTS = """
import numpy as np
import pytest

def right(queries, keys, values):
    scores = queries @ np.swapaxes(keys, -1, -2) * queries.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ values).astype(queries.dtype)

def unscaled(queries, keys, values):
    return right(queries * queries.shape[-1] ** 0.5, keys, values)

attention = pytest.mark.attnspec(right, entry="check_attention", effort="quick")
"""


class WithoutCache:
    """A decoder that sees only the new tokens."""

    def __call__(self, queries, keys, values):
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def run(pytester, code, *arguments):
    pytester.makepyfile(SUBJECTS + code)
    return pytester.runpytest_inprocess("-q", "--strict-markers", *arguments)


def test_what_is_right_passes_check_by_check(pytester):
    body = "assert conforms.passed is not False or conforms.name != 'verdict'"
    result = run(pytester, f"@attention\ndef test_mine(conforms):\n    {body}\n", "-vv")
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] > 5
    assert "failed" not in outcomes
    assert "error" not in outcomes
    result.stdout.fnmatch_lines(["*test_mine?verdict? PASSED*", "*test_mine?values, float64? PASSED*"])


def test_the_mark_alone_is_enough_and_the_body_runs(pytester):
    result = run(pytester, "@attention\ndef test_mine():\n    assert False, 'the body ran'\n")
    outcomes = result.parseoutcomes()
    assert set(outcomes) <= {"failed", "skipped", "warnings"}
    result.stdout.fnmatch_lines(["*the body ran*"])


def test_collecting_lists_the_checks_and_examines_nothing(pytester):
    code = "def make(): raise SystemExit('it was made')\n\n@pytest.mark.attnspec(make, entry='check')\ndef test_mine():\n    pass\n"
    listed = run(pytester, code, "--collect-only")
    listed.assert_outcomes()
    assert listed.ret == 0
    listed.stdout.fnmatch_lines(["*::test_mine?verdict?", "*::test_mine?values, bfloat16?", "*::test_mine?gradients?"])
    result = run(pytester, code.replace("SystemExit('it was made')", "ValueError('no luck')"))
    assert set(result.parseoutcomes()) == {"failed"}
    result.stdout.fnmatch_lines(["*test_mine?verdict?*", "*ValueError: no luck"])


def test_what_does_not_apply_is_skipped_and_says_so(pytester):
    result = run(pytester, "@attention\ndef test_mine():\n    pass\n", "-rs", "-k", "gradients or bfloat16")
    assert result.parseoutcomes()["skipped"] == 2
    result.stdout.fnmatch_lines(["*does not apply to this implementation*"])


@pytest.mark.parametrize(
    ("entry", "subject", "settings"),
    [
        ("check", lambda: attnspec.torch.MultiHeadAttention(d_model=24, h=4), {}),
        ("check", lambda: attnspec.numpy.MultiHeadAttention(d_model=24, h=4), {}),
        ("check_attention", lambda: torch.nn.functional.scaled_dot_product_attention, {"call": lambda f, q, k, v, keep: f(q, k, v, keep)}),
        ("check_properties", lambda: torch.nn.Linear(10, 10), {"d_model": 10, "call": lambda m, x: m(x)}),
        ("check_cache", lambda: WithoutCache, {}),
    ],
)
def test_every_check_of_a_report_has_a_test(entry, subject, settings):
    report = getattr(oracle, entry)(subject(), **settings)
    names = {check.name for check in report.checks}
    assert len(names) >= 2
    assert names <= set(CHECKS[entry])


def test_what_is_wrong_fails_with_the_sentence_and_the_code(pytester):
    code = "@pytest.mark.attnspec(unscaled, entry='check_attention', effort='quick')\ndef test_mine():\n    pass\n"
    result = run(pytester, code)
    outcomes = result.parseoutcomes()
    assert outcomes["failed"] >= 2
    assert outcomes["passed"] >= 5
    output = result.stdout.str()
    assert "unscaled deviates. It is multi-head attention, but" in output
    assert "unscaled: values, float64 does not hold" in output
    assert "got = unscaled(" in output
    assert "pytest_plugin.py" not in output


def test_a_check_alone_can_be_chosen(pytester):
    result = run(pytester, "@attention\ndef test_mine():\n    pass\n", "-k", "verdict")
    assert result.parseoutcomes()["passed"] == 1


def test_a_layer_is_made_by_a_function_and_examined_once_for_a_class(pytester):
    code = """
made = []

def make():
    import torch
    made.append(1)
    return torch.nn.Linear(10, 10)

@pytest.mark.attnspec(make, entry="check_properties", d_model=10, call=lambda m, x: m(x))
class TestMine:
    def test_mine(self): pass
    def test_again(self): assert made == [1]
"""
    result = run(pytester, code)
    outcomes = result.parseoutcomes()
    assert outcomes["failed"] >= 2
    assert outcomes["failed"] % 2 == 0
    result.stdout.no_fnmatch_line("*def test_again*")
    assert "error" not in outcomes


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def test_mine(conforms): pass\n", "*needs the mark @pytest.mark.attnspec*"),
        ("@pytest.mark.attnspec()\ndef test_mine(): pass\n", "*the mark takes one implementation*"),
        ("@pytest.mark.attnspec(right, entry='chek')\ndef test_mine(): pass\n", "*as entry one of check, check_attention*"),
        ("@pytest.mark.attnspec(object, entry='check')\ndef test_mine(): pass\n", "*ConfigError*"),
    ],
)
def test_wrong_use_says_so(pytester, code, said):
    result = run(pytester, code)
    assert result.ret != 0
    assert "passed" not in result.parseoutcomes()
    (result.stdout if result.stdout.str().find(said.strip("*")) >= 0 else result.stderr).fnmatch_lines([said])


def test_who_does_not_use_it_does_not_load_the_oracle(pytester):
    pytester.makepyfile("import sys\ndef test_one(): assert not {'attnspec.oracle', 'torch', 'jax'} & set(sys.modules)\n")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", pytester.path], capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout
    listed = subprocess.run([sys.executable, "-m", "pytest", "--markers", pytester.path], capture_output=True, text=True, check=True)
    assert "@pytest.mark.attnspec(subject, *, entry='check', **settings)" in listed.stdout
