"""The layers of both libraries against the specification, over every option; what they share: settings, files, hooks, caches."""

import dataclasses
import inspect
import itertools
from collections import OrderedDict

import numpy as np
import pytest
import torch
from allpairspy import AllPairs
from options import PAIRWISE, VALUES, draw
from safetensors.numpy import save_file

import attnspec
import attnspec.numpy
import attnspec.torch
from attnspec import ConfigError, Heads, Mask, Parameters, Policy, Rotation, layouts
from attnspec.layers import fused
from attnspec.layers.promises import CACHED

# Rounding, as in test_options: two orders of the same additions differ by at most a few times 40 * 10 * 2^-53.
ROUNDING = 2e-13

LAYERS = {"numpy": attnspec.numpy.MultiHeadAttention, "torch": attnspec.torch.MultiHeadAttention}
WRAP = {"numpy": np.asarray, "torch": torch.as_tensor}

FUSABLE = VALUES | {name: VALUES[name][:1] for name in ("cap", "sinks", "softmax_precision", "product_precision", "empty_row", "dropout")}
FUSED = [
    dict(zip(FUSABLE, values, strict=True)) for values in AllPairs(OrderedDict((n, range(len(v))) for n, v in FUSABLE.items()).values())
]
FUSED = [{name: FUSABLE[name][index] for name, index in choice.items()} for choice in FUSED]


def layer_of(library, choice, seed):
    """A layer, its call and what the specification says to it."""
    drawn = draw(choice, seed=seed)
    options = dict(drawn.options)
    policy = dataclasses.replace(options.pop("policy"), scale=options.pop("scale"))
    dropout = options.pop("dropout", None)
    layer = LAYERS[library].from_parameters(drawn.parameters, policy=policy)
    if dropout is not None:
        layer._dropout = drawn.convert(WRAP[library]).options["dropout"]
    given = drawn.convert(WRAP[library])
    for name in ("policy", "scale", "dropout"):
        given.options.pop(name, None)
    return layer, given, drawn


@pytest.fixture(autouse=True)
def no_gradients(request):
    """Results can be read by NumPy."""
    with torch.set_grad_enabled("gradients" in request.node.name):
        yield


