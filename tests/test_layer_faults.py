"""What goes wrong in practice, on the layers of PyTorch: what is masked is broken, nothing is left, numbers are huge or do not fit."""

import numpy as np
import pytest
import torch
from torch.func import vmap

from attnspec import AttnspecError, BackendError, ConfigError, DtypeError, Mask, Policy, ShapeError
from attnspec.torch import MultiHeadAttention, MultiheadAttention

BATCH, SEQ_Q, SEQ_K, WIDTH, H = 2, 5, 7, 24, 4
LOST = 5
"""From this key on no query sees any."""

FILLS = [float("nan"), float("inf"), -float("inf"), 1e30]

# Float32, and sums of some 60 products of numbers up to 4, each rounded by 6e-8: at worst 1.5e-5.
ROUNDING = 1.5e-5

torch_loops_over_its_kernel = pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet:UserWarning")
array_is_read_only = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")


def tokens(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_of(**settings):
    layer = MultiHeadAttention(WIDTH, H, seed=0, **settings)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("b_"):
                parameter.copy_(tokens(*parameter.shape, seed=len(name)))
    return layer


def drop_in_of(**settings):
    torch.manual_seed(0)
    layer = MultiheadAttention(WIDTH, H, batch_first=True, **settings)
    torch.nn.init.normal_(layer.out_proj.bias)
    return layer


def seen_keys(*shape):
    return (torch.arange(SEQ_K) < LOST).expand(*shape, SEQ_K)


def each_query_keeps_some():
    places = torch.arange(SEQ_Q)[:, None] * 2 + torch.arange(SEQ_K)
    return (seen_keys(1, 1, SEQ_Q) & (places % 3 > 0)).clone()


MASKS = {
    "causal": {"causal": True},
    "keep": {"keep": each_query_keeps_some()},
    "keep of keys": {"keep": seen_keys(1, 1, 1)},
    "lengths": {"keep": Mask.lengths(torch.tensor([LOST, LOST]))},
    "keep and bias": {"keep": seen_keys(BATCH, 1, SEQ_Q), "bias": tokens(1, H, SEQ_Q, SEQ_K)},
}
SETTINGS = {"kernel": {}, "grouped": {"h_kv": 2}, "rotated": {"rope": True}, "steps": {"policy": Policy(cap=3.0)}}
NEEDS = [None, "weights"]


def run_of(layer, mode):
    if mode == "eager":
        return layer
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager" if mode == "compiled with gradients" else "eager")


def filled(fill, shape=(BATCH, SEQ_K, WIDTH)):
    context = tokens(*shape, seed=1)
    context[..., LOST:, :] = fill
    return context


def found(run, fill, **options):
    """The output, and the gradients of both inputs."""
    x, context = tokens(BATCH, SEQ_Q, WIDTH).requires_grad_(), filled(fill).requires_grad_()
    answer = run(x, context=context, **options)
    (answer[0] if isinstance(answer, tuple) else answer).square().sum().backward()
    return *(answer if isinstance(answer, tuple) else (answer,)), x.grad, context.grad


def assert_equal(mine, theirs):
    __tracebackhide__ = True
    assert len(mine) == len(theirs) > 0
    assert all(one.isfinite().all() and torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


class TestDroppedKeys:
    @pytest.mark.parametrize("need", NEEDS)
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("settings", SETTINGS)
    def test_what_is_dropped_changes_no_output_and_gets_no_gradient(self, settings, mask, need):
        layer = layer_of(**SETTINGS[settings])
        sound = found(layer, 0.5, need=need, **MASKS[mask])
        assert sound[-1][:, :LOST].any()
        for fill in FILLS:
            broken = found(layer, fill, need=need, **MASKS[mask])
            assert_equal(broken, sound)
            assert not broken[-1][:, LOST:].any()

    @pytest.mark.parametrize("fill", FILLS)
    @pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
    def test_nor_does_it_where_keys_are_normalised_but_its_own_gradient_is_as_broken_as_it_is(self, kind, fill):
        """The derivative of a norm is a product with what was normalised, and 0 times NaN is NaN."""
        *broken, mine = found(layer_of(qk_norm=kind), fill, **MASKS["keep"])
        *sound, theirs = found(layer_of(qk_norm=kind), 0.5, **MASKS["keep"])
        assert_equal([*broken, mine[:, :LOST]], [*sound, theirs[:, :LOST]])
        assert mine[:, LOST:].isnan().all() if fill != 1e30 else not mine[:, LOST:].any()

    @pytest.mark.parametrize("need", NEEDS)
    @pytest.mark.parametrize("mask", MASKS)
    def test_nor_under_compile(self, mask, need):
        layer = layer_of()
        code = run_of(layer, "compiled with gradients")
        sound = found(code, 0.5, need=need, **MASKS[mask])
        for fill in FILLS:
            broken = found(code, fill, need=need, **MASKS[mask])
            assert_equal(broken, sound)
            assert not broken[-1][:, LOST:].any()

    @torch_loops_over_its_kernel
    @pytest.mark.parametrize("need", NEEDS)
    @pytest.mark.parametrize("mask", MASKS)
    def test_nor_under_vmap(self, mask, need):
        layer, x = layer_of(), tokens(BATCH, SEQ_Q, WIDTH)
        contexts = torch.stack([filled(fill) for fill in [0.5, *FILLS]])
        answer = vmap(lambda context: layer(x, context=context, need=need, **MASKS[mask]))(contexts)
        for each in answer if isinstance(answer, tuple) else (answer,):
            assert_equal(each[1:], each[:1].expand_as(each[1:]))

    @pytest.mark.parametrize("fill", FILLS)
    @pytest.mark.parametrize("mask", MASKS)
    def test_parameters_learn_the_same(self, mask, fill):
        """But for the weights that met the broken tokens: their gradient is a product with them, and 0 times NaN is NaN."""
        layer, gradients = layer_of(), []
        for value in (fill, 0.5):
            layer.zero_grad()
            found(layer, value, **MASKS[mask])
            names = [name for name, _ in layer.named_parameters() if fill == 1e30 or name not in {"w_k", "w_v"}]
            gradients.append([layer.get_parameter(name).grad for name in names])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=100 * ROUNDING)  # summed over the batch and over some 10 outputs

    @pytest.mark.parametrize("mode", ["eager", "compiled"])
    @pytest.mark.parametrize("fill", FILLS)
    def test_earlier_tokens_do_not_see_a_broken_later_one(self, fill, mode):
        layer, x = layer_of(), tokens(BATCH, SEQ_K, WIDTH)
        run, sound = run_of(layer, mode), layer(x, causal=True)
        x[:, LOST:] = fill
        y = run(x, causal=True)
        torch.testing.assert_close(y[:, :LOST], sound[:, :LOST], rtol=0, atol=ROUNDING)
        assert fill == 1e30 or y[:, LOST:].isnan().all()

    @pytest.mark.parametrize("mode", ["eager", "compiled"])
    def test_a_broken_key_that_is_seen_shows(self, mode):
        layer, x = layer_of(), tokens(BATCH, SEQ_Q, WIDTH)
        keep = torch.ones(1, 1, SEQ_Q, SEQ_K, dtype=torch.bool)
        keep[..., :2, LOST:] = False
        y = run_of(layer, mode)(x, context=filled(float("nan")), keep=keep)
        assert y[:, :2].isfinite().all()
        assert y[:, 2:].isnan().all()

    @pytest.mark.parametrize("need", [True, False])
    @pytest.mark.parametrize("mode", ["eager", "compiled with gradients"])
    @pytest.mark.parametrize("kind", ["key_padding_mask", "attn_mask", "both", "one added"])
    def test_the_drop_in_keeps_them_out_too(self, kind, mode, need):
        drop = ~seen_keys(BATCH)
        crossed = drop[:1].expand(SEQ_Q, SEQ_K) | ~each_query_keeps_some()[0, 0]
        options = {
            "key_padding_mask": {"key_padding_mask": drop},
            "attn_mask": {"attn_mask": crossed},
            "both": {"key_padding_mask": drop, "attn_mask": crossed},
            "one added": {"key_padding_mask": tokens(BATCH, SEQ_K), "attn_mask": crossed},
        }[kind]
        run, answers = run_of(drop_in_of(), mode), []
        for value in (0.5, *FILLS):
            x, context = tokens(BATCH, SEQ_Q, WIDTH).requires_grad_(), filled(value).requires_grad_()
            y, weights = run(x, context, context, need_weights=need, **options)
            y.square().sum().backward()
            answers.append([y, x.grad, context.grad, *([weights] if need else [])])
            assert not context.grad[:, LOST:].any()
            assert_equal(answers[-1], answers[0])


class TestEmptyRows:
    @pytest.mark.parametrize("mode", ["eager", "compiled with gradients"])
    @pytest.mark.parametrize("need", NEEDS)
    @pytest.mark.parametrize("bias", [None, tokens(1, H, SEQ_Q, SEQ_Q)], ids=["", "bias"])
    def test_a_query_without_keys_gives_the_bias_of_the_output_and_learns_nothing_else(self, bias, need, mode):
        layer, x = layer_of(), tokens(BATCH, SEQ_Q, WIDTH).requires_grad_()
        keep = torch.ones(BATCH, 1, SEQ_Q, SEQ_Q, dtype=torch.bool)
        keep[0, :, 1], keep[1] = False, False
        empty = ~keep.any(dim=-1).squeeze(1)
        answer = run_of(layer, mode)(x, keep=keep, bias=bias, need=need)
        y, weights = answer if need else (answer, torch.zeros(BATCH, H, SEQ_Q, SEQ_Q))
        assert torch.equal(y[empty], layer.b_o.expand(6, WIDTH))
        assert not weights.transpose(1, 2)[empty].any()
        assert torch.allclose(weights.sum(dim=-1).transpose(1, 2)[~empty], torch.tensor(1.0 if need else 0.0))
        y[empty].sum().backward()
        assert not x.grad.any()
        assert {name for name, parameter in layer.named_parameters() if parameter.grad.any()} == {"b_o"}

    @pytest.mark.parametrize("mode", ["eager", "compiled with gradients"])
    @pytest.mark.parametrize("need", [True, False])
    def test_so_does_one_of_the_drop_in(self, need, mode):
        layer, x = drop_in_of(), tokens(BATCH, SEQ_Q, WIDTH).requires_grad_()
        drop = torch.zeros(BATCH, SEQ_Q, dtype=torch.bool)
        drop[1] = True
        y, weights = run_of(layer, mode)(x, x, x, key_padding_mask=drop, need_weights=need)
        assert torch.equal(y[1], layer.out_proj.bias.expand(SEQ_Q, WIDTH))
        assert not need or not weights[1].any()
        y[1].sum().backward()
        assert not x.grad.any()
        assert {name for name, parameter in layer.named_parameters() if parameter.grad.any()} == {"out_proj.bias"}

    @pytest.mark.parametrize("empty_row", ["zero", "nan", "uniform", "unmasked"])
    @pytest.mark.parametrize("need", NEEDS)
    def test_another_convention_is_kept_to(self, need, empty_row):
        layer, x = layer_of(policy=Policy(empty_row=empty_row)), tokens(BATCH, SEQ_Q, WIDTH)
        answer = layer(x, keep=torch.zeros(1, 1, 1, SEQ_Q, dtype=torch.bool), need=need)
        y = answer[0] if need else answer
        values = (x @ layer.w_v.permute(1, 0, 2).reshape(WIDTH, WIDTH) + layer.b_v.reshape(WIDTH)).mean(dim=1, keepdim=True)
        wanted = {
            "zero": layer.b_o.expand_as(y),
            "nan": torch.full_like(y, torch.nan),
            "uniform": (values @ layer.w_o + layer.b_o).expand_as(y),
            "unmasked": layer(x),
        }
        torch.testing.assert_close(y, wanted[empty_row], rtol=0, atol=ROUNDING, equal_nan=True)


class TestHugeLogits:
    @pytest.mark.parametrize(("size", "mode"), [(1e2, "eager"), (1e4, "eager"), (1e8, "eager"), (1e4, "compiled with gradients")])
    @pytest.mark.parametrize("need", NEEDS)
    def test_the_output_is_right_and_gradients_are_finite(self, need, size, mode):
        layer, exact = layer_of(), layer_of().double()
        x = (size * tokens(BATCH, SEQ_Q, WIDTH)).requires_grad_()
        with torch.no_grad():
            wanted = exact(x.double(), causal=True)
        answer = run_of(layer, mode)(x, causal=True, need=need)
        y = answer[0] if need else answer
        assert (y.double() - wanted).abs().max() < ROUNDING * size
        y.sum().backward()
        assert x.grad.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())

    @pytest.mark.parametrize("need", [True, False])
    def test_those_of_the_drop_in_too(self, need):
        layer, exact = drop_in_of(), drop_in_of().double()
        x = (1e6 * tokens(BATCH, SEQ_Q, WIDTH)).requires_grad_()
        y, _ = layer(x, x, x, need_weights=need)
        wanted, _ = exact(x.double(), x.double(), x.double())
        assert (y - wanted).abs().max() < ROUNDING * 1e6
        y.sum().backward()
        assert x.grad.isfinite().all()

    @pytest.mark.parametrize("need", NEEDS)
    def test_huge_biases_choose_one_key(self, need):
        layer, x = layer_of(), tokens(1, SEQ_Q, WIDTH)
        bias = 1e30 * torch.eye(SEQ_Q).roll(1, dims=1)[None, None]
        answer = layer(x, bias=bias, need=need)
        y = answer[0] if need else answer
        alone = layer(x, keep=bias > 0)
        torch.testing.assert_close(y, alone, rtol=0, atol=ROUNDING)


