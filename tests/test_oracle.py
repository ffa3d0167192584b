"""The oracle from outside: what each entry says of right and wrong implementations, and of wrong use."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import attnspec
from attnspec import Heads, Policy, oracle
from attnspec.errors import ConfigError, ShapeError


def kernel(queries, keys, values, *, keep=None, causal=False, scale=None):
    """A right one, with what the tests break taken from `broken`."""
    return compute(queries, keys, values, keep=keep, causal=causal, scale=scale)


def compute(queries, keys, values, *, keep=None, causal=False, scale=None, anchor=0, fill=-np.inf, divide=None):
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    scores = queries @ keys.swapaxes(-1, -2) * (scale if divide is None else divide(queries, keys))
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool), anchor * (keys.shape[2] - queries.shape[2])), scores, fill)
    if keep is not None:
        scores = np.where(keep, scores, fill)
    peak = scores.max(-1, keepdims=True)
    shares = np.exp(scores - np.where(np.isfinite(peak), peak, 0.0))
    total = shares.sum(-1, keepdims=True)
    return shares / np.where(total == 0, 1.0, total) @ values


class Layer(nn.Module):
    """A right layer with a fused projection of keys and values."""

    def __init__(self, d_model=24, h=4):
        super().__init__()
        self.h, self.q_proj, self.kv, self.out = (
            h,
            nn.Linear(d_model, d_model),
            nn.Linear(d_model, 2 * d_model),
            nn.Linear(d_model, d_model),
        )

    def forward(self, q, k, v, mask=None):
        queries = self.q_proj(q).unflatten(-1, (self.h, -1)).transpose(1, 2)
        keys = self.kv(k).unflatten(-1, (2, self.h, -1))[:, :, 0].transpose(1, 2)
        values = self.kv(v).unflatten(-1, (2, self.h, -1))[:, :, 1].transpose(1, 2)
        found = self.attend(queries, keys, values, mask)
        return self.out(self.join(found))

    def attend(self, queries, keys, values, mask):
        return nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

    def join(self, found):
        return found.transpose(1, 2).flatten(2)


LAYOUT = {
    "w_q": ("q_proj.weight", "(h d_k) d_model"), "b_q": ("q_proj.bias", "(h d_k)"),
    "w_kv": ("kv.weight", "(two h d_k) d_model"), "b_kv": ("kv.bias", "(two h d_k)"),
    "w_o": ("out.weight", "d_model (h d_v)"), "b_o": ("out.bias", "d_model"),
}  # fmt: skip
DECLARED = {"heads": Heads(d_model=24, h=4), "call": lambda m, q, k, v, keep: m(q, k, v, mask=None if keep is None else keep[:, None])}
DECLARED |= {"mask": "keep", "layout": LAYOUT}


def test_a_known_class_needs_nothing_else():
    report = oracle.check(nn.MultiheadAttention(24, 4, batch_first=True))
    assert report.conforms is True
    assert report.kind is None
    assert report.problems > 200
    assert set(report.by_precision) == {"float64", "float32", "bfloat16", "float16"}
    assert sum(report.by_precision.values()) == report.problems
    assert report.power.smallest_scale_error["float64"] < 1e-12
    assert {"keep", "padding", "causal", "bias", "return_weights"} <= set(report.power.options)
    report.raise_if_wrong()


def test_any_layer_needs_one_call_and_one_layout():
    report = oracle.check(Layer(), **DECLARED)
    assert report.conforms is True
    assert {"float64", "float32", "bfloat16", "float16"} == set(report.power.precisions)
    assert any(check.name.startswith("gradients") and check.passed for check in report.checks)


class JoinedWrong(Layer):
    def join(self, found):
        return found.reshape(len(found), found.shape[2], -1)


class ScaledByModel(Layer):
    def attend(self, queries, keys, values, mask):
        return nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=24**-0.5)


class Both(JoinedWrong, ScaledByModel):
    pass


class Inverted(Layer):
    def attend(self, queries, keys, values, mask):
        return super().attend(queries, keys, values, None if mask is None else ~mask)


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (JoinedWrong, {"head_split_merge_order"}),
        (ScaledByModel, {"scale_wrong_dim"}),
        (Both, {"head_split_merge_order", "scale_wrong_dim"}),
        (Inverted, {"mask_polarity_inverted"}),
    ],
)
def test_a_wrong_layer_is_told_what_is_wrong(layer, kinds):
    report = oracle.check(layer(), **DECLARED)
    assert report.conforms is False
    assert report.kind in kinds
    assert report.sentence == report.findings[0].sentence
    with pytest.raises(oracle.ConformanceError, match=r"multi-head attention, but"):
        report.raise_if_wrong()
    if layer is Both:
        assert "without swapping" in report.sentence
        assert "1/sqrt(d_model)" in report.sentence


def test_the_parameters_that_a_layer_comes_with_are_not_trusted():
    """With weights of almost zero, nothing would show."""
    layer = ScaledByModel()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1e-4)
    before = [parameter.clone() for parameter in layer.parameters()]
    assert oracle.check(layer, **DECLARED).kind == "scale_wrong_dim"
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_a_function_is_asked_for_what_its_signature_has():
    report = oracle.check_attention(kernel)
    assert report.conforms is True
    assert set(report.power.options) == {"keep", "causal", "scale"}


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ({"divide": lambda q, _: q.shape[1] ** -0.5}, "scale_wrong_dim", "1/sqrt(h)"),
        ({"anchor": 1}, "causal_alignment", 'causal_anchor="bottom_right"'),
        ({"fill": -1e4}, "mask_finite_fill", "-10000"),
        ({"fill": -7.5}, "mask_finite_fill", "-7.5"),
        ({"divide": lambda *_: 0.123}, "scale_wrong_dim", "0.123"),
    ],
)
def test_a_wrong_function_is_told_what_is_wrong(how, kind, words):
    def wrong(queries, keys, values, *, keep=None, causal=False):
        return compute(queries, keys, values, keep=keep, causal=causal, **how)

    report = oracle.check_attention(wrong, policy=Policy(empty_row="any"))
    assert report.conforms is False
    assert report.kind == kind
    assert words in report.sentence


def test_a_convention_that_is_declared_conforms():
    def lower_right(queries, keys, values, *, causal=False):
        return compute(queries, keys, values, causal=causal, anchor=1)

    policy = Policy(causal_anchor="bottom_right", empty_row="any")
    assert oracle.check_attention(lower_right, policy=policy).conforms is True
    assert oracle.check_attention(lower_right, policy=Policy(empty_row="any")).kind == "causal_alignment"


def test_a_fault_of_one_path_is_told_with_the_path():
    def wrong(queries, keys, values, *, keep=None, causal=False):
        return compute(queries, keys, values, keep=keep, causal=causal and keep is None)

    report = oracle.check_attention(wrong)
    assert report.kind == "causal_dropped_or_forced"
    assert report.sentence.endswith(("where keep is given.", "where the mask is given."))


@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_fill_is_not_named_where_only_queries_without_keys_show_it(scale):
    def filled(queries, keys, values, *, keep=None):
        return compute(queries, keys, values, keep=keep, fill=-1e9, scale=scale)

    report = oracle.check_attention(filled)
    assert report.kind == ("scale_wrong_dim" if scale else "fully_masked_row")
    told = " ".join(finding.sentence for finding in report.findings)
    assert "a query that may attend to no key gets the mean of all values" in told
    assert "-10000" not in told
    assert oracle.check_attention(lambda q, k, v, keep=None: compute(q, k, v, keep=keep, fill=-1e4)).kind == "mask_finite_fill"


def test_the_counterexample_is_small_and_its_code_runs():
    def wrong(queries, keys, values, *, keep=None):
        return compute(queries, keys, values, keep=None if keep is None else ~keep)

    report = oracle.check_attention(wrong)
    example = report.counterexample
    assert example.problem.queries.size + example.problem.keys.size <= 12
    names = {"wrong": wrong}
    exec(example.snippet, names)
    assert not np.allclose(names["got"], names["expected"])
    np.testing.assert_allclose(names["expected"], example.expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(names["got"], example.got, rtol=0, atol=1e-12)


BACKWARDS = """
import torch

