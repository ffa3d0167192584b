"""Gradients: right implementations pass, and each slip of a backward is named for what it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from test_oracle_properties import EQUAL, GROUPED, layer_subject, profile_of, subject_of, torch_attention

from attnspec import Heads, Policy, Rotation
from attnspec.oracle import backward as backward_module
from attnspec.oracle import gradients as gradients_module
from attnspec.oracle.gradients import check_gradients


def outcomes(function, *, heads=(EQUAL,), policy=None, causal=False, library="torch", backward=None, **said):
    subject = subject_of(function, library=library, **said)
    return check_gradients(subject, profile_of(subject, heads=heads, policy=policy, causal=causal), seed=0, backward=backward)


def failed(found):
    assert found
    return {outcome.kind for outcome in found if outcome.passed is False}


def said(found):
    return " ".join(outcome.sentence for outcome in found if outcome.passed is False)


def right(
    queries,
    keys,
    values,
    *,
    keep=None,
    causal=False,
    scale=None,
    bias=None,
    sinks=None,
    slopes=None,
    gates=None,
    dropout=0.0,
    survivors=None,
):
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = queries @ keys.mT * (queries.shape[3] ** -0.5 if scale is None else scale)
    i, j = torch.arange(scores.shape[2])[:, None], torch.arange(scores.shape[3])
    scores = scores if slopes is None else scores - slopes[:, None, None] * (i - j).abs()
    scores = scores if bias is None else scores + bias
    kept = torch.ones(scores.shape, dtype=torch.bool) if keep is None else keep.expand(scores.shape)
    kept = kept & (j <= i) if causal else kept
    scores = scores.masked_fill(~kept, -torch.inf)
    scores = scores if sinks is None else torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    empty = ~kept.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0), -1)[..., : kept.shape[3]].masked_fill(empty, 0)
    weights = weights if survivors is None else weights * survivors / (1 - dropout)
    y = weights @ values
    return y if gates is None else y * gates[:, None, None]


@pytest.mark.parametrize("heads", [(EQUAL,), (GROUPED,), (GROUPED, EQUAL)])
def test_right_gradients_pass(heads):
    found = outcomes(right, heads=heads, policy=Policy())
    assert [outcome.passed for outcome in found] == [True]
    assert int(found[0].detail.split()[0]) > 15


def test_the_attention_of_torch_passes():
    found = outcomes(
        torch.nn.functional.scaled_dot_product_attention, call=torch_attention, heads=(GROUPED,), policy=Policy(empty_row="any")
    )
    assert [outcome.passed for outcome in found] == [True]


def test_the_layer_of_torch_passes():
    found = check_gradients(*layer_subject(torch.nn.MultiheadAttention(24, 4, batch_first=True), Heads(d_model=24, h=4)), seed=0)
    assert [outcome.passed for outcome in found] == [True]


def jax_attention(queries, keys, values, *, keep=None, sinks=None):
    scores = queries @ keys.swapaxes(2, 3) * queries.shape[3] ** -0.5
    scores = scores if keep is None else jnp.where(keep, scores, -1e30)
    top = scores.max(-1, keepdims=True)
    powers = jnp.exp(scores - top)
    total = powers.sum(-1, keepdims=True) + (0 if sinks is None else jnp.exp(sinks[:, None, None] - top))
    return powers / total @ values


def jax_halved(queries, keys, values):
    return jax_attention(queries, keys, values / 2 + jax.lax.stop_gradient(values) / 2)


@pytest.mark.parametrize("with_torch", [True, False])
def test_jax_passes_and_fails_with_and_without_torch(with_torch, monkeypatch):
    if not with_torch:
        monkeypatch.setattr(gradients_module, "find_spec", lambda _: None)
        monkeypatch.setattr(gradients_module, "specified", None)
        monkeypatch.setattr(gradients_module, "limits", None)
    policy = Policy(empty_row="any")
    assert [outcome.passed for outcome in outcomes(jax_attention, library="jax", policy=policy)] == [True]
    found = outcomes(jax_halved, library="jax", policy=policy)
    assert failed(found) == {"gradient_wrong"}
    assert "the gradient of values is 0.5 times" in said(found)


def test_the_axes_may_be_in_another_order():
    def function(queries, keys, values, *, keep=None):
        return right(*(x.transpose(1, 2) for x in (queries, keys, values)), keep=keep).transpose(1, 2)

    assert [outcome.passed for outcome in outcomes(function, order="bshd")] == [True]


def test_rotated_queries_have_their_gradients():
    def turn(x):
        half = x.shape[3] // 2
        angles = torch.arange(x.shape[2])[:, None] * 10_000.0 ** -(torch.arange(half, dtype=x.dtype) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    found = outcomes(lambda queries, keys, values: right(turn(queries), turn(keys), values), policy=Policy(rotation=Rotation()))
    assert [outcome.passed for outcome in found] == [True]


class Slip(torch.autograd.Function):
    """Attention with a backward of its own, in which one thing may be wrong."""

    @staticmethod
    def forward(ctx, queries, keys, values, slip, survivors, rate):  # noqa: PLR0917  # apply has no keywords
        scale = queries.shape[3] ** -0.5
        weights = torch.softmax(queries @ keys.mT * scale, -1)
        kept = torch.ones_like(weights) if survivors is None else survivors.to(weights.dtype) / (1 - rate)
        ctx.save_for_backward(queries, keys, values, weights, kept)
        ctx.scale, ctx.slip, ctx.rate = scale, slip, rate
        return weights * kept @ values

    @staticmethod
    def backward(ctx, grad):
        queries, keys, values, weights, kept = ctx.saved_tensors
        slip, scale = ctx.slip, ctx.scale
        of_values = (weights * kept).mT @ grad
        kept = kept * ctx.rate * (1 - ctx.rate) if slip == "rate" and kept.min() < 1 else kept
        of_weights = grad @ values.mT * kept
        of_scores = weights * (of_weights - (0 if slip == "row sum" else (weights * of_weights).sum(-1, keepdim=True)))
        of_scores = of_scores * (1 if slip == "scale" else scale)
        of_queries, of_keys = of_scores @ keys, of_scores.mT @ queries
        if slip == "zero":
            of_keys = of_keys * 0
        if slip == "nan":
            of_keys = of_keys / 0 * 0
        if slip == "other":
            of_queries = of_queries + of_queries.flip(2)
        return of_queries, None if slip == "none" else of_keys, of_values, None, None, None


def slipping(slip):
    return lambda queries, keys, values, *, dropout=0.0, survivors=None: Slip.apply(queries, keys, values, slip, survivors, dropout)


SLIPS = [
    ("row sum", "gradient_wrong", "without the sum over its row"),
    ("scale", "gradient_wrong", "which is 1/scale"),
    ("zero", "gradient_wrong", "the gradient of keys is zero"),
    ("nan", "gradient_wrong", "the gradient of keys is NaN"),
    ("other", "gradient_wrong", "the gradient of queries is off by up to"),
    ("none", "gradient_missing", "there is no gradient of keys"),
    ("rate", "dropout_arithmetic", "where weights are dropped"),
]


@pytest.mark.parametrize(("slip", "kind", "words"), SLIPS)
def test_a_slip_of_the_backward_is_named(slip, kind, words):
    found = outcomes(slipping(slip))
    assert failed(found) == {kind}, found
    assert words in said(found)
    assert "heads share" not in said(found)  # here every head has keys and values of its own


def test_the_same_backward_without_a_slip_passes():
    assert failed(outcomes(slipping(""))) == set()


def test_a_transposed_gradient_of_a_parameter_is_named():
    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.mT

    class Layer(torch.nn.MultiheadAttention):
        def forward(self, queries, keys, values, **options):
            shared = torch.nn.functional.multi_head_attention_forward
            swapped = (x.transpose(0, 1) for x in (queries, keys, values))
            y, _ = shared(
                *swapped, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0,
                Turned.apply(self.out_proj.weight), self.out_proj.bias, training=self.training, **options,
            )  # fmt: skip
            return y.transpose(0, 1), None

    found = check_gradients(*layer_subject(Layer(24, 4, batch_first=True), Heads(d_model=24, h=4)), seed=0)
    assert failed(found) == {"gradient_wrong"}
    assert "the gradient of out_proj.weight is transposed" in said(found)


def test_gradients_that_are_not_summed_over_a_group_are_named():
    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return x.repeat_interleave(group, 1)

        @staticmethod
        def backward(ctx, grad):
            return grad[:, :: ctx.group], None

    def function(queries, keys, values):
        group = queries.shape[1] // keys.shape[1]
        return right(queries, Shared.apply(keys, group), Shared.apply(values, group))

    found = outcomes(function, heads=(GROUPED, EQUAL))
    assert failed(found) == {"gradient_wrong"}
    assert "not summed over the group" in said(found)


def test_nan_gradients_of_an_empty_row_are_named():
    def function(queries, keys, values, *, keep=None):
        scores = queries @ keys.mT * queries.shape[3] ** -0.5
        scores = scores if keep is None else scores + torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
        return torch.softmax(scores, -1).nan_to_num(0) @ values

    assert failed(outcomes(function, policy=Policy(empty_row="zero"))) == {"fully_masked_row"}
    assert failed(outcomes(function, policy=Policy(empty_row="any"))) == set()


def test_a_gradient_that_is_missing_only_alone_is_named():
    def function(queries, keys, values, *, bias=None):
        cut = not queries.requires_grad
        return right(queries, keys, values, bias=bias.detach() if cut and bias is not None else bias)

    found = outcomes(function)
    assert failed(found) == {"gradient_missing"}
    assert "bias" in said(found)


def test_a_backward_that_raises_only_alone_is_named():
    class Fragile(torch.autograd.Function):
        @staticmethod
        def forward(ctx, queries, keys, values):
            ctx.save_for_backward(queries, keys, values)
            return right(queries, keys, values)

        @staticmethod
        def backward(ctx, grad):
            if not ctx.needs_input_grad[0]:
                raise RuntimeError("no queries")
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                return torch.autograd.grad(right(*inputs), inputs, grad)

    found = outcomes(lambda queries, keys, values: Fragile.apply(queries, keys, values))  # noqa: PLW0108  # its signature is read
    assert failed(found) == {"gradient_missing"}
    assert "raises an error where only keys asks" in said(found)


def test_a_cut_parameter_of_a_layer_is_named():
    class Cut(torch.nn.MultiheadAttention):
        def forward(self, *inputs, **options):
            self.out_proj.bias.requires_grad_(False)
            return super().forward(*inputs, **options)

    found = check_gradients(*layer_subject(Cut(24, 4, batch_first=True), Heads(d_model=24, h=4)), seed=0)
    assert failed(found) == {"gradient_missing"}


def test_a_wrong_output_says_nothing_about_gradients():
    found = outcomes(lambda queries, keys, values: right(queries, keys, values) * 2)
    assert [outcome.passed for outcome in found] == [None]


class ByHand:
    """Attention on NumPy arrays that keeps what its backward needs."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, queries, keys, values):
        powers = np.exp(queries @ keys.swapaxes(2, 3) * queries.shape[3] ** -0.5)
        self.seen = queries, keys, values, powers / powers.sum(-1, keepdims=True)
        return self.seen[3] @ values

    def backward(self, grad):
        queries, keys, values, weights = self.seen
        of_weights = grad @ values.swapaxes(2, 3)
        scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * queries.shape[3] ** -0.5
        return {"queries": scores @ keys, "keys": scores.swapaxes(2, 3) @ queries * self.factor, "values": weights.swapaxes(2, 3) @ grad}


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_backward_written_by_hand_is_checked(factor):
    def call(layer, queries, keys, values):
        return layer(queries, keys, values)

    found = outcomes(lambda: None, library="numpy", call=call, target=ByHand(factor), backward=ByHand.backward)
    assert failed(found) == (set() if factor == 1.0 else {"gradient_wrong"})
    assert factor == 1.0 or "the gradient of keys is 3 times" in said(found)


def test_numpy_has_no_gradients():
    subject = subject_of(lambda queries, keys, values: values)
    assert check_gradients(subject, profile_of(subject), seed=0) == []


def test_differences_agree_with_the_derivative():
    subject = subject_of(right, library="torch")
    profile = profile_of(subject, policy=Policy())
    rng = np.random.default_rng(0)
    for problem in gradients_module._problems(gradients_module.Bench(subject, profile, 0)):
        cotangent = rng.normal(size=problem.run().y.shape)
        for name, grad in backward_module.specified(problem, cotangent).items():
            direction = rng.normal(size=grad.shape)
            slope = backward_module.slope_of(problem, cotangent, name, direction)
            assert slope == pytest.approx(np.sum(grad * direction), rel=1e-6, abs=1e-7)
