"""Implementations in packages of others, right and wrong, as `install.py` puts them into a folder.

No code of theirs stands here: how each is built, called, and laid out, and what is known to be wrong with it.
"""

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from attnspec import Heads, Policy, Rotation

from .entry import Entry, dense, fused, left_alone, linear, over_heads
from .faulty import attention_mechanism, attnhut, flashmha, forgenn, llm, llms, nanodl, simple, torch_multi_head
from .reading import EVEN, FREE, GROUPED, ROOM, ROWS, layer, module_of, ready, taken


def entries(directory: Path, /) -> list[Entry]:
    """List what can be asked about the packages in a folder; those that are not there are left out."""
    groups = {
        "AttentionMechanism": attention_mechanism, "attention-smithy": _smithy, "attnhut": attnhut, "d2l": _d2l,
        "flashmha": flashmha, "forgenn-ml": forgenn, "glassllm": _glassllm, "llm-from-scratch": llm,
        "llms-from-scratch": llms, "nanodl": nanodl, "neuralnetlib": _neuralnetlib, "simple-transformer": simple,
        "tfs-mt": _tfs_mt, "torch-multi-head-attention": torch_multi_head, "transformer-pytorch": _transformer,
        "transformers-from-scratch": _variants, "vit-pytorch": _vit, "wyn-transformers": _wyn,
    }  # fmt: skip
    return [entry for name, group in groups.items() if (directory / name).is_dir() for entry in group(directory / name)]


def _variants(folder: Path) -> list[Entry]:
    """One small linear layer for each head and role; the source comes first."""
    layout = {
        f"w_{role}": (f"heads.{{h}}.{role}_proj.weight", f"{width} d_model") for role, width in (("q", "d_k"), ("k", "d_k"), ("v", "d_v"))
    }
    layout |= {"w_o": ("out_proj.weight", "d_model (h d_v)")}

    def build(name: str) -> Any:
        return lambda: ready(getattr(module_of(folder, "transformer_variants.model"), name)(24, 4))

    return [
        Entry(
            "transformers-from-scratch MultiHeadCrossAttention", build("MultiHeadCrossAttention"), "check",
            layer(EVEN, layout, lambda m, q, k, keep: m(k, q, keep), mask="drop", policy=ROWS["nan"]),
        ),
        Entry(
            "transformers-from-scratch MultiHeadSelfAttention", build("MultiHeadSelfAttention"), "check",
            layer(EVEN, layout, lambda m, x, keep: m(x, keep), mask="drop", policy=ROWS["nan"]),
        ),
    ]  # fmt: skip


def _tfs_mt(folder: Path) -> list[Entry]:
    """A width that the number of heads does not divide is allowed; the file asks for packages that the class does not use."""
    jaxtyping = importlib.import_module("jaxtyping")
    path, known = folder / "tfs_mt" / "architecture.py", {"Float": jaxtyping.Float, "Bool": jaxtyping.Bool}
    layout = linear("W_Q W_K W_V W_O", bias=False)
    return [
        Entry(
            f"tfs-mt MultiHeadAttention, {width} wide",
            lambda width=width: ready(taken(path, "MultiHeadAttention", **known).MultiHeadAttention(width, 4)), "check",
            layer(Heads(d_model=width, h=4, d_k=6), layout, lambda m, q, k, v, keep: m(q, k, v, over_heads(keep))),
        )
        for width in (24, 26)
    ]  # fmt: skip


def _d2l(folder: Path) -> list[Entry]:
    """Its weights exist after a first call only; its base class draws curves, which attention does not need."""

    def build() -> Any:
        d2l = SimpleNamespace(Module=nn.Module)
        path = folder / "d2l" / "torch.py"
        d2l.DotProductAttention = taken(path, "masked_softmax DotProductAttention", d2l=d2l).DotProductAttention
        module = taken(path, "MultiHeadAttention", d2l=d2l).MultiHeadAttention(24, 4, 0.1, bias=True)
        with torch.no_grad():
            module(*[torch.ones(1, 1, 24)] * 3, None)
        return ready(module)

    settings = layer(  # rows of length 0 are uniform, but NaN in float16, where its fill of -1e6 is minus infinity
        EVEN, linear("W_q W_k W_v W_o"), lambda m, q, k, v, lengths: m(q, k, v, lengths), options=("lengths",), policy=ROWS["any"]
    )
    return [Entry("d2l torch.MultiHeadAttention", build, "check", settings)]


def _vit(folder: Path) -> list[Entry]:
    """The normalisation of the input that it begins with is put aside: it is no part of attention."""
    einops = importlib.import_module("einops")

    def build(heads: int, width: int) -> Any:
        attention = taken(folder / "vit_pytorch" / "vit.py", "Attention", Module=nn.Module, rearrange=einops.rearrange).Attention
        module = attention(24, heads=heads, dim_head=width)
        module.norm = nn.Identity()
        return lambda: ready(module)

    layout = fused("to_qkv", "to_out.0")
    del layout["b_qkv"]
    return [
        Entry("vit-pytorch vit.Attention", build(4, 8), "check", layer(Heads(d_model=24, h=4, d_k=8), layout, lambda m, x: m(x))),
    ]