class Backwards(torch.nn.Module):
    def __init__(self, width, h):
        super().__init__()
        self.h, self.qkv, self.out = h, torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=q.shape[-1] ** 0.5)
        return self.out(y.transpose(1, 2).flatten(2))

def refuses(q, k, v, keep=None):
    if keep is not None:
        raise ValueError("no mask here")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
"""
FUSED = {"w_qkv": ("qkv.weight", "(three h d_k) d_model"), "b_qkv": ("qkv.bias", "(three h d_k)")}
FUSED |= {"w_o": ("out.weight", "d_model (h d_v)"), "b_o": ("out.bias", "d_model")}


@pytest.fixture
def backwards(tmp_path, monkeypatch):
    (tmp_path / "backwards.py").write_text(BACKWARDS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("backwards")
@pytest.mark.parametrize("call", [None, "m(x, mask=None if keep is None else keep[:, None])"])
def test_the_code_for_a_layer_runs_as_it_is(call, capsys):
    given = {"heads": Heads(d_model=10, h=2), "layout": FUSED, "effort": "quick", "options": () if call is None else ("keep",)}
    job = oracle.Job("backwards:Backwards", arguments="10, 2", call=call, settings=given)
    example = job.examine(job.make()).counterexample
    names = {}
    exec(example.snippet, names)
    np.testing.assert_allclose(names["expected"], example.expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(names["got"], example.got, rtol=0, atol=1e-12)
    assert not np.allclose(names["got"], names["expected"])
    assert "off by up to" in capsys.readouterr().out


@pytest.mark.usefixtures("backwards")
def test_the_code_for_a_layer_says_what_is_left_to_write():
    from backwards import Backwards

    layer = Backwards(10, 2)
    report = oracle.check(layer, heads=Heads(d_model=10, h=2), layout=FUSED, call=lambda m, x: m(x), effort="quick")
    lines = report.counterexample.snippet.splitlines()
    assert "layer = Backwards(...)  # write here what you make it with" in lines
    assert "call = lambda m, x: YOUR_CALL  # write here what you gave as call=" in lines
    assert "YOUR_CALL" not in str(oracle.check(layer, heads=Heads(d_model=10, h=2), layout=FUSED, effort="quick"))


@pytest.mark.usefixtures("backwards")
def test_the_code_for_a_crash_raises_it():
    job = oracle.Job("backwards:refuses", settings={"effort": "quick"})
    snippet = job.examine(job.make()).counterexample.snippet
    with pytest.raises(ValueError, match="no mask here"):
        exec(snippet, {})


def test_the_code_for_a_layer_of_numpy_runs_once_it_is_said_how_to_make_it():
    class Layer:
        def __init__(self):
            self.w, self.o = np.zeros((10, 30)), np.zeros((10, 10))

        def __call__(self, x):
            q, k, v = (x @ self.w).reshape(*x.shape[:2], 3, 2, 5).transpose(2, 0, 3, 1, 4)
            return compute(q * 5**0.5, k, v).transpose(0, 2, 1, 3).reshape(x.shape) @ self.o

    layout = {"w_qkv": ("w", "d_model (three h d_k)"), "w_o": ("o", "(h d_v) d_model")}
    example = oracle.check(Layer(), heads=Heads(d_model=10, h=2), layout=layout, effort="quick").counterexample
    names = {"Layer": Layer}
    exec(example.snippet.replace("Layer(...)", "Layer()"), names)
    np.testing.assert_allclose(names["got"], example.got, rtol=0, atol=1e-12)
    assert not np.allclose(names["got"], names["expected"])


def test_a_crash_is_a_verdict_and_a_wrong_call_is_wrong_use():
    def refuses_unequal(queries, keys, values):
        if queries.shape[2] < keys.shape[2]:
            raise RuntimeError("keys of another length")
        return compute(queries, keys, values)

    report = oracle.check_attention(refuses_unequal)
    assert report.conforms is True
    assert any("fewer queries than keys" in finding.sentence for finding in report.findings)
    with pytest.raises(ConfigError, match="nobody knows what the argument 'wombat' stands for"):
        oracle.check_attention(lambda queries, keys, values, wombat: queries)
    with pytest.raises(ConfigError, match="cannot be called like this"):
        oracle.check_attention(kernel, call=lambda f, q, k, v: f(q, k, v, no_such_argument=1))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"heads": None}, ConfigError, "say its heads"),
        ({"layout": None}, ConfigError, "say its layout"),
        ({"layout": LAYOUT | {"w_q": ("q_prod.weight", "(h d_k) d_model")}}, ConfigError, "q_proj.weight"),
        ({"heads": Heads(d_model=24, h=3, d_k=6)}, ShapeError, "24"),
        ({"options": ("wombat",)}, ConfigError, "wombat"),
    ],
)
def test_a_mistake_in_what_is_declared_is_told_apart_from_a_fault(change, error, words):
    with pytest.raises(error, match=words):
        oracle.check(Layer(), **DECLARED | change)


class Caching(nn.Module):
    """A causal layer that takes a cache and gives it back."""

    def __init__(self, *, sees_chunk=False):
        super().__init__()
        self.sees_chunk, self.in_proj, self.out = sees_chunk, nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x, cache=None):
        q, k, v = self.in_proj(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        if self.sees_chunk and cache is not None:
            keep = torch.ones_like(keep)
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.out(found.transpose(1, 2).flatten(2)), (k, v)


@pytest.mark.parametrize("sees_chunk", [False, True])
def test_a_layer_with_a_cache_is_called_again_and_again(sees_chunk):
    layout = {"w_qkv": ("in_proj.weight", "(three h d_k) d_model"), "b_qkv": ("in_proj.bias", "(three h d_k)")}
    layout |= {"w_o": ("out.weight", "d_model (h d_v)"), "b_o": ("out.bias", "d_model")}
    report = oracle.check(Caching(sees_chunk=sees_chunk), heads=Heads(d_model=12, h=3), layout=layout, causal=True)
    assert report.conforms is (not sees_chunk)
    if sees_chunk:
        assert report.kind == "causal_dropped_or_forced"
        assert "cache" in report.sentence


def make_decoder(*, lose_first=False):
    kept = []

    def step(queries, keys, values):
        kept.append((keys, values))
        k, v = (np.concatenate(parts, 2) for parts in zip(*kept, strict=True))
        if lose_first and len(kept) > 1:
            k, v = k[:, :, 1:], v[:, :, 1:]
        return compute(queries, k, v, causal=True, anchor=1)

    return step


def test_a_decoder_is_called_again_and_again():
    assert oracle.check_cache(make_decoder).conforms is True
    report = oracle.check_cache(lambda: make_decoder(lose_first=True))
    assert report.kind == "cache_extent"
    assert "oldest" in report.sentence
    assert "step(queries" in report.counterexample.snippet


def test_without_a_layout_only_properties_are_looked_at():
    call = {"call": DECLARED["call"], "d_model": 24}
    report = oracle.check_properties(Layer(), **call)
    assert report.conforms is True
    assert "was not asked" in report.sentence

    class AttendsOverHeads(Layer):
        def attend(self, queries, keys, values, mask):
            return super().attend(queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), None).transpose(1, 2)

    report = oracle.check_properties(AttendsOverHeads(), d_model=24, call=lambda m, x: m(x, x, x))
    assert report.conforms is False


def test_a_run_that_is_too_weak_decides_nothing():
    """Where all scores are bent to almost the same, no scale shows."""

    def bent(queries, keys, values):
        scores = queries @ keys.swapaxes(-1, -2) * queries.shape[-1] ** -0.5
        shares = np.exp(1e-7 * np.tanh(scores / 1e-7))
        return shares / shares.sum(-1, keepdims=True) @ values

    report = oracle.check_attention(bent, policy=Policy(cap=1e-7))
    assert report.conforms is None
    assert report.verdict == "undecided"
    with pytest.raises(oracle.ConformanceError):
        report.raise_if_wrong()


def test_float32_inside_is_noted_and_conforms():
    def single(queries, keys, values, *, keep=None):
        arrays = (x.astype(np.float32) for x in (queries, keys, values))
        return compute(*arrays, keep=keep).astype(queries.dtype)

    report = oracle.check_attention(single)
    assert report.conforms is True
    assert any("float32 inside" in finding.sentence for finding in report.findings)


def test_half_precision_products_are_found():
    def half(queries, keys, values):
        queries, keys = (x.astype(np.float16).astype(x.dtype) for x in (queries, keys))
        return compute(queries, keys, values)

    report = oracle.check_attention(half)
    assert report.conforms is False
    assert report.kind == "precision_range"


def test_the_same_seed_asks_the_same(tmp_path):
    first, second = (oracle.check_attention(kernel, seed=3, effort="quick").to_dict() for _ in range(2))
    first.pop("seconds")
    second.pop("seconds")
    assert first == second
    report = oracle.check_attention(kernel, effort="quick")
    assert json.loads(report.to_json(tmp_path / "report.json")) == json.loads((tmp_path / "report.json").read_text())


def test_assert_conforms_is_for_tests():
    oracle.assert_conforms(kernel, entry="check_attention", effort="quick")
    with pytest.raises(oracle.ConformanceError, match="1/sqrt"):
        oracle.assert_conforms(lambda queries, keys, values: compute(queries, keys, values, scale=1.0), entry="check_attention")
    with pytest.raises(ConfigError, match="entry='wombat'"):
        oracle.assert_conforms(kernel, entry="wombat")


def test_progress_is_told():
    told = []
    oracle.check_attention(kernel, effort="quick", progress=lambda *args: told.append(args))
    assert {what for what, _, _ in told} >= {"values", "properties"}
    assert all(0 <= done <= total for _, done, total in told)


def test_a_policy_of_any_row_computes_as_zero():
    x = np.random.default_rng(0).normal(size=(2, 3, 12))
    parameters = attnspec.Parameters.random(Heads(d_model=12, h=3))
    keep = np.zeros((2, 1, 3, 3), bool)
    zero, free = (attnspec.multi_head_attention(x, parameters, keep=keep, policy=Policy(empty_row=row)) for row in ("zero", "any"))
    np.testing.assert_array_equal(zero, free)


def test_a_report_is_plain_data():
    assert dataclasses.is_dataclass(oracle.Report)
    assert math.isfinite(oracle.check_attention(kernel, effort="quick").seconds)


def test_a_call_that_always_wants_a_mask_gets_one():
    """As in `lambda m, q, k, v, keep: m(q, k, v, mask=keep[:, None])`, which has no word for none."""
    always = {"call": lambda m, q, k, v, keep: m(q, k, v, mask=keep[:, None])}
    assert oracle.check(Layer(), **DECLARED | always).conforms is True
    assert oracle.check(Inverted(), **DECLARED | always).kind == "mask_polarity_inverted"
    required = oracle.check_attention(lambda queries, keys, values, mask: compute(queries, keys, values, keep=mask & True))
    assert required.conforms is True


def test_a_snippet_of_a_layer_sets_all_its_parameters():
    example = oracle.check(Inverted(), **DECLARED, effort="quick").counterexample
    tensors = example.snippet.partition("tensors = ")[2].partition("\n}")[0] + "}"
    given = attnspec.layouts.read(eval(tensors, {"np": np}), DECLARED["layout"], DECLARED["heads"])
    for field in ("w_q", "w_k", "w_v", "w_o", "b_q", "b_o"):
        np.testing.assert_array_equal(getattr(given, field), getattr(example.problem.parameters, field))
