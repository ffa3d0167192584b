"""Tensors of implementations of all kinds are found, set and cast; a layout that does not fit is told from one that does."""

import os
import sys
import types
import warnings
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attnspec.numpy
import attnspec.torch
from attnspec import ConfigError, Heads, Parameters, Policy, ShapeError
from attnspec.oracle.design import Profile, draw
from attnspec.oracle.known import known
from attnspec.oracle.libraries import LIBRARIES, guess_library
from attnspec.oracle.options import OPTIONS
from attnspec.oracle.stores import Loader, cast, set_stored, set_training, stored
from attnspec.oracle.subject import Crash, Subject, fits, read_signature

NUMPY, TORCH, JAX = (LIBRARIES[name] for name in ("numpy", "torch", "jax"))

# Both sides compute sums of some 20 products of numbers up to 4 in float64, or some of it in float32, which they declare.
DOUBLE, SINGLE = 1e-12, 2e-6


class Projections(torch.nn.Module):
    """A layer of PyTorch that does nothing: it only has the tensors of attention."""

    def __init__(self, *, d_model=17, h=6, h_kv=2, d_k=5, out=True):
        super().__init__()
        self.q = torch.nn.Linear(d_model, h * d_k)
        self.k = torch.nn.Linear(d_model, h_kv * d_k, bias=False)
        self.v = torch.nn.Linear(d_model, h_kv * d_k)
        if out:
            self.out = torch.nn.Sequential(torch.nn.Linear(h * d_k, d_model, bias=False), torch.nn.Dropout(0.1))


HEADS = Heads(d_model=17, h=6, h_kv=2, d_k=5)
LAYOUT = {
    "w_q": ("q.weight", "(h d_k) d_model"),
    "w_k": ("k.weight", "(h_kv d_k) d_model"),
    "w_v": ("v.weight", "(h_kv d_v) d_model"),
    "w_o": ("out.0.weight", "d_model (h d_v)"),
    "b_q": ("q.bias", "(h d_k)"),
    "b_k": ("k.bias", "(h_kv d_k)"),
    "b_v": ("v.bias", "(h_kv d_v)"),
}


def load(target=None, *, heads=HEADS, library=TORCH, **lines):
    """Make a loader by the layout above, with other lines, or without those that are None."""
    lines = {held: line for held, line in {**LAYOUT, **lines}.items() if line is not None}
    return Loader(Projections() if target is None else target, heads, lines, library)


def drawn(template, seed=0):
    rng = np.random.default_rng(seed)
    return template.map(lambda array: rng.normal(size=array.shape))