def keep_of(seq_q, seq_k):
    return torch.ones(1, 1, seq_q, seq_k, dtype=torch.bool)


NOTHING = {
    "no queries": ((BATCH, 0), (BATCH, SEQ_K), {}),
    "no queries, a mask": ((BATCH, 0), (BATCH, SEQ_K), {"keep": keep_of(1, SEQ_K)}),
    "no keys": ((BATCH, SEQ_Q), (BATCH, 0), {}),
    "no keys, causal": ((BATCH, SEQ_Q), (BATCH, 0), {"causal": True}),
    "no keys, a mask": ((BATCH, SEQ_Q), (BATCH, 0), {"keep": keep_of(SEQ_Q, 0)}),
    "no tokens": ((BATCH, 0), None, {}),
    "no tokens, causal": ((BATCH, 0), None, {"causal": True}),
    "no sequences": ((0, SEQ_Q), None, {}),
    "no sequences, causal": ((0, SEQ_Q), None, {"causal": True}),
    "no sequences, a context": ((0, SEQ_Q), (0, SEQ_K), {"keep": keep_of(SEQ_Q, SEQ_K)}),
    "a sequence without tokens": ((0,), None, {}),
}


class TestNothing:
    @pytest.mark.parametrize("settings", SETTINGS)
    @pytest.mark.parametrize("need", NEEDS)
    @pytest.mark.parametrize("name", NOTHING)
    def test_of_nothing_comes_the_bias_or_nothing(self, name, need, settings):
        self.judge(layer_of(**SETTINGS[settings]), "eager", name, need)

    @pytest.mark.parametrize("need", NEEDS)
    @pytest.mark.parametrize("name", NOTHING)
    def test_nor_under_compile(self, name, need):
        self.judge(layer_of(), "compiled", name, need)

    def judge(self, layer, mode, name, need):
        queries, keys, options = NOTHING[name]
        x = tokens(*queries, WIDTH).requires_grad_()
        context = None if keys is None else tokens(*keys, WIDTH, seed=1).requires_grad_()
        answer = run_of(layer, mode)(x, context=context, need=need, **options)
        y, weights = answer if need else (answer, None)
        assert torch.equal(y, layer.b_o.expand_as(x))
        assert weights is None or weights.shape == (*queries[:-1], H, queries[-1], (keys or queries)[-1])
        y.sum().backward()
        assert x.grad.shape == x.shape
        assert not x.grad.any()

    @pytest.mark.parametrize("settings", [{}, {"rope": True}], ids=str)
    def test_a_cache_takes_no_tokens_too(self, settings):
        layer, x = layer_of(**settings), tokens(BATCH, SEQ_Q, WIDTH)
        _, cache = layer(x, cache=layer.new_cache(batch=BATCH))
        y, same = layer(x[:, :0], cache=cache)
        assert y.shape == (BATCH, 0, WIDTH)
        assert same.seen == SEQ_Q
        torch.testing.assert_close(layer(x, cache=same)[0], layer(x, cache=cache)[0], rtol=0, atol=0)

    @pytest.mark.parametrize("need", [True, False])
    @pytest.mark.parametrize(("queries", "keys"), [((2, 0), (2, 7)), ((2, 5), (2, 0)), ((0, 5), (0, 7)), ((0,), (7,)), ((5,), (0,))])
    def test_the_drop_in_gives_what_pytorch_does(self, queries, keys, need):
        ours, theirs = drop_in_of(), torch.nn.MultiheadAttention(WIDTH, H, batch_first=True)
        theirs.load_state_dict(ours.state_dict())
        x, context = tokens(*queries, WIDTH), tokens(*keys, WIDTH)
        mine, other = (layer(x, context, context, need_weights=need) for layer in (ours, theirs))
        torch.testing.assert_close(mine[0], other[0], rtol=0, atol=0)
        assert (mine[1] is None) is (other[1] is None) is (not need)
        assert not need or mine[1].shape == other[1].shape


