"""The layers of PyTorch under what PyTorch does to modules: compiled, exported, mapped, differentiated, copied, watched."""

import copy
import io
import pickle
import shutil

import pytest
import torch
from options import NEUTRAL, draw
from torch import nn
from torch.export import Dim, export
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import attnspec
from attnspec import ConfigError, Dropout, Mask, Policy
from attnspec.layers import promises
from attnspec.step import _steps
from attnspec.torch import MultiHeadAttention, MultiheadAttention

BATCH, SEQ, WIDTH, H = 2, 5, 24, 4

# Float64, and sums of some 60 products of numbers up to 4, each rounded by 1.1e-16: at worst 3e-14, ten times that for gradients.
ROUNDING = 3e-13

torch_scripts_its_own = pytest.mark.filterwarnings("ignore:.torch.jit.script(_method)?. is deprecated:DeprecationWarning")
torch_loops_over_its_kernel = pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet:UserWarning")

KEPT = Mask.lengths(torch.tensor([3, 4]))
CASES = {
    "plain": ({}, lambda x: {}),
    "causal": ({}, lambda x: {"causal": True}),
    "keep": ({}, lambda x: {"keep": square(x, lambda i, j: (i + j) % 3 > 0)}),
    "Mask": ({}, lambda x: {"keep": Mask.causal() & KEPT}),
    "bias": ({}, lambda x: {"bias": square(x, lambda i, j: (i - j) / 3.0)}),
    "context": ({}, lambda x: {"context": torch.cat((x, 2 * x), dim=1)}),
    "rope": ({"rope": True}, lambda x: {"causal": True}),
    "window, grouped, no biases": ({"window": (2, 1), "h_kv": 2, "bias": False}, lambda x: {}),
    "qk_norm": ({"qk_norm": "rms"}, lambda x: {}),
    "weights": ({}, lambda x: {"need": "weights", "causal": True}),
    "steps": ({"policy": Policy(cap=2.0)}, lambda x: {"causal": True}),
    "one sequence": ({}, lambda x: {"causal": True}),
}

DROP_IN = {
    "plain": ({}, lambda x: {"need_weights": False}),
    "weights": ({}, lambda x: {"average_attn_weights": False}),
    "causal": ({}, lambda x: {"need_weights": False, "is_causal": True, "attn_mask": square(x, lambda i, j: j > i)[0, 0]}),
    "padding": ({}, lambda x: {"key_padding_mask": torch.arange(x.shape[1])[None] >= torch.tensor([[3], [4]])}),
    "extra keys": ({"add_bias_kv": True, "add_zero_attn": True}, lambda x: {"attn_mask": square(x, lambda i, j: (i - j) / 3.0)[0, 0]}),
}


def square(x, fill):
    places = torch.arange(x.shape[1])
    filled = fill(places[:, None], places)
    return (filled.to(x.dtype) if filled.is_floating_point() else filled)[None, None]