def _smithy(folder: Path) -> list[Entry]:
    """The scale is a number in float32, so it is right to 1e-7 only."""

    def build(*, causal: bool) -> Any:
        components, attention = (module_of(folder, f"attention_smithy.{name}") for name in ("components", "attention"))
        return ready(components.MultiheadAttention(24, 4, attention.StandardAttentionMethod(0.1, causal)))

    manager = module_of(folder, "attention_smithy.numeric_embeddings").NumericEmbeddingManager([])
    layout = linear("query_weights key_weights value_weights out_weights")

    def call(m: Any, q: Any, k: Any, v: Any, padding: Any) -> Any:
        return m(q, k, v, manager, padding_and_loss_attention_mask=padding)

    return [
        Entry("attention-smithy MultiheadAttention", lambda: build(causal=False), "check", layer(EVEN, layout, call, policy=ROWS["nan"])),
        Entry(
            "attention-smithy MultiheadAttention, causal", lambda: build(causal=True), "check",
            layer(EVEN, layout, lambda m, x, padding: call(m, x, x, x, padding), causal=True, policy=ROWS["nan"]),
        ),
    ]  # fmt: skip


def _transformer(folder: Path) -> list[Entry]:
    """Whoever calls it with a cache makes the causal mask."""
    layout = linear("query_projection key_projection value_projection final_projection", bias=False)
    state = module_of(folder, "transformer.model.state")

    def build(mode: Any = None) -> Any:
        return lambda: ready(module_of(folder, "transformer.model.multi_head_attention").MultiHeadAttention(24, 4, 0.1, mode))

    def step(m: Any, x: Any, cache: Any) -> Any:
        cache = state.AttentionState() if cache is None else cache
        past = cache.cache.key_projected.shape[1] if cache.cache else 0
        drop = torch.ones(x.shape[1], past + x.shape[1], dtype=torch.bool).triu(past + 1)
        return m(x, x, x, drop[None], cache, cache=True)

    def call(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
        return m(q, k, v, keep, state.AttentionState(), cache=False)

    return [
        Entry(
            "transformer-pytorch MultiHeadAttention", build(), "check",
            layer(EVEN, layout, call, mask="drop", policy=ROWS["nan"]),
        ),
        Entry(
            "transformer-pytorch MultiHeadAttention, cached", build(state.AttentionMode.SELF), "check",
            layer(EVEN, layout, step, causal=True),
        ),
    ]  # fmt: skip


def _neuralnetlib(folder: Path) -> list[Entry]:
    """Layers of NumPy whose weights are made in the first call, which leaves its inputs and results behind."""
    layout = dense("query_dense key_dense value_dense output_dense", weight=".weights", row="1 ")
    layout |= left_alone("*.d_*", "*.input", "*_input", "reshaped_*", "*attention_weights")

    def build() -> Any:
        module = module_of(folder, "neuralnetlib.layers").MultiHeadAttention(4, 5, 3)
        module.forward_pass((np.ones((1, 1, 24)),) * 3, training=False)
        return module

    def call(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
        return m.forward_pass((q, k, v), mask=over_heads(keep), training=False)

    return [Entry("neuralnetlib MultiHeadAttention", build, "check", layer(FREE, layout, call, mask="drop"))]


def _glassllm(folder: Path) -> list[Entry]:
    """Layers of NumPy, causal, that rotate adjacent channels."""

    def build() -> Any:
        rng = np.random.default_rng(0)
        return module_of(folder, "glassllm.nn").Attention(24, 4, 2, ROOM, 10_000.0, rng, 0.4, np.float64)

    def step(m: Any, x: Any, cache: Any) -> Any:
        cache = module_of(folder, "glassllm.nn").KVCache() if cache is None else cache
        start = 0 if cache.k is None else cache.k.shape[2]
        return m(type(m.W_Q)(x), 0, cache=cache, start=start).data, cache

    layout = dense("W_Q W_K W_V W_O", weight=".data", bias="") | left_alone("cos", "sin")
    more = {"causal": True, "policy": Policy(rotation=Rotation(pairing="interleaved"))}
    return [
        Entry("glassllm Attention", build, "check", layer(GROUPED, layout, lambda m, x: m(type(m.W_Q)(x), 0).data, **more)),
        Entry("glassllm Attention, cached", build, "check", layer(GROUPED, layout, step, **more)),
    ]


def _wyn(folder: Path) -> list[Entry]:
    """Takes values first. Its few functions of TensorFlow are given by Keras' own, on whatever Keras runs."""

    def build() -> Any:
        os.environ.setdefault("KERAS_BACKEND", "torch")
        keras = importlib.import_module("keras")
        ops = keras.ops
        tf = SimpleNamespace(
            Tensor=Any, keras=keras, cast=ops.cast, shape=ops.shape, math=ops, nn=ops, reshape=ops.reshape, float32="float32",
            transpose=lambda x, perm: ops.transpose(x, axes=perm),
            matmul=lambda x, y, transpose_b=False: ops.matmul(x, ops.swapaxes(y, -1, -2) if transpose_b else y),
        )  # fmt: skip
        roles = iter(("wq", "wk", "wv", "out"))  # or else Keras would call them dense, dense_1 and so on
        names = "scaled_dot_product_attention MultiHeadAttention"
        found = taken(
            folder / "wyn_transformers" / "transformers.py", names, tf=tf, Dense=lambda width: keras.layers.Dense(width, name=next(roles))
        )
        module = found.MultiHeadAttention(24, 4)
        module(*[ops.ones((1, 1, 24))] * 3)
        return module

    def call(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
        return m(v, k, q, over_heads(keep))

    settings = layer(
        EVEN, dense("wq wk wv out", weight="/kernel", bias="/bias"), lambda m, q, k, v, keep: call(m, q, k, v, _ones(keep)), mask="drop"
    )
    return [Entry("wyn-transformers MultiHeadAttention", build, "check", {**settings, "policy": ROWS["uniform"]})]


def _ones(mask: Any) -> Any:
    """1.0 where a boolean mask of PyTorch is True."""
    return None if mask is None else mask.to(torch.float32)