class TestNames:
    def test_of_pytorch_are_those_of_its_modules_and_attributes(self):
        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.heads = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, bias=False)])
                self.register_buffer("table", torch.ones(4), persistent=False)
                self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
                self.own = SimpleNamespace(array=np.ones(5), parts=[torch.ones(6)])

        shapes = {name: tensor.shape for name, tensor in stored(Layer()).items()}
        heads = {"heads.0.weight": (2, 3), "heads.0.bias": (2,), "heads.1.weight": (2, 3)}
        assert shapes == {"table": (4,), **heads, "own.array": (5,), "own.parts.0": (6,)}

    def test_of_plain_objects_are_their_attributes_keys_and_numbers(self):
        @dataclass(frozen=True)
        class Frozen:
            w: np.ndarray

        class Slots:
            __slots__ = ("b", "unset")

            def __init__(self):
                self.b = np.ones(1, "float32")

        layer = SimpleNamespace(query_dense=SimpleNamespace(weights=np.ones((2, 3))), heads=[Frozen(np.ones(4))], d={"x": (np.ones(5), 7)})
        layer.slots, layer.itself, layer.whole = Slots(), layer, np.ones(2, int)
        found = stored(layer)
        assert list(found) == ["query_dense.weights", "heads.0.w", "d.x.0", "slots.b"]
        assert {array.dtype.name for array in found.values()} == {"float64"}
        changed = set_stored(
            layer, {"query_dense/weights": np.zeros((2, 3)), "heads.0.w": np.arange(4.0), "d.x.0": np.zeros(5)}, NUMPY, "float32"
        )
        assert changed is layer
        assert layer.heads[0].w.tolist() == [0, 1, 2, 3]
        assert [array.dtype.name for array in (layer.query_dense.weights, layer.heads[0].w, layer.d["x"][0])] == ["float32"] * 3
        assert layer.d["x"][1] == 7

    def test_arrays_that_cannot_be_written_to_are_replaced(self):
        layer = SimpleNamespace(w=np.ones(3))
        layer.w.flags.writeable = False
        kept = layer.w
        set_stored(layer, {"w": np.zeros(3)}, NUMPY, "float64")
        assert (layer.w.sum(), kept.sum()) == (0, 3)

    def test_a_tensor_with_two_names_is_set_under_both(self):
        weights = np.ones(3)
        layer = SimpleNamespace(w=weights, parameters=[weights])
        set_stored(layer, {"w": np.zeros(3)}, NUMPY, "float64")
        assert layer.parameters[0].sum() == 0

    def test_of_trees_of_jax_are_those_of_the_tree_which_is_copied(self):
        jnp = pytest.importorskip("jax").numpy
        tree = {"params": {"query": {"kernel": jnp.ones((2, 3))}, "scale": 2.0}}
        pair = (len, tree)
        assert {name: a.shape for name, a in stored(pair).items()} == {"params.query.kernel": (2, 3)}
        new = set_stored(pair, {"query/kernel": np.full((2, 3), 1 / 3)}, JAX, "float64")
        assert new[0] is len
        assert new[1]["params"]["query"]["kernel"].dtype == "float64"
        assert np.array_equal(stored(new)["params.query.kernel"], np.full((2, 3), 1 / 3))

    def test_of_classes_that_jax_knows_are_their_fields(self):
        jax = pytest.importorskip("jax")

        @jax.tree_util.register_dataclass
        @dataclass(frozen=True)
        class Linear:
            weight: object
            bias: object

        layer = Linear([jax.numpy.ones(2), jax.numpy.ones(3)], None)
        assert list(stored(layer)) == ["weight.0", "weight.1"]
        new = set_stored(layer, {"weight.1": np.zeros(3)}, JAX, "float32")
        assert isinstance(new, Linear)
        assert (float(layer.weight[1].sum()), float(new.weight[1].sum()), float(new.weight[0].sum())) == (3, 0, 2)

    def test_what_has_no_shape_yet_is_refused(self):
        with pytest.raises(ConfigError, match=r"layout: weight has no shape before the first call; call the layer once\."):
            stored(torch.nn.LazyLinear(3))
        with pytest.raises(ConfigError, match="has no floating-point tensors; if they are made in a call, call it once"):
            load(SimpleNamespace())


class TestCast:
    def test_pytorch_is_cast_with_buffers_and_attributes(self):
        layer = torch.nn.BatchNorm1d(3)
        layer.table, layer.array = torch.ones(2), np.ones(2, "float32")
        assert cast(layer, "float64", TORCH) is layer
        assert {tensor.dtype for tensor in [*layer.parameters(), layer.running_mean, layer.table]} == {torch.float64}
        assert layer.array.dtype == "float64"
        assert layer.num_batches_tracked.dtype == torch.int64
        cast(layer, "bfloat16", TORCH)
        assert (layer.weight.dtype, layer.table.dtype, layer.array.dtype) == (torch.bfloat16, torch.bfloat16, np.float64)

    def test_objects_and_trees_are_cast(self):
        jnp = pytest.importorskip("jax").numpy
        assert cast(SimpleNamespace(w=np.ones(2), n=np.ones(2, int)), "float16", NUMPY).w.dtype == "float16"
        whole = jnp.ones(2, int)
        new = cast((len, {"w": jnp.ones(2), "n": whole}), "float64", JAX)[1]
        assert (new["w"].dtype.name, new["n"].dtype) == ("float64", whole.dtype)