def layer_of(settings, seed=0):
    layer = MultiHeadAttention(WIDTH, H, seed=seed, dtype=torch.float64, **settings)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("w_"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return layer


def drop_in_of(settings):
    torch.manual_seed(0)
    return MultiheadAttention(WIDTH, H, batch_first=True, dtype=torch.float64, **settings)


def tokens(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def drawn(name, length=SEQ):
    x = tokens(*() if name == "one sequence" else (BATCH,), length, WIDTH, seed=length)
    return x, CASES[name][1](x)


def as_tuple(answer):
    return answer if isinstance(answer, tuple) else (answer,)


def assert_same(mine, theirs, within=ROUNDING):
    __tracebackhide__ = True
    assert len(as_tuple(mine)) == len(as_tuple(theirs)) > 0
    for one, other in zip(as_tuple(mine), as_tuple(theirs), strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=within)


def trained(layer, run, x):
    """The output, and the gradients of the input and of each parameter."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    answer = as_tuple(run(x))
    answer[0].square().sum().backward()
    return *answer, x.grad, *(parameter.grad.clone() for parameter in layer.parameters())


def compiled(layer, *, dynamic, backend="eager"):
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)


class TestCompile:
    @pytest.mark.parametrize("name", CASES)
    def test_one_compilation_serves_every_length(self, name):
        layer = layer_of(CASES[name][0])
        code = compiled(layer, dynamic=True)
        for length, stance in ((5, "default"), (7, "fail_on_recompile"), (40, "fail_on_recompile")):
            x, options = drawn(name, length)
            with torch.compiler.set_stance(stance):
                found = code(x, **options)
            assert_same(found, layer(x, **options))

    @pytest.mark.parametrize("name", DROP_IN)
    def test_one_compilation_of_the_drop_in_serves_every_length(self, name):
        layer = drop_in_of(DROP_IN[name][0])
        code = compiled(layer, dynamic=True)
        for length, stance in ((5, "default"), (7, "fail_on_recompile"), (40, "fail_on_recompile")):
            x = tokens(BATCH, length, WIDTH)
            options = DROP_IN[name][1](x)
            with torch.compiler.set_stance(stance):
                found = code(x, x, x, **options)
            assert_same(found, layer(x, x, x, **options))

    @pytest.mark.parametrize("name", ["keep", "context", "rope", "weights"])
    def test_static_code_trains(self, name):
        layer = layer_of(CASES[name][0])
        code = compiled(layer, dynamic=False, backend="aot_eager")
        x, options = drawn(name)
        assert_same(trained(layer, lambda x: code(x, **options), x), trained(layer, lambda x: layer(x, **options), x))

    @pytest.mark.parametrize("name", ["weights", "extra keys"])
    def test_static_code_of_the_drop_in_trains(self, name):
        layer = drop_in_of(DROP_IN[name][0])
        code = compiled(layer, dynamic=False, backend="aot_eager")
        x = tokens(BATCH, SEQ, WIDTH)
        options = DROP_IN[name][1](x)
        assert_same(trained(layer, lambda x: code(x, x, x, **options), x), trained(layer, lambda x: layer(x, x, x, **options), x))

    def test_dropout_draws_what_it_draws_uncompiled(self):
        layer, x = layer_of({"dropout": 0.5}), tokens(BATCH, SEQ, WIDTH)
        found = []
        for run in (compiled(layer, dynamic=False), layer):
            torch.manual_seed(0)
            found.append(run(x))
        assert_same(*found)
        assert not torch.allclose(found[0], layer.eval()(x))

    @pytest.mark.parametrize("settings", [{}, {"rope": True, "window": (3, 0)}], ids=str)
    def test_decoding_is_compiled_for_no_one_and_many_tokens_in_the_cache(self, settings):
        layer, x = layer_of(settings), tokens(BATCH, 9, WIDTH)
        code, cache, found = compiled(layer, dynamic=True), layer.new_cache(batch=BATCH), []
        with torch.no_grad():
            for token in range(9):
                with torch.compiler.set_stance("default" if token < 3 else "fail_on_recompile"):
                    y, cache = code(x[:, token : token + 1], cache=cache)
                found.append(y)
            assert_same(torch.cat(found, dim=1), layer(x, causal=True))
        assert cache.seen == 9

    @torch_scripts_its_own
    @pytest.mark.slow
    @pytest.mark.skipif(not shutil.which("c++"), reason="the default backend needs a C++ compiler")
    def test_the_default_backend_computes_the_same(self):
        layer = layer_of({"rope": True, "h_kv": 2})
        x, options = drawn("rope")
        assert_same(compiled(layer, dynamic=True, backend="inductor")(x, **options), layer(x, **options))


def dynamic(x, options):
    """Which sizes an exported program leaves open: those of the batch and of the sequence."""
    seq = Dim("seq", min=2, max=512)
    shapes = {"keep": {2: seq, 3: seq}, "bias": {2: seq, 3: seq}, "context": {0: Dim("batch"), 1: 2 * seq}}
    return {"x": {0: seq} if x.dim() == 2 else {0: Dim("batch"), 1: seq}} | {name: shapes.get(name) for name in options}


EXPORTED = [(name, False) for name in CASES if name != "Mask"] + [(name, True) for name in ("causal", "keep", "context", "rope", "weights")]


class TestExport:
    @pytest.mark.parametrize(("name", "strict"), EXPORTED)
    def test_a_program_serves_every_batch_and_length(self, name, strict):
        layer = layer_of(CASES[name][0]).eval()
        x, options = drawn(name)
        program = export(layer, (x,), options, dynamic_shapes=dynamic(x, options), strict=strict).module()
        for batch, length in ((BATCH, SEQ), (3, 2), (7, 60)):
            x = tokens(*x.shape[:-2] and (batch,), length, WIDTH)
            options = CASES[name][1](x)
            assert_same(program(x, **options), layer(x, **options))

    @pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
    def test_the_rules_of_a_mask_become_part_of_the_program(self, strict):
        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = layer_of({})

            def forward(self, x):
                return self.layer(x, keep=Mask.causal() & Mask.window(2, 0))

        layer = Masked().eval()
        program = export(layer, (tokens(BATCH, SEQ, WIDTH),), dynamic_shapes={"x": {1: Dim("seq", min=2)}}, strict=strict).module()
        x = tokens(BATCH, 17, WIDTH)
        assert_same(program(x), layer(x))

    @pytest.mark.parametrize(("name", "strict"), [("plain", True), ("weights", False), ("padding", True), ("extra keys", False)])
    def test_the_drop_in_is_exported(self, name, strict):
        layer, x = drop_in_of(DROP_IN[name][0]).eval(), tokens(BATCH, SEQ, WIDTH)
        seq = Dim("seq", min=2, max=512)
        masks = {"key_padding_mask": {1: seq}, "attn_mask": {0: seq, 1: seq}}
        options = DROP_IN[name][1](x)
        shapes = {role: {1: seq} for role in ("query", "key", "value")} | {name: masks.get(name) for name in options}
        given = dict.fromkeys(("query", "key", "value"), x) | options
        program = export(layer, (), given, dynamic_shapes=shapes, strict=strict).module()
        x = tokens(BATCH, 40, WIDTH)
        given = dict.fromkeys(("query", "key", "value"), x) | DROP_IN[name][1](x)
        assert_same(program(**given), layer(**given))


MAPPED = ["plain", "causal", "keep", "bias", "rope", "weights"]


@torch_loops_over_its_kernel
class TestFunc:
    @pytest.mark.parametrize("name", MAPPED)
    def test_vmap_over_inputs_is_a_loop(self, name):
        layer, options = layer_of(CASES[name][0]), drawn(name)[1]
        several = tokens(3, BATCH, SEQ, WIDTH)
        loop = [as_tuple(layer(x, **options)) for x in several]
        assert_same(vmap(lambda x: layer(x, **options))(several), tuple(map(torch.stack, zip(*loop, strict=True))))

    @pytest.mark.parametrize("name", MAPPED[:-1])
    def test_vmap_over_stacked_parameters_is_an_ensemble(self, name):
        layers = [layer_of(CASES[name][0], seed=seed) for seed in range(3)]
        x, options = drawn(name)
        parameters, buffers = stack_module_state(layers)
        assert buffers == {}
        found = vmap(lambda stacked: functional_call(layers[0], stacked, (x,), options))(parameters)
        assert_same(found, torch.stack([layer(x, **options) for layer in layers]))

    @pytest.mark.parametrize("name", MAPPED[:-1])
    def test_gradients_of_each_example_add_up_to_those_of_the_batch(self, name):
        layer = layer_of(CASES[name][0])
        x, options = drawn(name)
        parameters = dict(layer.named_parameters())

        def loss(parameters, x):
            return functional_call(layer, parameters, (x,), options).square().sum()

        _, _, *wanted = trained(layer, lambda x: layer(x, **options), x)
        whole = grad(loss)(parameters, x)
        each = vmap(grad(lambda parameters, x: loss(parameters, x[None])), in_dims=(None, 0))(parameters, x)
        assert_same(tuple(whole.values()), tuple(wanted))
        assert_same(tuple(gradient.sum(dim=0) for gradient in each.values()), tuple(wanted))

    @torch_scripts_its_own
    @pytest.mark.parametrize("name", MAPPED[:-1])
    def test_forward_mode_and_second_derivatives_go_through_the_plain_kernel(self, name):
        """The kernels for CPU know no other mode than backward; that is PyTorch's limit."""
        layer, options = layer_of(CASES[name][0]), drawn(name)[1]
        x, way = tokens(BATCH, SEQ, WIDTH), tokens(BATCH, SEQ, WIDTH, seed=1)
        with sdpa_kernel(SDPBackend.MATH):
            _, slope = jvp(lambda x: layer(x, **options), (x,), (way,))
            there, here = (layer(x + step * way, **options) for step in (1e-5, -1e-5))
            assert torch.autograd.gradgradcheck(lambda x: layer(x, **options), (x.requires_grad_(),), fast_mode=True)
        assert_same(slope.detach(), ((there - here) / 2e-5).detach(), within=1e-8)


def saved_whole(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def saved_by_its_state(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(layer)
    nn.init.zeros_(other.w_q if isinstance(other, MultiHeadAttention) else other.in_proj_weight)
    other.load_state_dict(torch.load(file))
    return other


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)), "file": saved_whole, "state": saved_by_its_state}  # noqa: S301
SETTINGS = [
    {},
    {"h_kv": 2, "bias": False},
    {"rope": True, "qk_norm": "layer", "window": (2, 0)},
    {"policy": Policy(product_precision="float64")},
]


class TestCopies:
    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    @pytest.mark.parametrize("way", COPIES)
    def test_a_copy_computes_the_same_and_is_independent(self, way, settings):
        layer, x = layer_of(settings), tokens(BATCH, SEQ, WIDTH)
        y = layer(x)
        other = COPIES[way](layer)
        assert torch.equal(other(x), y)
        assert (other.heads, other.policy, other.dropout) == (layer.heads, layer.policy, layer.dropout)
        nn.init.zeros_(other.w_o)
        assert torch.equal(layer(x), y)
        assert not torch.equal(other(x), y)

    @pytest.mark.parametrize("way", COPIES)
    def test_a_copy_of_the_drop_in_computes_the_same(self, way):
        layer, x = drop_in_of({"add_bias_kv": True}), tokens(BATCH, SEQ, WIDTH)
        other = COPIES[way](layer)
        assert_same(other(x, x, x), layer(x, x, x), within=0)
        nn.init.zeros_(other.out_proj.weight)
        assert not torch.equal(other(x, x, x)[0], layer(x, x, x)[0])

    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    def test_the_keys_of_the_state_are_the_names_of_the_parameters(self, settings):
        layer = layer_of(settings)
        given = {name: array for name, array in vars(layer.to_parameters()).items() if array is not None}
        assert list(layer.state_dict()) == list(dict(layer.named_parameters())) == list(given)
        assert all(layer.state_dict()[name].data_ptr() == array.data_ptr() for name, array in given.items())

    def test_a_state_with_a_parameter_too_many_is_refused(self):
        with pytest.raises(RuntimeError, match=r"Unexpected key.*b_q"):
            layer_of({"bias": False}).load_state_dict(layer_of({}).state_dict())

    @pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 3e-6), (torch.bfloat16, 0.1), (torch.float16, 0.01)], ids=str)
    def test_to_another_dtype(self, dtype, within):
        layer, x = layer_of({"qk_norm": "rms"}), tokens(BATCH, SEQ, WIDTH)
        y = layer(x)
        found = layer.to(dtype)(x.to(dtype))
        assert found.dtype == dtype
        assert_same(found.double(), y, within=within)

    def test_to_the_meta_device_and_back_with_new_numbers(self):
        layer, x = layer_of({"qk_norm": "rms"}), tokens(BATCH, SEQ, WIDTH)
        y = layer(x)
        assert layer.to("meta")(x.to("meta")).shape == y.shape
        made = MultiHeadAttention(WIDTH, H, qk_norm="rms", device="meta", dtype=torch.float64).to_empty(device="cpu")
        made.reset_parameters(seed=0)
        fresh = MultiHeadAttention(WIDTH, H, qk_norm="rms", seed=0, dtype=torch.float64)
        assert torch.equal(made(x), fresh(x))
        layer.to_empty(device="cpu").load_state_dict(fresh.state_dict())
        assert torch.equal(layer(x), fresh(x))

    def test_a_parametrized_weight_is_used_learnt_and_taken_back(self):
        class Doubled(nn.Module):
            def forward(self, weight):
                return 2 * weight

        layer, wanted, x = layer_of({}), layer_of({}), tokens(BATCH, SEQ, WIDTH)
        parametrize.register_parametrization(layer, "w_v", Doubled())
        wanted.w_v.data *= 2
        y = layer(x, causal=True)
        assert torch.equal(y, wanted(x, causal=True))
        y.sum().backward()
        wanted(x, causal=True).sum().backward()
        assert torch.equal(layer.parametrizations.w_v.original.grad, 2 * wanted.w_v.grad)
        parametrize.remove_parametrizations(layer, "w_v")
        assert torch.equal(layer(x, causal=True), y)

    def test_a_pruned_weight_is_used(self):
        layer, wanted, x = layer_of({}), layer_of({}), tokens(BATCH, SEQ, WIDTH)
        prune.random_unstructured(layer, "w_k", amount=0.5)
        wanted.w_k.data *= layer.w_k_mask
        assert torch.equal(layer(x), wanted(x))
        prune.remove(layer, "w_k")
        assert torch.equal(layer(x), wanted(x))
        assert set(layer.state_dict()) == set(wanted.state_dict())

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("name", ["plain", "keep", "rope"])
    def test_checkpointing_changes_no_gradient(self, name, reentrant):
        layer = layer_of(CASES[name][0])
        x, options = drawn(name)
        calls = []

        def run(x):
            calls.append(1)
            return layer(x, **options)

        found = trained(layer, lambda x: checkpoint(run, x, use_reentrant=reentrant), x)
        assert len(calls) == 2
        assert_same(found, trained(layer, run, x), within=0)


