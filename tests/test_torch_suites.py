"""Suites that others wrote for `torch.nn.MultiheadAttention`, run against the drop-in."""

import copy
import importlib
import unittest
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

import attnspec
from attnspec import Dropout
from attnspec.torch import MultiheadAttention

# The numbers of PyTorch's samples lie between -9 and 9, so products of three of them, summed up, reach some 1e4: errors are
# measured relative to the largest element. One order of some 60 roundings may differ from another by 60 * 1.1e-16 = 7e-15.
ROUNDING = {torch.float64: 1e-13, torch.float32: 3e-5}


def assert_near(mine, theirs, dtype):
    __tracebackhide__ = True
    size = max(1.0, float(theirs.detach().nan_to_num().abs().max())) if theirs.numel() else 1.0
    torch.testing.assert_close(mine, theirs, rtol=0, atol=ROUNDING[dtype] * size, equal_nan=True)


def differ(mine, theirs):
    """Whether the comparison would have seen another computation."""
    return not torch.allclose(mine, theirs, rtol=1e-3, equal_nan=True)


class OffByOnePercent(MultiheadAttention):
    """The drop-in with a fault: a small one in the queries."""

    def forward(self, query, key, value, *args, **kwargs):
        return super().forward(query * 1.01, key, value, *args, **kwargs)


def module_samples(dtype, training):
    (info,) = (info for info in module_db if info.module_cls is nn.MultiheadAttention)
    return info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=training)


class TestModuleInputs:
    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("dtype", ROUNDING, ids=str)
    def test_all_64_samples_give_what_pytorchs_class_gives(self, dtype, training):
        samples, seen = module_samples(dtype, training), 0
        for sample in samples:
            made = sample.constructor_input
            theirs, ours, faulty = (
                kind(*made.args, **made.kwargs, dtype=dtype).train(training)
                for kind in (nn.MultiheadAttention, MultiheadAttention, OffByOnePercent)
            )
            for layer in (ours, faulty):
                layer.load_state_dict(theirs.state_dict())
            given = sample.forward_input
            (y, weights), (wanted, wanted_weights) = (layer(*given.args, **given.kwargs) for layer in (ours, theirs))
            assert_near(y, wanted, dtype)
            assert (weights is None) is (wanted_weights is None)
            if weights is not None:
                assert_near(weights, wanted_weights, dtype)
            seen += differ(faulty(*given.args, **given.kwargs)[0], wanted)
        assert len(samples) == 64
        assert seen > 40

    def test_the_reference_of_each_sample_agrees(self):
        checked = 0
        for sample in module_samples(torch.float64, training=False):
            layer = MultiheadAttention(*sample.constructor_input.args, **sample.constructor_input.kwargs, dtype=torch.float64)
            given = sample.forward_input
            wanted, wanted_weights = sample.reference_fn(layer, *given.args, **given.kwargs)
            y, weights = layer(*given.args, **given.kwargs)
            assert_near(y, wanted, torch.float64)
            assert (weights is None) is (wanted_weights is None)
            checked += 1
        assert checked == 64


def op_samples(name):
    (op,) = (op for op in op_db if op.name == f"nn.functional.{name}")
    return list(op.sample_inputs("cpu", torch.float64, requires_grad=False))


def drop_in_of(sample):
    """A layer with the parameters that a sample of the function has."""
    _, _, width, h, w, b, bias_k, bias_v, zero, rate, w_o, b_o = sample.args
    separate = {f"{role}_proj_weight": sample.kwargs[f"{role}_proj_weight"] for role in "qkv"}
    layer = MultiheadAttention(
        width, h, dropout=rate, bias=b is not None, add_bias_kv=bias_k is not None, add_zero_attn=zero, dtype=torch.float64
    )
    if sample.kwargs["use_separate_proj_weight"]:  # of the same width, for which the constructor would put them together
        layer._qkv_same_embed_dim, layer.in_proj_weight = False, None
        for name, weight in separate.items():
            setattr(layer, name, nn.Parameter(weight))
    extra = {name: value.reshape(1, 1, -1) for name, value in (("bias_k", bias_k), ("bias_v", bias_v)) if value is not None}
    given = {"in_proj_weight": w, "in_proj_bias": b, "out_proj.weight": w_o, "out_proj.bias": b_o, **separate, **extra}
    layer.load_state_dict({name: value for name, value in given.items() if value is not None})
    return layer.train(sample.kwargs["training"])


def seeded(function, *args, **kwargs):
    torch.manual_seed(0)
    return function(*args, **kwargs)