class TestTraining:
    def test_pytorch_is_switched_whole(self):
        layer = Projections()
        set_training(layer, False)
        assert not layer.out[1].training
        set_training(layer, True)
        assert layer.out[1].training

    def test_objects_are_switched_by_their_attribute(self):
        layer = SimpleNamespace(inner=[SimpleNamespace(training=True)], training="yes")
        set_training(layer, False)
        assert (layer.inner[0].training, layer.training) == (False, "yes")
        own = attnspec.numpy.MultiHeadAttention(4, 2)
        set_training(own, False)
        assert not own.training


class TestLoader:
    def test_parameters_come_to_their_places(self):
        layer = cast(Projections(), "float64", TORCH)
        loader = load(layer)
        template = loader.template
        assert {name for name, array in vars(template).items() if array is not None} == {"w_q", "w_k", "w_v", "w_o", "b_q", "b_v"}
        assert template.heads == HEADS
        assert not loader.fixed
        parameters = drawn(template)
        assert loader(layer, parameters, "float64") is layer
        x = np.random.default_rng(1).normal(size=(3, 17))
        mine = np.concatenate([x @ parameters.w_q[head] + parameters.b_q[head] for head in range(6)], axis=1)
        assert np.abs(layer.q(torch.from_numpy(x)).detach().numpy() - mine).max() < DOUBLE
        assert np.array_equal(layer.out[0].weight.detach().numpy(), parameters.w_o.T)

    def test_a_bias_that_is_left_out_becomes_zero(self):
        layer = Projections()
        load(layer)(layer, replace(drawn(load(layer).template), b_q=None), "float32")
        assert not layer.q.bias.any()
        assert layer.v.bias.all()

    def test_heads_may_have_a_tensor_each_and_biases_may_be_rows(self):
        rng = np.random.default_rng(0)
        heads = [SimpleNamespace(q=rng.normal(size=(5, 17)), qb=np.zeros((1, 5))) for _ in range(6)]
        groups = [SimpleNamespace(kv=rng.normal(size=(10, 17))) for _ in range(2)]
        layer = SimpleNamespace(heads=heads, groups=groups, o=np.zeros((30, 17)), b=np.zeros((1, 17)))
        lines = {
            "w_q": ("heads.{h}.q", "d_k d_model"), "b_q": ("heads.{h}.qb", "1 d_k"), "w_kv": ("groups.{h}.kv", "(two d_k) d_model"),
            "w_o": ("o", "(h d_v) d_model"), "b_o": ("b", "1 d_model"),
        }  # fmt: skip
        loader = Loader(layer, HEADS, lines, NUMPY)
        parameters = drawn(loader.template)
        loader(layer, parameters, "float64")
        for head in range(6):
            assert np.array_equal(heads[head].q, parameters.w_q[head].T)
            assert np.array_equal(heads[head].qb[0], parameters.b_q[head])
        assert np.array_equal(groups[1].kv, np.concatenate([parameters.w_k[1].T, parameters.w_v[1].T]))
        assert np.array_equal(layer.b[0], parameters.b_o)

    def test_without_an_output_projection_it_is_the_identity(self):
        heads = Heads(d_model=18, h=6, h_kv=2)
        layer = Projections(d_model=18, d_k=3, out=False)
        loader = load(layer, heads=heads, w_o=None)
        assert loader.fixed == {"w_o"}
        assert np.array_equal(loader.template.w_o, np.eye(18))
        loader(layer, replace(drawn(loader.template), w_o=loader.template.w_o), "float32")
        with pytest.raises(
            ShapeError, match=r"there is no w_o, so the heads side by side are the output; but h\*d_v=30 and d_model=17 differ"
        ):
            load(Projections(out=False), w_o=None)

    def test_a_layout_may_be_named_and_a_tensor_left_alone(self):
        layer = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6, bias=False) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
        loader = Loader(layer, Heads(d_model=6, h=2), "llama", TORCH)
        assert loader.template.b_q is None
        layer["norm"] = torch.nn.LayerNorm(6)
        with pytest.raises(
            ConfigError, match=r"does not mention norm\.weight, norm\.bias; a line like \"other\": \(\"norm\.weight\", None\)"
        ):
            Loader(layer, Heads(d_model=6, h=2), "llama", TORCH)
        Loader(layer, Heads(d_model=6, h=2), {**attnspec.layouts.LAYOUTS["llama"], "b_q": ("norm.*", None)} | NO_BIASES, TORCH)