# Four roundings in a row (projection, scores, weights, output) of numbers up to 4, by 2^-9 and 2^-11 of their size.
NARROW = {torch.bfloat16: 4 * 4 * 2**-9, torch.float16: 4 * 4 * 2**-11}


class TestAutocast:
    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    @pytest.mark.parametrize("name", [name for name in CASES if name != "Mask"])
    def test_the_result_is_narrow_and_near_that_of_float32(self, name, dtype):
        layer = layer_of(CASES[name][0]).float()
        x = tokens(BATCH, SEQ, WIDTH, dtype=torch.float32)
        options = CASES[name][1](x)
        with torch.autocast("cpu", dtype=dtype):
            y, *weights = as_tuple(layer(x, **options))
        wanted, *_ = as_tuple(layer(x, **options))
        assert y.dtype == dtype
        assert wanted.dtype == torch.float32
        assert 0 < (y - wanted).abs().max() < NARROW[dtype]
        assert all((array.sum(dim=-1) - 1).abs().max() < NARROW[dtype] for array in weights)

    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    @pytest.mark.parametrize("name", ["plain", "weights", "padding"])
    def test_so_is_that_of_the_drop_in(self, name, dtype):
        layer, x = drop_in_of(DROP_IN[name][0]).float(), tokens(BATCH, SEQ, WIDTH, dtype=torch.float32)
        options = DROP_IN[name][1](x)
        with torch.autocast("cpu", dtype=dtype):
            y, _ = layer(x, x, x, **options)
        assert y.dtype == dtype
        assert 0 < (y - layer(x, x, x, **options)[0]).abs().max() < NARROW[dtype]

    def test_gradients_keep_the_dtype_of_the_parameters(self):
        layer, x = layer_of({}).float(), tokens(BATCH, SEQ, WIDTH, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x).float().sum().backward()
        assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}

    def test_a_call_is_judged_once_with_autocast_and_once_without(self, monkeypatch):
        judged = []
        judge = promises.judge
        monkeypatch.setattr(promises, "judge", lambda *args, **kwargs: judged.append(args[0].name) or judge(*args, **kwargs))
        layer, x = layer_of({}).float(), tokens(BATCH, 31, WIDTH, dtype=torch.float32)
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                layer(x)
        assert judged == ["MultiHeadAttention"]
        for _ in range(3):
            layer(x)
        assert judged == ["MultiHeadAttention"] * 2