class TestSamplesOfTheFunctions:
    def test_all_192_samples_of_multi_head_attention_forward(self):
        kinds = Counter()
        for sample in op_samples("multi_head_attention_forward"):
            key, value, *_ = sample.args
            layer, mask = drop_in_of(sample), sample.kwargs["attn_mask"]
            wanted, wanted_weights = seeded(functional.multi_head_attention_forward, sample.input, *sample.args, **sample.kwargs)
            y, weights = seeded(layer, sample.input, key, value, attn_mask=mask)
            assert_near(y, wanted, torch.float64)
            drops = layer.training and layer.dropout > 0
            if drops:  # ours are those before dropout, PyTorch's those after it
                _, wanted_weights = layer.eval()(sample.input, key, value, attn_mask=mask)
            assert_near(weights, wanted_weights, torch.float64)
            kinds["dropout" if drops else "no dropout"] += 1
        assert kinds == {"dropout": 96, "no dropout": 96}

    def test_all_25_samples_of_scaled_dot_product_attention(self):
        kinds = Counter()
        for sample in op_samples("scaled_dot_product_attention"):
            options = {name: value for name, value in sample.kwargs.items() if name != "dropout_p"}
            wanted = functional.scaled_dot_product_attention(sample.input, *sample.args, **options)
            shape = (*wanted.shape[:-2], -1, -1) if wanted.dim() == 4 else (1, *wanted.shape[:-2], -1, -1)
            queries, keys, values = (array.expand(shape) for array in (sample.input, *sample.args))
            mask = options.get("attn_mask")
            bias = None if mask is None else mask.expand(1, 1, -1, -1)
            found = attnspec.attend(queries, keys, values, causal=options["is_causal"], bias=bias)
            assert_near(found.reshape(wanted.shape), wanted, torch.float64)
            kinds["with a mask" if mask is not None else "causal" if options["is_causal"] else "plain"] += 1
            if rate := sample.kwargs["dropout_p"]:
                kinds["dropout"] += 1
                many = torch.stack([self.dropped(queries, keys, values, rate, causal=options["is_causal"]) for _ in range(3)])
                assert not torch.equal(many[0], many[1])
                assert not torch.equal(many[0], found)
        assert kinds == {"causal": 12, "plain": 12, "with a mask": 1, "dropout": 12}

    def dropped(self, queries, keys, values, rate, *, causal):
        return attnspec.attend(queries, keys, values, causal=causal, dropout=Dropout(rate, None))


def with_drop_ins(module):
    """A copy in which each `torch.nn.MultiheadAttention` has become the drop-in."""
    module, count = copy.deepcopy(module), 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.MultiheadAttention:
                made = MultiheadAttention(child.embed_dim, child.num_heads, dropout=child.dropout, batch_first=child.batch_first)
                made.load_state_dict(child.state_dict())
                setattr(parent, name, made.train(child.training))
                count += 1
    assert count
    return module


PAD = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
MASKS = {"none": {}, "padding": {"src_key_padding_mask": PAD}, "causal": {"mask": CAUSAL, "is_causal": True}}
MODES = ["train", "eval", "fast path"]
NESTED = "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"
NOT_NESTED = "ignore:enable_nested_tensor is True, but self.use_nested_tensor is False:UserWarning"


def tokens(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def calls(monkeypatch):
    """Counts how often the drop-in's forward runs."""
    calls, forward = [], MultiheadAttention.forward
    monkeypatch.setattr(MultiheadAttention, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    return calls


class TestTransformers:
    @pytest.mark.filterwarnings(NESTED)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("norm_first", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    def test_an_encoder_computes_the_same(self, batch_first, norm_first, mask, mode, calls):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
        theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first and not norm_first).train(mode == "train")
        ours = with_drop_ins(theirs)
        x = tokens(2, 5, 24) if batch_first else tokens(5, 2, 24)
        with torch.set_grad_enabled(mode != "fast path"):
            mine, other = ours(x, **MASKS[mask]), theirs(x, **MASKS[mask])
        torch.testing.assert_close(mine, other, rtol=0, atol=5e-6)
        fast = mode == "fast path" and batch_first
        assert len(calls) == (0 if fast else 2)

    @pytest.mark.filterwarnings(NESTED, NOT_NESTED)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("batch_first", [True, False])
    def test_so_does_a_whole_transformer(self, batch_first, mode, calls):
        torch.manual_seed(0)
        theirs = nn.Transformer(24, 4, 2, 2, 32, 0.0, batch_first=batch_first).train(mode == "train")
        ours = with_drop_ins(theirs)
        source, target = (tokens(2, n, 24, seed=n) if batch_first else tokens(n, 2, 24, seed=n) for n in (7, 5))
        with torch.set_grad_enabled(mode != "fast path"):
            mine, other = (model(source, target, tgt_mask=CAUSAL, tgt_is_causal=True) for model in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=0, atol=5e-6)
        assert len(calls) >= 4

    def test_it_learns_the_same(self):
        torch.manual_seed(0)
        theirs = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
        ours = with_drop_ins(theirs)
        for model in (ours, theirs):
            model(tokens(2, 5, 24), src_key_padding_mask=PAD).square().sum().backward()
        for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")

    def test_dropout_draws_the_same_in_training(self):
        torch.manual_seed(0)
        theirs = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.5)
        ours = with_drop_ins(theirs)
        mine, other = (seeded(model, tokens(5, 2, 24)) for model in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=0, atol=5e-6)
        assert not torch.allclose(mine, theirs.eval()(tokens(5, 2, 24)))


@pytest.mark.peers
class TestOpacus:
    def outcome(self, monkeypatch, layer):
        """Run Opacus' own tests of its layer, with another class in its place."""
        layers = pytest.importorskip("opacus.layers")
        monkeypatch.setattr(layers, "DPMultiheadAttention", layer)
        suite = importlib.reload(importlib.import_module("opacus.tests.dp_layers.dp_multihead_attention_test"))
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(suite.DPMultiheadAttention_test).run(result)
        return result

    @pytest.fixture(autouse=True)
    def restored(self):
        yield
        torch.use_deterministic_algorithms(False)

    def test_its_three_tests_pass(self, monkeypatch):
        result = self.outcome(monkeypatch, MultiheadAttention)
        assert result.errors == result.failures == result.skipped == []
        assert result.testsRun == 3

    def test_they_fail_for_queries_that_are_off_by_one_percent(self, monkeypatch):
        result = self.outcome(monkeypatch, OffByOnePercent)
        assert result.errors == []
        assert {test.id().rpartition(".")[2] for test, _ in result.failures} == {"test_attn", "test_dp_attn"}
        assert all("values do not match" in text for _, text in result.failures)