NO_BIASES = {f"b_{role}": ("norm.*", None) for role in "qkvo"}


class TestMistakes:
    @pytest.mark.parametrize(
        ("lines", "sentence"),
        [
            ({"w_q": ("query.weight", "(h d_k) d_model")}, "there is no tensor query.weight; near it are q.weight"),
            (
                {"w_q": ("weight", "(h d_k) d_model")},
                "weight may be any of q.weight, k.weight, v.weight, out.0.weight; give the whole name",
            ),
            ({"w_q": ("q.weight", "(h dk) d_model")}, "the pattern '(h dk) d_model' of w_q has dk; near it are d_k"),
            ({"w_q": ("q.weight", "h d_k d_model")}, "w_q is stored as q.weight (30, 17), but its pattern 'h d_k d_model' has 3 axes"),
            ({"w_q": ("q.weight", "d_k d_model")}, "the pattern 'd_k d_model' of w_q lacks h or h_kv, even if that is 1"),
            ({"b_q": ("q.bias", "h")}, "the pattern 'h' of b_q lacks d_k or d_v"),
            ({"w_q": ("q.weight", "d_model (h d_k)")}, "d_model of its pattern is 17 (d_model=17); '(h d_k) d_model' would fit"),
            (
                {"w_k": ("k.weight", "(h d_k) d_model")},
                "k.weight (10, 17), but (h d_k) of its pattern is 30 (h=6, d_k=5); h_kv for h would fit",
            ),
            ({"w_query": ("q.weight", "(h d_k) d_model")}, "q.weight is said to hold w_query, which is no parameter; near it are w_q"),
            ({"w_qq": ("q.weight", "(h d_k) d_model")}, "q.weight is said to hold w_qq, which is no parameter"),
            ({"w_k": None}, "there is no line for w_k; say which tensor holds it"),
            ({"w_o": None}, "it does not mention out.0.weight; a line like"),
            (
                {"w_k": ("v.weight", "(h_kv d_k) d_model")},
                "v.weight is said to hold w_k and w_v; what holds several is called w_qkv or w_kv",
            ),
            ({"norm": ("norm.weight", None)}, "there is no tensor norm.weight"),
        ],
    )
    def test_is_told(self, lines, sentence):
        with pytest.raises((ConfigError, ShapeError)) as caught:
            load(**lines)
        assert sentence in str(caught.value)
        assert str(caught.value).startswith("layout: ")

    @pytest.mark.parametrize(
        ("heads", "sentence"),
        [
            (Heads(d_model=17, h=4, h_kv=2, d_k=5), "q.weight (30, 17), but (h d_k) of its pattern is 20 (h=4, d_k=5); h=6 would fit"),
            (Heads(d_model=16, h=6, h_kv=2, d_k=5), "d_model of its pattern is 16 (d_model=16); d_model=17 would fit"),
            (
                Heads(d_model=17, h=6, h_kv=3, d_k=5),
                "k.weight (10, 17), but (h_kv d_k) of its pattern is 15 (h_kv=3, d_k=5); h_kv=2 would fit",
            ),
        ],
    )
    def test_of_the_sizes_is_told(self, heads, sentence):
        with pytest.raises(ShapeError) as caught:
            load(heads=heads)
        assert sentence in str(caught.value)

    def test_of_fused_tensors_is_told(self):
        lines = {"w_qkv": ("in_proj_weight", "(h d_k) d_model"), "b_qkv": ("in_proj_bias", "(three h d_k)")}
        lines |= {"w_o": ("out_proj.weight", "d_model (h d_v)"), "b_o": ("out_proj.bias", "d_model")}
        with pytest.raises(ShapeError, match=r"\(h d_k\) of its pattern is 18 \(h=3, d_k=6\); one more word, three, would fit"):
            Loader(torch.nn.MultiheadAttention(18, 3), Heads(d_model=18, h=3), lines, TORCH)

    def test_of_the_number_of_heads_is_told(self):
        heads = [SimpleNamespace(q=np.zeros((5, 17))) for _ in range(4)]
        with pytest.raises(ConfigError, match=r"w_q is stored as 4 tensors heads\.\{h\}\.q, but h=6 is declared"):
            load(SimpleNamespace(heads=heads), w_q=("heads.{h}.q", "d_k d_model"), library=NUMPY)

    def test_of_a_name_is_told(self):
        with pytest.raises(ConfigError, match=r"layout: 'lama' is no layout; near it are llama"):
            Loader(Projections(), HEADS, "lama", TORCH)


