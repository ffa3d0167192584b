"""The drop-in for `torch.nn.MultiheadAttention`: same constructor, state dict and numbers; better errors."""

import inspect
import itertools

import pytest
import torch

import attnspec
from attnspec import AttnspecError, ConfigError, ShapeError
from attnspec.torch import MultiheadAttention

BATCH, SEQ_Q, SEQ_K, WIDTH, H = 2, 5, 7, 24, 4

# Rounding: sums of 24 products of numbers of size 1, in float64.
ROUNDING = 1e-13

CONSTRUCTORS = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    {"kdim": 10, "vdim": 14},
    {"kdim": 10, "vdim": 14, "add_bias_kv": True},
]
KEY_MASKS = ("none", "bool", "float")
MASKS = ("none", "bool", "float", "bool of each head", "float of each head", "causal")


def pair(**options):
    """PyTorch's layer and ours, of one seed."""
    layers = []
    for kind in (torch.nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(0)
        layers.append(kind(WIDTH, H, dtype=torch.float64, **options))
        for name, parameter in layers[-1].named_parameters():
            if "bias" in name:
                torch.nn.init.normal_(parameter)
    return layers


def inputs(layer, *, same=False, single=False):
    """Query, key and value in the layer's order of axes."""
    generator = torch.Generator().manual_seed(1)
    sizes = ((SEQ_Q, WIDTH), (SEQ_K, layer.kdim), (SEQ_K, layer.vdim))
    arrays = [torch.randn(BATCH, *size, dtype=torch.float64, generator=generator) for size in sizes]
    arrays = [arrays[0]] * 3 if same else arrays
    if single:
        return [array[0] for array in arrays]
    return arrays if layer.batch_first else [array.transpose(0, 1) for array in arrays]


def masks(key_mask, mask, *, seq_k=SEQ_K, single=False):
    """Masks in which every query keeps a key."""
    generator = torch.Generator().manual_seed(2)
    options = {}
    drop = torch.rand(BATCH, seq_k, generator=generator) < 0.4
    drop[:, :2] = False
    if key_mask != "none":
        options["key_padding_mask"] = drop if key_mask == "bool" else torch.where(drop, -torch.inf, 0.0).double()
    if mask == "causal":
        options |= {"attn_mask": torch.ones(SEQ_Q, seq_k, dtype=torch.bool).triu(1), "is_causal": True}
    elif mask != "none":
        shape = (BATCH * H, SEQ_Q, seq_k) if "each" in mask else (SEQ_Q, seq_k)
        drop = torch.rand(shape, generator=generator) < 0.4
        drop[..., :2] = False
        options["attn_mask"] = drop if "bool" in mask else torch.where(drop, -torch.inf, torch.randn(shape, generator=generator)).double()
    if single:
        options = {name: option[:H] if getattr(option, "ndim", 0) == 3 else option for name, option in options.items()}
        options |= {"key_padding_mask": options["key_padding_mask"][0]} if key_mask != "none" else {}
    return options


def agree(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=ROUNDING)
    assert (ours[1] is None) == (theirs[1] is None)
    if theirs[1] is not None:
        torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=ROUNDING)


def test_it_is_one_of_pytorchs_with_the_same_constructor_and_call():
    assert issubclass(MultiheadAttention, torch.nn.MultiheadAttention)
    for method in ("__init__", "forward"):
        one, other = (inspect.signature(getattr(kind, method)) for kind in (MultiheadAttention, torch.nn.MultiheadAttention))
        assert {n: p.default for n, p in one.parameters.items()} == {n: p.default for n, p in other.parameters.items()}