BEFORE_THE_LAYER = {"linear_bias", "relative_bias", "number_documents", "count_in_documents"}
STEPS = {
    "fan out and rules": {
        "source": "cross_v", "heads": "contiguous", "normalise": "rms", "gains": "each", "rotation": "half", "causal": True,
        "window": (1, 3), "keep": "documents", "bias": "full", "cap": "before", "extra": True, "sinks": True, "gates": True,
    },
    "an array and dropout": {"causal": True, "keep": "array", "dropout": True},
    "lengths": {"keep": "lengths"},
}  # fmt: skip


def call_of(name):
    """A layer with one call of it, and the same call of the specification."""
    problem = draw(NEUTRAL | STEPS[name], seed=5).convert(torch.from_numpy)
    options = {key: value for key, value in problem.options.items() if key not in {"policy", "scale", "dropout"} and value is not None}
    layer = MultiHeadAttention.from_parameters(problem.parameters, policy=problem.options["policy"])
    if (dropout := problem.options.get("dropout")) is not None:
        layer._dropout = Dropout(dropout.rate, dropout.generator)
    return (lambda: layer(problem.x, **options)), problem.run, layer


def decoding():
    problem = draw(NEUTRAL | {"rotation": "half"}, seed=5).convert(torch.from_numpy)
    layer = MultiHeadAttention.from_parameters(problem.parameters, policy=problem.options["policy"])
    _, cache = attnspec.decode(problem.x[:, :3], problem.parameters, None, policy=layer.policy)
    rest = problem.x[:, 3:]
    return (lambda: layer(rest, cache=cache)[0]), (lambda: attnspec.decode(rest, problem.parameters, cache, policy=layer.policy)[0]), layer