def subject_of(target):
    """Make of a known layer what can be asked, and what it can be asked for."""
    said = known(target)
    library = said.get("library") or guess_library(target)
    loader = Loader(target, said["heads"], said["layout"], library)
    signature = read_signature(said["call"], subject_first=True, heads_first=False, explicit=True, owner="test")
    subject = Subject(
        "test", target, said["call"], signature, library, mask=said.get("mask", "keep"),
        mask_axes=said.get("mask_axes", ("batch h seq_q seq_k",)), load=loader,
        in_precision=lambda each, precision: cast(each, precision, library), training=set_training,
    )  # fmt: skip
    more = {"tokens": said["tokens"]} if "tokens" in said else {}
    options = tuple(role for role in signature.roles if role in OPTIONS)
    profile = Profile(
        policy=said.get("policy", Policy()), options=options, causal=said.get("causal", False), template=loader.template,
        sources=said.get("sources", 3), **more,
    )  # fmt: skip
    return subject, profile, loader


def choices(profile, mask_axes, *, step):
    """Each option in each way, with queries and keys of different number, and some pairs of them."""
    sizes = {"batch": 2, "h": 3, "seq_q": 4, "seq_k": 5}
    ways = [(name, way) for name in profile.options for way in OPTIONS[name].draws]
    keeps = {way: make(np.random.default_rng(0), sizes) for way, make in OPTIONS["keep"].draws.items()}
    ways = [(name, way) for name, way in ways if name != "keep" or any(fits(keeps[way], axes) for axes in mask_axes)]
    heads = profile.template.heads
    same = heads.d_model == heads.d_key_in == heads.d_value_in
    tokens = [each for each in profile.tokens if each != "self" or same]
    sets = [(), *((way,) for way in ways), *[pair for pair in combinations(ways, 2) if pair[0][0] != pair[1][0]][::step]]
    found = [{"tokens": tokens[index % len(tokens)], **dict(each)} for index, each in enumerate(sets)]
    return [choice for choice in found if profile.allows(choice)]


def gaps(target, *, step=7):
    """How far each answer is from the specification's; queries without keys only where the policy says what they get."""
    subject, profile, loader = subject_of(target)
    found = []
    for choice in choices(profile, subject.mask_axes, step=step):
        problem = draw(profile, choice, seed=1)
        fixed = {name: getattr(loader.template, name) for name in loader.fixed}
        problem = replace(problem, parameters=replace(problem.parameters, **fixed))
        mine, theirs = problem.run(), subject.answer(problem)
        assert not isinstance(theirs, Crash), f"{choice}: {theirs.error}"
        counted = ~problem.empty_rows if profile.policy.empty_row == "any" else np.ones_like(problem.empty_rows)
        found.append((gap(mine.y[counted], theirs.y[counted]), choice))
        if "return_weights" in choice:
            counted = problem.visible.any(-1) if profile.policy.empty_row == "any" else np.ones(mine.weights.shape[:-1], bool)
            found.append((gap(mine.weights[counted], theirs.weights[counted]), choice))
    assert len(found) > len(profile.options)
    return found