def read_only(x):
    array = x.numpy().copy()
    array.flags.writeable = False
    return torch.from_numpy(array)


FORMS = {
    "strided": lambda x: torch.stack((x, x + 1), dim=-1)[..., 0],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "backwards": lambda x: x.mT.contiguous().mT,
    "part of a wider array": lambda x: torch.cat((x + 1, x, x + 2), dim=-1)[..., WIDTH : 2 * WIDTH],
    "read-only": read_only,
    "in inference mode": lambda x: torch.inference_mode()(x.clone)(),
}


class TestForms:
    @array_is_read_only
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("settings", SETTINGS)
    def test_how_an_input_lies_in_memory_does_not_matter(self, settings, form):
        layer, x, context = layer_of(**SETTINGS[settings]).requires_grad_(requires_grad=False), tokens(BATCH, SEQ_Q, WIDTH), filled(0.5)
        given = [FORMS[form](array) for array in (x, context)]
        torch.testing.assert_close(
            layer(given[0], context=given[1], **MASKS["keep"]), layer(x, context=context, **MASKS["keep"]), rtol=0, atol=ROUNDING
        )
        assert torch.equal(given[0], x)
        assert torch.equal(given[1], context)

    @array_is_read_only
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("need", [True, False])
    def test_nor_for_the_drop_in(self, need, form):
        layer, x = drop_in_of().requires_grad_(requires_grad=False), tokens(BATCH, SEQ_Q, WIDTH)
        given = FORMS[form](x)
        torch.testing.assert_close(layer(given, given, given, need_weights=need), layer(x, x, x, need_weights=need), rtol=0, atol=ROUNDING)
        assert torch.equal(given, x)

    @pytest.mark.parametrize("need", NEEDS)
    def test_expanded_arrays_are_taken(self, need):
        layer, x = layer_of(), tokens(1, SEQ_Q, WIDTH)
        row, keep, bias = x.expand(BATCH, SEQ_Q, WIDTH), seen_keys(BATCH, H, SEQ_Q), torch.zeros(1, 1, 1, 1).expand(1, H, SEQ_Q, SEQ_K)
        context = filled(0.5, (1, SEQ_K, WIDTH)).expand(BATCH, SEQ_K, WIDTH)
        mine = layer(row, context=context, keep=keep, bias=bias, need=need)
        theirs = layer(row.clone(), context=context.clone(), keep=keep.clone(), bias=bias.clone(), need=need)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=ROUNDING)

    @pytest.mark.parametrize("form", ["strided", "transposed", "backwards", "part of a wider array"])
    def test_gradients_reach_the_array_that_was_given(self, form):
        layer, x = layer_of(), tokens(BATCH, SEQ_Q, WIDTH).requires_grad_()
        layer(FORMS[form](x)).square().sum().backward()
        mine, x.grad = x.grad, None
        layer(x).square().sum().backward()
        torch.testing.assert_close(mine, x.grad, rtol=0, atol=100 * ROUNDING)

    @pytest.mark.parametrize("name", ["w_q", "w_o"])
    def test_parameters_may_lie_anyhow(self, name):
        layer, x = layer_of(), tokens(BATCH, SEQ_Q, WIDTH)
        y = layer(x)
        parameter = layer.get_parameter(name)
        parameter.data = parameter.data.mT.contiguous().mT
        assert not parameter.is_contiguous()
        torch.testing.assert_close(layer(x), y, rtol=0, atol=ROUNDING)