@pytest.fixture
def no_steps(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the steps ran, not the kernel")

    monkeypatch.setattr(fused, "attend_all", refuse)


@pytest.mark.parametrize("library", LAYERS)
@pytest.mark.parametrize("choice", PAIRWISE, ids=[f"pair{index}" for index in range(len(PAIRWISE))])
def test_a_layer_computes_what_the_specification_says_for_every_pair_of_options(choice, library):
    layer, given, drawn = layer_of(library, choice, seed=4)
    for _ in range(2):  # judged, then known
        np.testing.assert_allclose(layer(given.x, **given.options), drawn.run(), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("library", LAYERS)
@pytest.mark.parametrize("choice", FUSED, ids=[f"pair{index}" for index in range(len(FUSED))])
def test_the_kernel_computes_what_the_specification_says_for_every_pair_of_its_options(choice, library, no_steps):
    layer, given, drawn = layer_of(library, choice, seed=5)
    np.testing.assert_allclose(layer(given.x, **given.options), drawn.run(), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("choice", FUSED, ids=[f"pair{index}" for index in range(len(FUSED))])
def test_the_kernel_has_the_gradients_of_the_specification(choice, no_steps):
    layer, given, drawn = layer_of("torch", choice, seed=6)
    spec = drawn.convert(torch.from_numpy)
    inputs = {"x": given.x, **{n: a for n in ("context", "context_v", "bias") if (a := given.options.get(n)) is not None}}
    leaves = {name: array.clone().requires_grad_() for name, array in inputs.items()}
    parameters = dict(layer.named_parameters())
    options = given.options | {name: array for name, array in leaves.items() if name != "x"}
    y = layer(leaves["x"], **options)
    along = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0))
    got = torch.autograd.grad((y * along).sum(), [*leaves.values(), *parameters.values()])
    wanted_leaves = {name: array.clone().requires_grad_() for name, array in inputs.items()}
    own = {name: array.detach().clone().requires_grad_() for name, array in parameters.items()}
    wanted = attnspec.multi_head_attention(
        wanted_leaves["x"], Parameters(**own), **spec.options | {n: a for n, a in wanted_leaves.items() if n != "x"}
    )
    expected = torch.autograd.grad((wanted * along).sum(), [*wanted_leaves.values(), *own.values()])
    for name, one, other in zip([*leaves, *parameters], got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=50 * ROUNDING, msg=lambda message, name=name: f"{name}: {message}")


@pytest.mark.parametrize("library", LAYERS)
@pytest.mark.parametrize("choice", FUSED[::2], ids=[f"pair{index}" for index in range(len(FUSED))][::2])
def test_needed_weights_are_those_of_the_specification(choice, library):
    layer, given, drawn = layer_of(library, choice, seed=7)
    y, weights = layer(given.x, need="weights", **given.options)
    with attnspec.trace() as steps:
        wanted = drawn.run()
    np.testing.assert_allclose(y, wanted, rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(weights, steps["softmax"].result, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("library", LAYERS)
def test_plain_calls_take_the_kernel_too(library, no_steps):
    layer = attnspec.MultiHeadAttention(24, 4, seed=0, backend=library, dtype=WRAP[library](np.zeros(1)).dtype)
    x = np.random.default_rng(0).normal(size=(2, 5, 24))
    parameters = LAYERS["numpy"].from_layer(layer).to_parameters()
    for options in ({}, {"causal": True}, {"causal": False}):
        wanted = attnspec.multi_head_attention(x, parameters, **options)
        for _ in range(2):
            np.testing.assert_allclose(layer(WRAP[library](x), **options), wanted, rtol=0, atol=ROUNDING)


POLICIES = [
    Policy(scale=0.0),
    Policy(scale=-0.3),
    Policy(cap=1.5),
    Policy(cap=1.5, cap_order="after"),
    Policy(causal_anchor="bottom_right"),
    Policy(window=(1, None)),
    Policy(empty_row="nan"),
    Policy(grouping="strided"),
    Policy(rotation=Rotation()),
    Policy(normalise="rms"),
    Policy(normalise="l2", epsilon=0.1),
    Policy(softmax_precision="float32"),
    Policy(product_precision="float32"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("library", LAYERS)
def test_plain_calls_keep_to_the_policy_also_when_they_are_known(library, policy):
    assert {field.name for field in dataclasses.fields(Policy)} == {
        name for one in POLICIES for name, value in vars(one).items() if value != getattr(Policy(), name)
    }
    parameters = Parameters.random(Heads(d_model=24, h=4, h_kv=2), seed=1)
    layer = LAYERS[library].from_parameters(parameters, policy=policy)
    x = np.random.default_rng(0).normal(size=(2, 5, 24))
    for causal in (False, True):
        wanted = attnspec.multi_head_attention(x, parameters, causal=causal, policy=policy)
        for _ in range(2):
            np.testing.assert_allclose(
                layer(WRAP[library](x), causal=causal), wanted, rtol=0, atol=1e-6 if "float32" in str(policy) else ROUNDING
            )


def same_calls(**settings):
    """Layers of both libraries of the same settings and parameters, in float64."""
    numpy = attnspec.numpy.MultiHeadAttention(24, 4, seed=3, dtype=np.float64, **settings)
    torch_ = attnspec.torch.MultiHeadAttention(24, 4, seed=3, dtype=torch.float64, **settings)
    return numpy, torch_


@pytest.mark.parametrize(
    "settings",
    [{}, {"h_kv": 2}, {"d_k": 5, "d_v": 7}, {"bias": False}, {"rope": True}, {"window": (2, 0)}, {"qk_norm": "rms"}, {"dropout": 0.5}],
    ids=str,
)
def test_one_interface_same_settings_same_seed_same_results(settings):
    numpy, torch_ = same_calls(**settings)
    x = np.random.default_rng(1).normal(size=(2, 5, 24))
    assert {name for name, _ in torch_.named_parameters()} == {n for n, a in vars(numpy.to_parameters()).items() if a is not None}
    np.testing.assert_allclose(numpy.eval()(x), torch_.eval()(torch.from_numpy(x)), rtol=0, atol=ROUNDING)
    assert numpy.policy == torch_.policy
    assert numpy.heads == torch_.heads


def test_both_constructors_and_calls_have_the_same_names():
    for method in ("__init__", "forward", "from_parameters", "from_layout", "from_layer", "save", "load", "on", "new_cache"):
        one, other = (inspect.signature(getattr(layer, method)).parameters for layer in LAYERS.values())
        assert list(one) == list(other)


SHORTHANDS = [
    ({"rope": True}, {"rotation": Rotation()}),
    ({"rope": Rotation(base=5.0)}, {"rotation": Rotation(base=5.0)}),
    ({"window": (3, None)}, {"window": (3, None)}),
    ({"qk_norm": "layer"}, {"normalise": "layer"}),
]


@pytest.mark.parametrize(("settings", "fields"), SHORTHANDS, ids=str)
@pytest.mark.parametrize("library", LAYERS)
def test_a_shorthand_is_a_field_of_the_policy(library, settings, fields):
    assert LAYERS[library](24, 4, **settings).policy == Policy(**fields)
    with pytest.raises(ConfigError, match=r"both say the same thing; give one"):
        LAYERS[library](24, 4, policy=Policy(**fields), **settings)


@pytest.mark.parametrize(("writer", "reader"), list(itertools.product(LAYERS, LAYERS)))
def test_a_file_written_by_one_library_is_read_by_the_other(tmp_path, writer, reader):
    policy = Policy(rotation=Rotation(pairing="interleaved", width=4), window=(3, None), cap=2.0, empty_row="nan", scale=0.2)
    layer = LAYERS[writer](24, 4, h_kv=2, policy=policy, qk_norm="rms", dropout=0.25, seed=1)
    layer.save(tmp_path / "layer.safetensors")
    read = LAYERS[reader].load(tmp_path / "layer.safetensors")
    assert (read.policy, read.heads, read.dropout) == (layer.policy, layer.heads, layer.dropout)
    for name, array in vars(LAYERS["numpy"].from_layer(layer).to_parameters()).items():
        np.testing.assert_array_equal(vars(LAYERS["numpy"].from_layer(read).to_parameters())[name], array)


@pytest.mark.parametrize("library", LAYERS)
def test_a_file_of_something_else_is_refused(tmp_path, library):
    save_file({"w_q": np.zeros((1, 2, 2), np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"other.safetensors was not saved by a layer; from_layout reads what other projects store\."):
        LAYERS[library].load(tmp_path / "other.safetensors")


TORCH_LAYERS = [
    {},
    {"bias": False},
    {"kdim": 10, "vdim": 14},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"dropout": 0.5},
    {"batch_first": False},
]


@pytest.mark.parametrize("options", TORCH_LAYERS, ids=str)
@pytest.mark.parametrize("library", LAYERS)
def test_a_layer_of_pytorch_becomes_one_of_ours_and_goes_back(library, options):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(24, 4, dtype=torch.float64, **{"batch_first": True, **options}).eval()
    torch.nn.init.normal_(theirs.out_proj.weight)
    ours = LAYERS[library].from_layer(theirs).eval()
    assert ours.dropout == theirs.dropout
    x, key, value = (torch.randn(2, n, d, dtype=torch.float64) for n, d in ((5, 24), (7, theirs.kdim), (7, theirs.vdim)))
    order = (lambda a: a) if theirs.batch_first else (lambda a: a.transpose(0, 1))
    wanted, weights = theirs(order(x), order(key), order(value), average_attn_weights=False)
    wrap = WRAP[library] if library == "torch" else torch.Tensor.numpy
    y, own = ours(wrap(x), context=wrap(key), context_v=wrap(value), need="weights")
    np.testing.assert_allclose(np.asarray(y), order(wanted), rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(np.asarray(own), weights, rtol=0, atol=ROUNDING)
    if library == "torch" and not options.get("add_zero_attn"):
        back = ours.to_layer()
        assert not back.training
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(back.state_dict()[name], tensor)


NO_PLACE = [
    ({"h_kv": 2}, {}, "h_kv=2"),
    ({"d_k": 5}, {}, "d_k=5, d_v=5"),
    ({"rope": True}, {}, "policy.rotation=Rotation(pairing='half', width=None, base=10000.0)"),
    ({}, {"b_o": None}, "b_q and b_k and b_v without the other biases"),
    ({}, {"extra_k": np.zeros((4, 2, 6)), "extra_v": np.zeros((4, 2, 6))}, "extra=2 extra keys"),
]


@pytest.mark.parametrize(("settings", "changed", "what"), NO_PLACE, ids=str)
def test_what_pytorch_has_no_place_for_is_said(settings, changed, what):
    numpy = attnspec.numpy.MultiHeadAttention(24, 4, dtype=np.float64, **settings)
    parameters = dataclasses.replace(numpy.to_parameters(), **changed)
    layer = attnspec.torch.MultiHeadAttention.from_parameters(parameters, policy=numpy.policy)
    with pytest.raises(ConfigError) as error:
        layer.to_layer()
    assert str(error.value) == f"to_layer: torch.nn.MultiheadAttention has no place for {what}."


@pytest.mark.parametrize("library", LAYERS)
def test_a_class_that_is_not_known_is_refused(library):
    with pytest.raises(ConfigError, match=r"from_layer: a Linear is not known, torch.nn.MultiheadAttention and the layers of attnspec are"):
        LAYERS[library].from_layer(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("layout", [name for name in layouts.LAYOUTS if name not in {"onnxruntime", "torch_separate", "qwen3", "gpt_oss"}])
@pytest.mark.parametrize("library", LAYERS)
def test_state_dicts_of_other_projects_become_layers_and_go_back(library, layout):
    heads = Heads(d_model=24, h=4)
    parameters = Parameters.random(heads, seed=2)
    stored = {name: WRAP[library](array) for name, array in layouts.write(parameters, layout).items()}
    layer = LAYERS[library].from_layout(stored, layout, heads)
    x = np.random.default_rng(0).normal(size=(2, 5, 24))
    np.testing.assert_allclose(layer(WRAP[library](x)), attnspec.multi_head_attention(x, parameters), rtol=0, atol=ROUNDING)
    for name, array in layer.to_layout(layout).items():
        np.testing.assert_array_equal(np.asarray(array), stored[name])


@pytest.mark.parametrize("library", LAYERS)
@pytest.mark.parametrize("settings", [{}, {"h_kv": 2, "rope": True}, {"window": (3, 0)}, {"policy": Policy(cap=1.0)}], ids=str)
@pytest.mark.parametrize("chunks", [(1,) * 9, (4, 1, 1, 3), (9,)], ids=str)
def test_decoding_equals_the_full_run(library, settings, chunks):
    layer = LAYERS[library](24, 4, seed=5, dtype=WRAP[library](np.zeros(1)).dtype, **settings)
    x = WRAP[library](np.random.default_rng(0).normal(size=(2, 9, 24)))
    cache, start, found = layer.new_cache(batch=2, room=3), 0, []
    for count in chunks:
        y, cache = layer(x[:, start : start + count], cache=cache)
        start += count
        found.append(np.asarray(y))
    np.testing.assert_allclose(np.concatenate(found, 1), layer(x, causal=True), rtol=0, atol=ROUNDING)
    assert cache.seen == 9


@pytest.mark.parametrize("library", LAYERS)
def test_caches_share_room_and_never_change_what_an_earlier_one_holds(library):
    layer = LAYERS[library](24, 4, seed=5)
    x = WRAP[library](np.random.default_rng(0).normal(size=(2, 6, 24)).astype("float32"))
    _, first = layer(x[:, :3], cache=layer.new_cache(batch=2, room=8))
    before = np.asarray(first.keys).copy()
    _, one = layer(x[:, 3:4], cache=first)
    _, other = layer(x[:, 4:5], cache=first)
    np.testing.assert_array_equal(first.keys, before)
    assert np.shares_memory(np.asarray(one.keys), np.asarray(first.keys))
    assert not np.shares_memory(np.asarray(other.keys), np.asarray(first.keys))
    y, _ = layer(x[:, 5:6], cache=other.reorder(WRAP[library](np.array([1, 0]))))
    past, new = np.asarray(x)[::-1, [0, 1, 2, 4]], np.asarray(x)[:, 5:6]
    whole = WRAP[library](np.concatenate([past, new], axis=1))
    np.testing.assert_allclose(y, layer(whole, causal=True)[:, -1:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("library", LAYERS)
def test_a_decoded_token_is_judged_once_whatever_the_length(library):
    layer = LAYERS[library](24, 4, seed=5)
    x = WRAP[library](np.ones((1, 1, 24), "float32"))
    _, cache = layer(x, cache=layer.new_cache())
    judged = len(CACHED._known)
    for _ in range(40):
        _, cache = layer(x, cache=cache)
    assert len(CACHED._known) == judged


@pytest.mark.parametrize("library", LAYERS)
def test_one_sequence_needs_no_batch(library):
    layer = LAYERS[library](24, 4, seed=5)
    x = np.random.default_rng(0).normal(size=(5, 24)).astype("float32")
    context = np.random.default_rng(1).normal(size=(7, 24)).astype("float32")
    x, context = WRAP[library](x), WRAP[library](context)
    keep = Mask.keep(WRAP[library](np.random.default_rng(0).random((5, 7)) < 0.7), "seq_q seq_k")
    y, weights = layer(x, context=context, keep=keep, need="weights")
    wanted, wanted_weights = layer(x[None], context=context[None], keep=keep, need="weights")
    np.testing.assert_array_equal(np.asarray(y), np.asarray(wanted)[0])
    assert tuple(weights.shape) == tuple(wanted_weights.shape)[1:]
    y, cache = layer(x, cache=layer.new_cache())
    assert tuple(y.shape) == (5, 24)
    assert cache.seen == 5


@pytest.mark.parametrize("library", LAYERS)
def test_dropout_happens_in_training_alone_and_keeps_the_mean(library):
    seq = 64
    torch.manual_seed(0)
    layer = LAYERS[library](seq, 1, d_v=seq, dropout=0.25, seed=0, bias=False)
    eye = np.eye(seq, dtype="float32")
    arrays = dataclasses.replace(
        LAYERS["numpy"].from_layer(layer).to_parameters(), w_v=eye[None], w_o=eye, w_q=np.zeros((1, seq, seq), "float32")
    )
    layer = LAYERS[library].from_parameters(arrays, dropout=0.25)
    x = WRAP[library](eye[None])
    still = np.asarray(layer.eval()(x))
    np.testing.assert_allclose(still, 1 / seq, rtol=1e-5)
    y = layer.train()(x)
    found = np.asarray(y)
    dropped = found == 0
    np.testing.assert_allclose(found[~dropped], 1 / seq / 0.75, rtol=1e-5)
    assert abs(dropped.mean() - 0.25) < 6 * (0.25 * 0.75 / seq**2) ** 0.5
    assert not np.array_equal(found, layer(x))


@pytest.mark.parametrize("library", LAYERS)
def test_hooks_see_and_replace_the_results_of_steps(library):
    layer = LAYERS[library](24, 4, seed=5)
    x = WRAP[library](np.random.default_rng(0).normal(size=(2, 5, 24)).astype("float32"))
    before = layer(x)
    seen = []
    handles = [layer.on("softmax", seen.append), layer.on("blend", lambda blended: blended * 0)]
    silent = layer(x)
    assert tuple(seen[0].shape) == (2, 4, 5, 5)
    assert float(abs(silent).max()) == 0.0
    for handle in handles:
        handle.remove()
    assert bool((layer(x) == before).all())
    assert len(seen) == 1
    with pytest.raises(ConfigError, match=r"on: there is no step 'softmx'; the steps are append_to_cache, "):
        layer.on("softmx", print)


@pytest.mark.parametrize("library", LAYERS)
def test_trace_and_substitute_reach_into_a_layer(library):
    layer = LAYERS[library](24, 4, seed=5)
    x = WRAP[library](np.random.default_rng(0).normal(size=(2, 5, 24)).astype("float32"))
    with attnspec.trace() as steps:
        y = layer(x)
    assert list(steps) == ["project_queries", "project_keys", "project_values", "score", "scale", "softmax", "blend", "concatenate", "mix"]
    assert steps["mix"].result is y
    with attnspec.substitute(scale=lambda scores, /, *, d_k: scores * 0):
        y, weights = layer(x, need="weights")
    np.testing.assert_allclose(weights, 0.2, rtol=1e-6)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match=r"MultiHeadAttention: backend='jax' must be 'numpy' or 'torch'\."):
        attnspec.MultiHeadAttention(24, 4, backend="jax")