def gap(mine, theirs):
    return np.nan_to_num(np.abs(mine - theirs), nan=np.inf).max(initial=0)


def assert_known(target, *, within=DOUBLE, **how):
    assert [(found, choice) for found, choice in gaps(target, **how) if not found < within] == []


class TestKnown:
    @pytest.mark.parametrize(
        "settings",
        [
            {"batch_first": True},
            {"bias": False},
            {"kdim": 5, "vdim": 7, "batch_first": True},
            {"kdim": 5, "vdim": 7, "dropout": 0.5},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("layer", [torch.nn.MultiheadAttention, attnspec.torch.MultiheadAttention])
    def test_layers_of_pytorch_conform(self, layer, settings):
        assert_known(layer(12, 3, **settings))

    @pytest.mark.parametrize(
        "settings", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str
    )
    def test_layers_of_pytorch_conform_with_extra_keys_unless_is_causal_makes_them_forget_the_mask(self, settings):
        """PyTorch takes its own causality then, over the keys with the extra ones behind, which no query sees any more."""
        layer = torch.nn.MultiheadAttention(12, 3, **settings)
        fixed = {"extra_k", "extra_v"} if "add_zero_attn" in settings else set()
        assert subject_of(layer)[2].fixed == fixed
        wrong = [choice for found, choice in gaps(layer, step=1) if not found < DOUBLE]
        assert wrong == [choice for choice in wrong if choice.keys() == {"tokens", "causal"}] != []

    @pytest.mark.parametrize("module", [attnspec.torch, attnspec.numpy])
    def test_layers_of_this_package_conform(self, module):
        assert_known(module.MultiHeadAttention(12, 6, h_kv=2, d_k=4, d_v=5, d_key_in=7, d_value_in=11, bias=False), step=17)
        assert_known(module.MultiHeadAttention(12, 6, h_kv=2, d_k=4, rope=True, window=(3, 0), qk_norm="rms", dropout=0.5), step=17)
        parameters = replace(
            Parameters.random(HEADS), sinks=np.ones(6), gates=np.ones(6), extra_k=np.ones((2, 3, 5)), extra_v=np.ones((2, 3, 5))
        )
        assert_known(module.MultiHeadAttention.from_parameters(parameters, policy=Policy(empty_row="uniform", grouping="strided")), step=17)

    def test_nothing_is_known_of_others(self):
        assert known(torch.nn.Linear(3, 3)) is None
        assert known((torch.nn.MultiheadAttention(4, 2), {})) is None

        class Own(torch.nn.MultiheadAttention):
            pass

        assert known(Own(4, 2)) is None


@pytest.mark.peers
class TestJax:
    """The layers of Flax, Equinox and Haiku."""

    def test_equinox_conforms(self):
        jax, eqx = pytest.importorskip("jax"), pytest.importorskip("equinox")
        sizes = {"key_size": 7, "value_size": 11, "qk_size": 4, "vo_size": 5, "use_query_bias": True, "use_output_bias": True}
        assert_known(eqx.nn.MultiheadAttention(3, 12, **sizes, dropout_p=0.5, key=jax.random.key(0)))
        assert known(eqx.nn.MultiheadAttention(3, 12, output_size=5, key=jax.random.key(0))) is None

    def test_equinox_is_copied_but_for_its_dropout(self):
        jax, eqx = pytest.importorskip("jax"), pytest.importorskip("equinox")
        layer = eqx.nn.MultiheadAttention(3, 12, key=jax.random.key(0))
        before = stored(layer)["query_proj.weight"]
        assert stored(set_stored(layer, {"query_proj.weight": before + 1}, JAX, "float64"))["query_proj.weight"] == pytest.approx(
            before + 1
        )
        assert np.array_equal(stored(layer)["query_proj.weight"], before)
        set_training(layer, False)
        assert layer.dropout.inference

    def test_flax_conforms(self):
        nnx = pytest.importorskip("flax.nnx")
        layer = nnx.MultiHeadAttention(3, 12, qkv_features=15, in_kv_features=7, decode=False, rngs=nnx.Rngs(0))
        assert "query.kernel" in stored(layer)
        assert_known(layer, within=SINGLE, step=11)
        grouped = {"num_kv_heads": 2, "qkv_features": 24, "normalize_qk": True, "dropout_rate": 0.5, "use_bias": False}
        assert_known(nnx.MultiHeadAttention(6, 12, **grouped, rngs=nnx.Rngs(0)), within=SINGLE, step=11)
        assert known(nnx.MultiHeadAttention(3, 12, out_features=5, rngs=nnx.Rngs(0))) is None
        assert known(nnx.MultiHeadAttention(3, 12, attention_fn=max, rngs=nnx.Rngs(0))) is None

    def test_flax_linen_conforms_with_its_parameters(self):
        jax, linen = pytest.importorskip("jax"), pytest.importorskip("flax.linen")
        sources = [jax.numpy.ones((2, seq, width)) for seq, width in ((4, 12), (5, 7), (5, 11))]
        layer = linen.MultiHeadDotProductAttention(3, qkv_features=15, dropout_rate=0.5)
        parameters = layer.init(jax.random.key(0), *sources, deterministic=True)
        assert_known((layer, parameters))
        assert_known((layer, parameters["params"]))
        narrow = linen.MultiHeadAttention(3, qkv_features=15, normalize_qk=True, force_fp32_for_softmax=True)
        assert_known((narrow, narrow.init(jax.random.key(0), sources[0])), within=SINGLE)
        assert known(layer) is None
        assert known((linen.MultiHeadDotProductAttention(3, attention_fn=max), parameters)) is None

    def test_haiku_is_a_function_and_its_parameters(self):
        jax, hk = pytest.importorskip("jax"), pytest.importorskip("haiku")
        make = hk.initializers.Constant(0.0)
        apply = hk.transform(lambda x: hk.MultiHeadAttention(3, 4, w_init=make, model_size=12)(x, x, x))
        pair = (apply.apply, apply.init(jax.random.key(0), np.ones((2, 5, 12))))
        loader = Loader(pair, Heads(d_model=12, h=3), "haiku", JAX)
        parameters = drawn(loader.template)
        x = np.random.default_rng(0).normal(size=(2, 5, 12))
        with jax.enable_x64(True):
            function, loaded = loader(cast(pair, "float64", JAX), parameters, "float64")
            assert np.abs(function(loaded, None, x) - attnspec.multi_head_attention(x, parameters)).max() < DOUBLE


@pytest.mark.peers
class TestOthers:
    def test_keras_conforms_once_it_is_built(self):
        os.environ.setdefault("KERAS_BACKEND", "torch")  # settled when Keras is imported, once for a process
        keras = pytest.importorskip("keras")
        layer = keras.layers.MultiHeadAttention(3, 4, 4 if keras.config.backend() == "jax" else 5)
        assert known(layer) is None
        layer.build((2, 4, 12), (2, 5, 7), (2, 5, 11))
        assert "query.kernel" in stored(layer)
        assert_known(layer, within=SINGLE)
        windowed = keras.layers.MultiHeadAttention(3, 4, dropout=0.5, sliding_window=2)
        windowed.build((2, 4, 12), (2, 5, 12))
        assert_known(windowed, within=SINGLE)
        gated = keras.layers.MultiHeadAttention(3, 4, use_gate=True)
        gated.build((2, 4, 12), (2, 5, 12))
        assert known(gated) is None

    def test_a_layer_of_keras_is_found_by_its_attributes_after_a_call(self):
        os.environ.setdefault("KERAS_BACKEND", "torch")
        keras = pytest.importorskip("keras")

        class Layer(keras.layers.Layer):
            def __init__(self, width):
                super().__init__()
                self.wq, self.wk, self.wv, self.wo = (keras.layers.Dense(width, use_bias=False) for _ in range(4))

            def call(self, x, context):
                return self.wo(self.wq(x) + self.wk(context) + self.wv(context))

        layer, library = Layer(12), LIBRARIES[keras.config.backend()]
        lines = {f"w_{role}": (f"w{role}.kernel", f"d_model ({h} {width})") for role, h, width in _ROLES}
        lines["w_o"] = ("wo/kernel", "(h d_v) d_model")
        with pytest.raises(ConfigError, match="if they are made in a call, call it once"):
            Loader(layer, Heads(d_model=12, h=3), lines, library)
        x = keras.ops.ones((2, 5, 12))
        layer(x, x)
        loader = Loader(layer, Heads(d_model=12, h=3), lines, library)
        parameters = drawn(loader.template)
        with library.working():
            wide = loader(cast(layer, "float64", library), parameters, "float64")
            assert wide(x, x).shape == (2, 5, 12)
        assert {weight.dtype for weight in wide.weights} == {"float64"}
        assert (wide.wq.compute_dtype, layer.wq.compute_dtype, keras.config.dtype_policy().name) == ("float64", "float32", "float32")
        assert np.array_equal(next(iter(stored(wide).values())), np.concatenate(list(parameters.w_q), axis=1))

    def test_timm_conforms_unless_it_does_more(self, attention):
        assert_known(attention(12, 3, qkv_bias=True))
        own = attention(12, 3, attn_head_dim=5, proj_bias=False)
        own.fused_attn = False
        assert_known(own)
        for more in ({"gated": True}, {"qk_norm": True, "norm_layer": torch.nn.LayerNorm}, {"dim_out": 5}):
            assert known(attention(12, 3, **more)) is None

    @pytest.fixture
    def attention(self, monkeypatch):
        """The class of timm, imported without what it has of torchvision."""
        spec = find_spec("timm")
        if spec is None:
            pytest.skip("timm is not installed")
        for name in ("timm", "torchvision", "torchvision.ops", "torchvision.ops.misc"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["timm"].__path__ = spec.submodule_search_locations
        sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = torch.nn.BatchNorm2d
        from timm.layers.attention import Attention

        return Attention

    @pytest.mark.parametrize(
        "settings",
        [
            {"heads": 6, "kv_heads": 2, "value_dim_head": 5, "dim_context": 7},
            {"heads": 6, "kv_heads": 2, "flash": True, "causal": True},
            {"heads": 6, "causal": True, "max_attend_past": 2},
            {"heads": 1, "dim_head": 12},
        ],
        ids=str,
    )
    def test_x_transformers_conforms(self, settings, x_transformers):
        assert_known(x_transformers(12, **{"dim_head": 4, **settings}), within=SINGLE)

    @pytest.mark.parametrize(
        "more",
        [
            *({flag: True} for flag in ("qk_norm", "hard", "softclamp_logits", "add_zero_kv", "gate_values", "sigmoid", "cog_signed")),
            *({flag: True} for flag in ("laser", "l2_distance", "inverted_attention", "on_attn", "value_rmsnorm", "head_learned_sink")),
            {"sparse_topk": 2}, {"num_mem_kv": 1}, {"custom_attn_fn": torch.sigmoid}, {"rotate_num_heads": 2}, {"dim_out": 5},
        ],
        ids=lambda more: next(iter(more)),
    )  # fmt: skip
    def test_x_transformers_that_does_more_is_not_known(self, more, x_transformers):
        assert known(x_transformers(12, dim_head=4, heads=6, **more)) is None

    @pytest.fixture
    def x_transformers(self):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
            return pytest.importorskip("x_transformers.x_transformers").Attention


_ROLES = (("q", "h", "d_k"), ("k", "h_kv", "d_k"), ("v", "h_kv", "d_v"))