X, CONTEXT = tokens(BATCH, SEQ_Q, WIDTH), tokens(BATCH, SEQ_K, WIDTH)
LAYER, DROP_IN_LAYER = layer_of(), drop_in_of()


def flags(*shape):
    return torch.ones(shape, dtype=torch.bool)


def cache():
    return LAYER.new_cache(batch=BATCH)


REFUSED = [
    # what is no array of floating-point numbers of this library
    (lambda: LAYER(X.long()), DtypeError, "x is int64, but must be floating-point."),
    (lambda: LAYER(X.bool()), DtypeError, "x is bool, but must be floating-point."),
    (lambda: LAYER(X.to(torch.complex64)), DtypeError, "x is complex64, but must be floating-point."),
    (lambda: LAYER(X, context=CONTEXT.int()), DtypeError, "context is int32, but must be floating-point."),
    (lambda: LAYER(X.numpy()), BackendError, "x is from numpy, but parameters.w_q is from torch; one call takes one."),
    (
        lambda: LAYER(X, context=CONTEXT.numpy()),
        BackendError,
        "context is from numpy, but parameters.w_q is from torch; one call takes one.",
    ),
    (
        lambda: LAYER(X, keep=np.ones((1, 1, 5, 5), bool)),
        BackendError,
        "keep is from numpy, but parameters.w_q is from torch; one call takes one.",
    ),
    (lambda: LAYER([[1.0]]), BackendError, "x is a list, but must be an array (of NumPy, PyTorch or another array-API library)."),
    (lambda: LAYER(None), BackendError, "x is None, but must be an array (of NumPy, PyTorch or another array-API library)."),
    # dtypes and devices
    (lambda: LAYER(X.double()), DtypeError, "x is of dtype float64, but parameters.w_q is of dtype float32; one call takes one."),
    (lambda: LAYER(X.half()), DtypeError, "x is of dtype float16, but parameters.w_q is of dtype float32; one call takes one."),
    (
        lambda: LAYER(X, context=CONTEXT.double()),
        DtypeError,
        "context is of dtype float64, but parameters.w_q is of dtype float32; one call takes one.",
    ),
    (
        lambda: LAYER(X, bias=torch.zeros(1, 1, 5, 5).double()),
        DtypeError,
        "bias is of dtype float64, but parameters.w_q is of dtype float32; one call takes one.",
    ),
    (lambda: LAYER(X.to("meta")), BackendError, "x is on meta, but parameters.w_q is on cpu; one call takes one."),
    (lambda: LAYER(X, context=CONTEXT.to("meta")), BackendError, "context is on meta, but parameters.w_q is on cpu; one call takes one."),
    (
        lambda: LAYER(X, keep=flags(1, 1, 5, 5).to("meta")),
        BackendError,
        "keep is on meta, but parameters.w_q is on cpu; one call takes one.",
    ),
    (
        lambda: MultiHeadAttention(WIDTH, H, device="meta")(X),
        BackendError,
        "x is on cpu, but parameters.w_q is on meta; one call takes one.",
    ),
    # shapes
    (lambda: LAYER(X[..., :23]), ShapeError, "x (2, 5, 23) has d_model=23, but d_model=24 was set when the layer was built."),
    (
        lambda: LAYER(X, context=CONTEXT[..., :23]),
        ShapeError,
        "context (2, 7, 23) has d_key_in=23, but d_key_in=24 was set when the layer was built.",
    ),
    (lambda: LAYER(X, context=CONTEXT[:1]), ShapeError, "context (1, 7, 24) has batch=1, but batch=2 was set by x (2, 5, 24)."),
    (
        lambda: LAYER(X, context=CONTEXT, context_v=CONTEXT[:, 1:]),
        ShapeError,
        "context_v (2, 6, 24) has seq_k=6, but seq_k=7 was set by context (2, 7, 24).",
    ),
    (lambda: LAYER(X[None]), ShapeError, "x (1, 2, 5, 24) has 4 axes, but needs 3: (batch, seq_q, d_model=24)."),
    (lambda: LAYER(X[0, 0]), ShapeError, "x (24,) has 1 axis, but needs 3: (batch, seq_q, d_model=24)."),
    (lambda: LAYER(X, context=CONTEXT[0]), ShapeError, "context (7, 24) has 2 axes, but needs 3: (batch=2, seq_k, d_key_in=24)."),
    (lambda: LAYER(X[0], context=CONTEXT), ShapeError, "context (1, 2, 7, 24) has 4 axes, but needs 3: (batch=1, seq_k, d_key_in=24)."),
    (lambda: LAYER(X[0], context=CONTEXT[:1]), ShapeError, "context (1, 1, 7, 24) has 4 axes, but needs 3: (batch=1, seq_k, d_key_in=24)."),
    (
        lambda: LAYER(X, cache=LAYER.new_cache(batch=3)),
        ShapeError,
        "x (2, 5, 24) has batch=2, but batch=3 was set by cache.keys (3, 4, 0, 6).",
    ),
    # masks
    (
        lambda: LAYER(X, keep=flags(5, 5)),
        ShapeError,
        "keep (5, 5) has 2 axes, but needs 4: (batch=2 or 1, h=4 or 1, seq_q=5 or 1, seq_q=5).",
    ),
    (lambda: LAYER(X, keep=flags(1, 1, 5, 6)), ShapeError, "keep (1, 1, 5, 6) has seq_q=6, but seq_q=5 was set by x (2, 5, 24)."),
    (lambda: LAYER(X, keep=flags(3, 1, 5, 5)), ShapeError, "keep (3, 1, 5, 5) has batch=3, but batch=2 was set by x (2, 5, 24)."),
    (lambda: LAYER(X, keep=flags(1, 3, 5, 5)), ShapeError, "keep (1, 3, 5, 5) has h=3, but h=4 was set when the layer was built."),
    (
        lambda: LAYER(X, context=CONTEXT, keep=flags(1, 1, 7, 5)),
        ShapeError,
        "keep (1, 1, 7, 5) has seq_q=7, but seq_q=5 was set by x (2, 5, 24).",
    ),
    (lambda: LAYER(X[0], keep=flags(2, 1, 5, 5)), ShapeError, "keep (2, 1, 5, 5) has batch=2, but batch=1 was set by x (1, 5, 24)."),
    (
        lambda: LAYER(X, keep=torch.zeros(1, 1, 5, 5)),
        DtypeError,
        "keep is float32, but must be boolean (True: the query may attend to the key).",
    ),
    (
        lambda: LAYER(X, keep=flags(1, 1, 5, 5).long()),
        DtypeError,
        "keep is int64, but must be boolean (True: the query may attend to the key).",
    ),
    (lambda: LAYER(X, bias=flags(1, 1, 5, 5)), DtypeError, "bias is bool, but must be floating-point."),
    (lambda: LAYER(X, bias=torch.zeros(1, 1, 5, 4)), ShapeError, "bias (1, 1, 5, 4) has seq_q=4, but seq_q=5 was set by x (2, 5, 24)."),
    (
        lambda: LAYER(X, keep=Mask.keep(flags(3, 5), "batch seq_k")),
        ShapeError,
        "Mask: keep (3, 5) has batch=3, but batch=2 was set by the queries",
    ),
    # options
    (
        lambda: LAYER(X, context=CONTEXT, cache=cache()),
        ConfigError,
        "context and cache exclude each other; the cache says which tokens came before.",
    ),
    (
        lambda: LAYER(X, offset=1, cache=cache()),
        ConfigError,
        "offset and cache exclude each other; the cache says which tokens came before.",
    ),
    (lambda: LAYER(X, need="scores"), ConfigError, "need='scores' must be 'weights' or None."),
    (lambda: LAYER(X, need=True), ConfigError, "need=True must be 'weights' or None."),
    (lambda: LAYER(X, causal=1), ConfigError, "causal=1 must be bool or None."),
    (lambda: LAYER(X, offset=2), ConfigError, "attend: offset=2 says where the queries stand, but nothing asks;"),
]

