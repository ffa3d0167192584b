"""The layouts of other projects, there and back; that each is the project's own is shown beside it, in the tests of peers."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnspec import ConfigError, Heads, Parameters, ShapeError, layouts

GROUPED = {"bert", "llama", "qwen3", "gpt_oss", "phi3", "falcon", "megatron", "equinox", "flax", "keras", "haiku", "x_transformers"}
APART = {"torch_separate", "bert", "equinox", "flax", "keras", "haiku", "x_transformers", "transformer_lens"}
EXTRA = {"torch", "torch_separate"}


def draw(name, *, bias=True, seed=0):
    """Parameters of the most general kind that a layout has a place for; all sizes differ where they may."""
    sizes = {"d_key_in": 17, "d_value_in": 19, "d_v": 7} if name in APART - {"torch_separate"} else {}
    h_kv = 3 if name in GROUPED | {"transformer_lens"} else None
    heads = Heads(d_model=23, h=8 if name == "codegen" else 6, h_kv=h_kv, d_k=5, **sizes)
    rng = np.random.default_rng(seed)
    more = {}
    if name in EXTRA:
        more = {"extra_k": rng.normal(size=(heads.h_kv, 1, 5)), "extra_v": rng.normal(size=(heads.h_kv, 1, heads.d_v))}
    if name == "qwen3":
        more = {"gain_q": rng.normal(size=(1, 5)), "gain_k": rng.normal(size=(1, 5))}
    if name == "gpt_oss":
        more = {"sinks": rng.normal(size=6)}
    return dataclasses.replace(Parameters.random(heads, seed=seed, bias=bias), **more)


def assert_same_parameters(got, wanted):
    for field in dataclasses.fields(Parameters):
        one, other = getattr(got, field.name), getattr(wanted, field.name)
        assert (one is None) is (other is None), field.name
        if one is not None:
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=field.name)


@pytest.mark.parametrize("library", [np.asarray, torch.asarray], ids=["numpy", "torch"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", sorted(layouts.LAYOUTS.keys() - {"onnxruntime"}))
def test_written_and_read_again_nothing_has_changed(name, bias, library):
    parameters = draw(name, bias=bias).map(library)
    stored = layouts.write(parameters, name)
    assert {type(tensor) for tensor in stored.values()} == {type(library(np.zeros(1)))}
    assert_same_parameters(layouts.read(stored, name, parameters.heads), parameters)


def test_a_layout_without_an_output_projection_is_read_beside_one():
    parameters = draw("timm")
    lines = {**layouts.LAYOUTS["onnxruntime"], "w_o": ("w_o", "(h d_v) d_model"), "b_o": ("b_o", "d_model")}
    stored = layouts.write(parameters, lines)
    assert stored["weights"].shape == (23, 90)
    assert_same_parameters(layouts.read(stored, lines, parameters.heads), parameters)


def rows_of(name):
    """Say for each row of a fused matrix which parameter, head and channel it is."""
    heads = Heads(d_model=2, h=4, h_kv=2 if name in ("phi3", "falcon") else None, d_k=1)
    w_q = np.array([[[10 + head] * 1] * 2 for head in range(4)], float)
    w_k, w_v = (np.array([[[tens + head] * 1] * 2 for head in range(heads.h_kv)], float) for tens in (20, 30))
    stored = layouts.write(Parameters(w_q, w_k, w_v, np.zeros((4, 2))), name)
    return stored[layouts.LAYOUTS[name]["w_qvk" if name == "codegen" else "w_qkv"][0]][:, 0].tolist()


ROWS = {
    "timm": [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33],
    "gpt_neox": [10, 20, 30, 11, 21, 31, 12, 22, 32, 13, 23, 33],
    "phi3": [10, 11, 12, 13, 20, 21, 30, 31],
    "falcon": [10, 11, 20, 30, 12, 13, 21, 31],
    "codegen": [10, 30, 20, 11, 31, 21, 12, 32, 22, 13, 33, 23],
}


@pytest.mark.parametrize("name", ROWS)
def test_the_rows_of_a_fused_matrix_stand_in_the_order_of_the_project(name):
    assert rows_of(name) == ROWS[name]


@given(
    st.sampled_from(
        ["(three h d_k) d_model", "(h three d_k) d_model", "d_model (three d_k h)", "three d_model h d_k", "(d_k part) d_model"]
    )
)
def test_any_pattern_of_ones_own_is_reversible(pattern):
    parameters = draw("timm", bias=False)
    lines = {"w_qkv": ("together", pattern), "w_o": ("out", "d_model (d_v h)")}
    assert_same_parameters(layouts.read(layouts.write(parameters, lines), lines, parameters.heads), parameters)


def test_keys_and_values_may_stand_together():
    parameters = draw("llama", bias=False)
    lines = {"w_q": ("q", "(h d_k) d_model"), "w_kv": ("kv", "(two h_kv d_k) d_model"), "w_o": ("o", "d_model (h d_v)")}
    stored = layouts.write(parameters, lines)
    assert stored["kv"].shape == (30, 23)
    assert_same_parameters(layouts.read(stored, lines, parameters.heads), parameters)


def stored_for_torch(**changes):
    return {**layouts.write(draw("timm"), "torch"), **changes}


HEADS = draw("timm").heads
REFUSED = {
    "too few rows": (
        lambda: layouts.read(stored_for_torch(in_proj_weight=np.zeros((89, 23))), "torch", HEADS),
        ShapeError,
        "layouts: in_proj_weight (89, 23) has (three h d_k)=89, but (three h d_k)=90 was set by heads (three=3, h=6, d_k=5).",
    ),
    "transposed": (
        lambda: layouts.read(stored_for_torch(in_proj_weight=np.zeros((23, 90))), "torch", HEADS),
        ShapeError,
        "in_proj_weight (23, 90) has (three h d_k)=23, but (three h d_k)=90",
    ),
    "wrong rank": (
        lambda: layouts.read(stored_for_torch(in_proj_weight=np.zeros((3, 30, 23))), "torch", HEADS),
        ShapeError,
        "in_proj_weight (3, 30, 23) has 3 axes, but needs 2: (three h d_k) d_model.",
    ),
    "a weight missing": (
        lambda: layouts.read({"in_proj_weight": np.zeros((90, 23))}, "torch", HEADS),
        ConfigError,
        "layouts: out_proj.weight, which holds w_o, is not stored; there are in_proj_weight.",
    ),
    "an unknown tensor": (
        lambda: layouts.read(stored_for_torch(inv_freq=np.zeros(3)), "torch", HEADS),
        ConfigError,
        "layouts: there is no place for inv_freq in this layout.",
    ),
    "an unknown layout": (
        lambda: layouts.read({}, "pytorch", HEADS),
        ConfigError,
        "layouts: layout='pytorch' is not known; there are torch, torch_separate, timm,",
    ),
    "an unknown parameter": (
        lambda: layouts.read({"x": np.zeros((2, 2))}, {"w_x": ("x", "(h d_k) d_model")}, HEADS),
        ConfigError,
        "layouts: x is said to hold w_x, which is none of the parameters, nor several, as w_qkv is.",
    ),
    "an unknown word": (
        lambda: layouts.write(draw("timm"), {"w_qkv": ("qkv", "(three heads d_k) d_model")}),
        ConfigError,
        "layouts: qkv has heads in its pattern (three heads d_k) d_model, but the words are d_model, h, h_kv,",
    ),
    "groups in equal thirds": (
        lambda: layouts.read(stored_for_torch(), "torch", Heads(d_model=23, h=6, h_kv=3, d_k=5)),
        ConfigError,
        "in_proj_weight holds w_q and w_k and w_v under one pattern, so these must be equal: h=6 and h_kv=3.",
    ),
    "groups written in equal thirds": (
        lambda: layouts.write(draw("llama"), "timm"),
        ConfigError,
        "qkv.weight holds w_q and w_k and w_v under one pattern, so these must be equal: h=6 and h_kv=3.",
    ),
    "too few heads for four groups": (
        lambda: layouts.write(Parameters.random(Heads(d_model=24, h=2), seed=0), "codegen"),
        ConfigError,
        "layouts: qkv_proj.weight keeps its heads in 4 groups, which do not divide h=2.",
    ),
    "one bias of three": (
        lambda: layouts.write(dataclasses.replace(draw("timm"), b_k=None), "timm"),
        ConfigError,
        "layouts: qkv.bias holds b_q and b_k and b_v, but there is b_q and b_v alone.",
    ),
    "no place for sinks": (
        lambda: layouts.write(draw("gpt_oss"), "llama"),
        ConfigError,
        "layouts: there is no place for sinks in this layout.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_says_which_tensor_and_both_sizes(name):
    call, error, sentence = REFUSED[name]
    with pytest.raises(error, match=re.escape(sentence)):
        call()


def test_reading_keeps_gradients():
    stored = {name: torch.tensor(array, requires_grad=True) for name, array in stored_for_torch().items()}
    parameters = layouts.read(stored, "torch", HEADS)
    parameters.w_k.sum().backward()
    gradient = stored["in_proj_weight"].grad
    assert gradient[30:60].eq(1).all()
    assert gradient[:30].eq(0).all()
    assert gradient[60:].eq(0).all()