CALLS = {**{name: (lambda name=name: call_of(name)) for name in STEPS}, "decoding": decoding}


def steps_of(name):
    _, specification, _ = CALLS[name]()
    with attnspec.trace() as steps:
        specification()
    return steps


EACH_STEP = [(name, step) for name in CALLS for step in steps_of(name)]


def changed(result):
    if result.dtype == torch.bool:
        return ~result
    return result + 1 if not result.is_floating_point() else 1.5 * result


class TestHooks:
    def test_there_is_a_call_here_for_every_step_that_a_layer_can_run(self):
        assert {step for _, step in EACH_STEP} == set(_steps) - BEFORE_THE_LAYER

    @pytest.mark.parametrize("name", CALLS)
    def test_hooks_see_what_the_steps_of_the_specification_give(self, name):
        call, specification, layer = CALLS[name]()
        seen, wanted = [], steps_of(name)
        handles = [layer.on(step, lambda result, step=step: seen.append((step, result))) for step in wanted]
        y = call()
        assert torch.equal(y, specification())
        assert [step for step, _ in seen] == [entry.step.name for entry in wanted.calls]
        assert all(torch.equal(result, entry.result) for (_, result), entry in zip(seen, wanted.calls, strict=True))
        for handle in handles:
            handle.remove()
        seen.clear()
        if "drop" not in wanted:
            assert_same(call(), y)
        call()
        assert seen == []

    @pytest.mark.parametrize(("name", "step"), EACH_STEP)
    def test_what_a_hook_returns_takes_the_place_of_the_result(self, name, step):
        call, specification, layer = CALLS[name]()
        function = getattr(attnspec, step)
        with attnspec.substitute(**{step: lambda *args, **kwargs: changed(function(*args, **kwargs))}):
            wanted = specification()
        layer.on(step, changed)
        assert torch.equal(call(), wanted)

    def test_hooks_run_in_order_and_each_sees_what_the_one_before_made(self):
        layer, seen = layer_of({}), []
        layer.on("scale", lambda scores: scores + 1)
        layer.on("scale", seen.append)
        layer.on("scale", lambda scores: scores - 1)
        x = tokens(BATCH, SEQ, WIDTH)
        with attnspec.trace() as steps:
            y = layer(x)
        assert torch.equal(seen[0], steps["scale"].result + 1)
        assert_same(y, layer_of({})(x))

    def test_gradients_flow_through_hooks(self):
        layer, x, seen = layer_of({}), tokens(BATCH, SEQ, WIDTH), []
        wanted = trained(layer, layer, x)
        layer.on("softmax", lambda weights: weights.retain_grad() or seen.append(weights))
        assert_same(trained(layer, layer, x), wanted)
        assert seen[0].grad.abs().max() > 0

    @pytest.mark.parametrize("name", CALLS)
    def test_a_layer_is_traced_and_its_steps_substituted_as_in_the_specification(self, name):
        call, _, _ = CALLS[name]()
        with attnspec.trace() as steps:
            y = call()
        wanted = steps_of(name)
        assert [entry.step.name for entry in steps.calls] == [entry.step.name for entry in wanted.calls]
        assert all(torch.equal(mine.result, theirs.result) for mine, theirs in zip(steps.calls, wanted.calls, strict=True))
        assert torch.equal(steps["mix"].result, y)

    def test_a_step_that_does_not_exist_is_named(self):
        with pytest.raises(ConfigError, match="on: there is no step 'sofmax'; the steps are append_to_cache, bias, blend"):
            layer_of({}).on("sofmax", print)

    def test_hooks_are_refused_by_compilers_until_they_are_removed(self):
        layer, x = layer_of({}), tokens(BATCH, SEQ, WIDTH)
        handles = [layer.on("softmax", print), layer.on("blend", print)]
        sentence = "on: hooks do not run under torch.compile; remove those on softmax, blend."
        with pytest.raises(torch._dynamo.exc.Unsupported) as refusal:
            compiled(layer, dynamic=False, backend="eager")(x)
        assert f"ConfigError('{sentence}')" in str(refusal.value)
        with pytest.raises(ConfigError) as error:
            export(layer, (x,))
        assert str(error.value) == sentence
        for handle in handles:
            handle.remove()
        assert_same(compiled(layer, dynamic=False, backend="eager")(x), layer(x))

    def test_the_hooks_of_a_module_work_too(self):
        layer, x, seen = layer_of({}), tokens(BATCH, SEQ, WIDTH), []
        y = layer(x)
        with layer.register_forward_hook(lambda module, args, found: seen.append(found) or 2 * found):
            assert torch.equal(layer(x), 2 * y)
        assert torch.equal(seen[0], y)


def test_scripting_is_refused_by_pytorch():
    with pytest.raises(Exception, match="keyword-only arguments"), pytest.warns(DeprecationWarning, match="is deprecated"):
        torch.jit.script(layer_of({}))