REFUSED_BY_THE_DROP_IN = [
    ((X.long(),) * 3, {}, DtypeError, "query is int64, but must be floating-point."),
    ((X, X.long(), X), {}, DtypeError, "key is int64, but must be floating-point."),
    ((X.to("meta"),) * 3, {}, BackendError, "query is on meta, but w_q is on cpu; one call takes one."),
    ((X, X, X.to("meta")), {}, BackendError, "value is on meta, but w_q is on cpu; one call takes one."),
    ((X.double(),) * 3, {}, DtypeError, "query is of dtype float64, but w_q is of dtype float32; one call takes one."),
    ((X.numpy(),) * 3, {}, BackendError, "query is from numpy, but w_q is from torch; one call takes one."),
    ((X[..., :23], X, X), {}, ShapeError, "query (2, 5, 23) has d_model=23, but d_model=24 was set when the layer was built."),
    ((X, CONTEXT[:1], CONTEXT[:1]), {}, ShapeError, "key (1, 7, 24) has batch=1, but batch=2 was set by query (2, 5, 24)."),
    ((X, CONTEXT, CONTEXT[:, 1:]), {}, ShapeError, "value (2, 6, 24) has seq_k=6, but seq_k=7 was set by key (2, 7, 24)."),
    ((X[0], CONTEXT, CONTEXT), {}, ShapeError, "key (2, 7, 24) has 3 axes, but needs 2: (seq_k, d_key_in=24)."),
    ((X, CONTEXT[0], CONTEXT[0]), {}, ShapeError, "key (7, 24) has 2 axes, but needs 3: (batch=2, seq_k, d_key_in=24)."),
    (
        (X, CONTEXT, CONTEXT),
        {"key_padding_mask": flags(2, 6)},
        ShapeError,
        "key_padding_mask (2, 6) has seq_k=6, but seq_k=7 was set by key (2, 7, 24).",
    ),
    (
        (X, CONTEXT, CONTEXT),
        {"key_padding_mask": flags(7, 2)},
        ShapeError,
        "key_padding_mask (7, 2) has batch=7, but batch=2 was set by query (2, 5, 24).",
    ),
    ((X, CONTEXT, CONTEXT), {"attn_mask": flags(5, 6)}, ShapeError, "attn_mask (5, 6) has seq_k=6, but seq_k=7 was set by key (2, 7, 24)."),
    (
        (X, CONTEXT, CONTEXT),
        {"attn_mask": flags(2, 5, 7)},
        ShapeError,
        "attn_mask (2, 5, 7) has batch*h=2, but batch*h=8 was set by query (2, 5, 24)",
    ),
    (
        (X, CONTEXT, CONTEXT),
        {"attn_mask": flags(2, 4, 5, 7)},
        ShapeError,
        "attn_mask (2, 4, 5, 7) has 4 axes, but needs 3: (batch*h=8, seq_q=5, seq_k=7).",
    ),
    (
        (X, CONTEXT, CONTEXT),
        {"attn_mask": flags(5, 7).long()},
        DtypeError,
        "attn_mask is int64, but must be boolean (True: the key is dropped) or floating-point",
    ),
    (
        (X, X, X),
        {"key_padding_mask": flags(2, 5).byte()},
        DtypeError,
        "key_padding_mask is uint8, but must be boolean (True: the key is dropped) or floating-point",
    ),
    ((X, X, X), {"is_causal": True}, ConfigError, "is_causal=True is a hint about attn_mask; give attn_mask too."),
    ((X, X, X), {"need_weights": "yes"}, ConfigError, "need_weights='yes' must be bool."),
]