@pytest.mark.parametrize("options", CONSTRUCTORS, ids=str)
def test_the_state_dict_and_the_draw_of_a_seed_are_pytorchs(options):
    theirs, ours = pair(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", CONSTRUCTORS, ids=str)
def test_the_numbers_are_pytorchs_for_every_mask(options, batch_first, single, training):
    theirs, ours = (layer.train(training) for layer in pair(batch_first=batch_first, **options))
    given = inputs(ours, single=single)
    for key_mask, mask, need, average in itertools.product(KEY_MASKS, MASKS, (True, False), (True, False)):
        if {key_mask, mask.removesuffix(" of each head").replace("causal", "bool")} == {"bool", "float"}:
            continue  # PyTorch warns of this mixture
        call = masks(key_mask, mask, single=single) | {"need_weights": need, "average_attn_weights": average}
        agree(ours(*given, **call), theirs(*given, **call))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("options", CONSTRUCTORS[:5], ids=str)
def test_self_attention_has_the_numbers_of_pytorch(options, gradients, training):
    theirs, ours = (layer.train(training) for layer in pair(batch_first=True, **options))
    given = inputs(ours, same=True)
    with torch.set_grad_enabled(gradients):
        for key_mask, mask, need in itertools.product(("none", "bool"), ("none", "bool", "causal"), (True, False)):
            call = masks(key_mask, mask, seq_k=SEQ_Q) | {"need_weights": need}
            agree(ours(*given, **call), theirs(*given, **call))


@pytest.mark.parametrize("need", [True, False])
def test_the_gradients_are_pytorchs(need):
    found = []
    for layer in pair(batch_first=True, add_bias_kv=True):
        given = [array.requires_grad_() for array in inputs(layer)]
        y, weights = layer(*given, **masks("bool", "bool of each head"), need_weights=need)
        loss = (y**2).sum() + (0 if weights is None else (weights**3).sum())
        found.append(torch.autograd.grad(loss, [*given, *layer.parameters()]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_dropout_draws_as_pytorch_does_where_weights_are_needed():
    theirs, ours = pair(batch_first=True, dropout=0.5)
    given = inputs(ours)
    for need in (True, False):
        found = []
        for layer in (ours, theirs):
            torch.manual_seed(3)
            found.append(layer(*given, need_weights=need))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_query_without_keys_gets_the_bias_of_the_output_in_every_mode(kind, need, training):
    _, ours = pair(batch_first=True)
    ours.train(training)
    drop = torch.zeros(SEQ_Q, SEQ_K, dtype=torch.bool)
    drop[2] = True
    y, weights = ours(
        *inputs(ours),
        need_weights=need,
        attn_mask=drop if kind == "bool" else torch.zeros(drop.shape).double().masked_fill(drop, -torch.inf),
    )
    assert torch.equal(y[:, 2], ours.out_proj.bias.expand(BATCH, WIDTH))
    assert weights is None or not weights[:, 2].any()


def test_a_dropped_key_has_no_influence_even_if_it_is_not_finite():
    _, ours = pair(batch_first=True)
    query, key, value = inputs(ours)
    drop = torch.zeros(BATCH, SEQ_K, dtype=torch.bool)
    drop[:, -1] = True
    for need in (True, False):
        clean = ours(query, key, value, key_padding_mask=drop, need_weights=need)
        key[:, -1], value[:, -1] = torch.nan, torch.inf
        agree(ours(query, key, value, key_padding_mask=drop, need_weights=need), clean)
        key[:, -1], value[:, -1] = 0.0, 0.0


def call(layer, **changed):
    query, key, value = inputs(layer)
    return lambda: layer(**{"query": query, "key": key, "value": value, **changed})


REFUSED = [
    (
        {"query": torch.zeros(BATCH, SEQ_Q, 20).double()},
        "query (2, 5, 20) has d_model=20, but d_model=24 was set when the layer was built.",
    ),
    ({"key": torch.zeros(3, SEQ_K, WIDTH).double()}, "key (3, 7, 24) has batch=3, but batch=2 was set by query (2, 5, 24)."),
    (
        {"value": torch.zeros(BATCH, 6, WIDTH).double()},
        "value (2, 6, 24) has seq_k=6, but seq_k=7 was set by key (2, 7, 24). Keys and values come in pairs, from the same positions.",
    ),
    ({"query": torch.zeros(BATCH, SEQ_Q, WIDTH)}, "query is of dtype float32, but w_q is of dtype float64; one call takes one."),
    ({"query": torch.zeros(BATCH, SEQ_Q, WIDTH, dtype=torch.int64)}, "query is int64, but must be floating-point."),
    ({"query": torch.zeros(BATCH, SEQ_Q, WIDTH, device="meta").double()}, "query is on meta, but w_q is on cpu; one call takes one."),
    ({"attn_mask": torch.zeros(SEQ_K, SEQ_Q, dtype=torch.bool)}, "attn_mask (7, 5) has seq_q=7, but seq_q=5 was set by query (2, 5, 24)."),
    (
        {"attn_mask": torch.zeros(BATCH, SEQ_Q, SEQ_K, dtype=torch.bool)},
        "attn_mask (2, 5, 7) has batch*h=2, but batch*h=8 was set by query (2, 5, 24) and when the layer was built.",
    ),
    (
        {"key_padding_mask": torch.zeros(BATCH, SEQ_Q, dtype=torch.bool)},
        "key_padding_mask (2, 5) has seq_k=5, but seq_k=7 was set by key (2, 7, 24).",
    ),
    (
        {"key_padding_mask": torch.zeros(BATCH, SEQ_K, dtype=torch.int64)},
        "key_padding_mask is int64, but must be boolean (True: the key is dropped) or floating-point (added to the scores).",
    ),
    ({"is_causal": True}, "is_causal=True is a hint about attn_mask; give attn_mask too."),
    ({"key": [1.0]}, "key is a list, but must be an array (of NumPy, PyTorch or another array-API library)."),
]


@pytest.mark.parametrize(("changed", "sentence"), REFUSED, ids=[sentence[:40] for _, sentence in REFUSED])
def test_what_does_not_fit_is_refused_in_one_sentence(changed, sentence):
    _, ours = pair(batch_first=True)
    with pytest.raises(AttnspecError) as error:
        call(ours, **changed)()
    assert str(error.value).partition(" Perhaps ")[0] == f"MultiheadAttention: {sentence}"


def test_the_order_of_axes_is_part_of_the_promise():
    _, ours = pair(batch_first=False)
    with pytest.raises(ShapeError, match=r"key \(2, 7, 24\) has batch=7, but batch=5 was set by query \(2, 5, 24\)"):
        ours(torch.zeros(2, 5, 24).double(), torch.zeros(2, 7, 24).double(), torch.zeros(2, 7, 24).double())


def test_it_is_what_the_specification_says():
    _, ours = pair(batch_first=True)
    query, key, value = inputs(ours)
    drop = masks("none", "bool")["attn_mask"]
    parameters = attnspec.torch.MultiHeadAttention.from_layer(ours).to_parameters()
    wanted = attnspec.multi_head_attention(query, parameters, context=key, context_v=value, keep=~drop[None, None])
    torch.testing.assert_close(ours(query, key, value, attn_mask=drop, need_weights=False)[0], wanted, rtol=0, atol=ROUNDING)


def test_a_constructor_that_does_not_fit_is_refused():
    with pytest.raises((AssertionError, ConfigError)):
        MultiheadAttention(24, 5)