def assert_refuses(call, error, sentence):
    __tracebackhide__ = True
    for _ in range(2):  # what was refused once is refused again
        with pytest.raises(AttnspecError) as refusal:
            call()
        assert type(refusal.value) is error
        assert sentence in str(refusal.value)


class TestRefusals:
    @pytest.mark.parametrize(("call", "error", "sentence"), REFUSED, ids=[sentence[:60] for *_, sentence in REFUSED])
    def test_what_does_not_fit_is_refused_in_words(self, call, error, sentence):
        assert_refuses(call, error, sentence)

    @pytest.mark.parametrize(
        ("given", "options", "error", "sentence"), REFUSED_BY_THE_DROP_IN, ids=[row[-1][:60] for row in REFUSED_BY_THE_DROP_IN]
    )
    def test_the_drop_in_refuses_it_too(self, given, options, error, sentence):
        assert_refuses(lambda: DROP_IN_LAYER(*given, **options), error, sentence)

    @pytest.mark.parametrize("options", [{}, {"causal": True}, {"need": "weights"}, {"keep": flags(1, 4, 5, 5)}], ids=str)
    def test_what_fits_one_layer_is_refused_by_another(self, options):
        LAYER(X, **options)
        with pytest.raises(ShapeError, match=r"x \(2, 5, 24\) has d_model=24, but d_model=32 was set when the layer was built"):
            MultiHeadAttention(32, H)(X, **options)
        if "keep" in options:
            with pytest.raises(ShapeError, match=r"keep \(1, 4, 5, 5\) has h=4, but h=1 was set when the layer was built"):
                MultiHeadAttention(WIDTH, 1)(X, **options)

    def test_so_is_what_fits_one_drop_in(self):
        narrow, wide = (drop_in_of(kdim=width, vdim=9) for width in (7, 8))
        narrow(X, CONTEXT[..., :7], CONTEXT[..., :9])
        with pytest.raises(ShapeError, match=r"key \(2, 7, 7\) has d_key_in=7, but d_key_in=8 was set when the layer was built"):
            wide(X, CONTEXT[..., :7], CONTEXT[..., :9])

    @pytest.mark.parametrize("causal", [1, 0, 1.0, np.True_])
    def test_a_number_does_not_pass_for_a_flag_that_is_equal(self, causal):
        LAYER(X, causal=bool(causal))
        with pytest.raises(ConfigError, match=r"causal=.* must be bool or None"):
            LAYER(X, causal=causal)

    @pytest.mark.parametrize("call", [lambda: LAYER(X[..., :23]), lambda: LAYER(X, keep=flags(1, 1, 5, 6))])
    def test_what_fits_runs_after_a_refusal(self, call):
        with pytest.raises(ShapeError):
            call()
        assert LAYER(X).shape == X.shape
