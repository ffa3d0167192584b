"""The layouts of other projects, from the table of the library."""

from dataclasses import fields

import numpy as np

from attnspec.layouts import LAYOUTS, Layout, write
from attnspec.spec.parameters import Heads, Parameters

from .blocks import block
from .writing import table

WHOSE = {
    "torch": "`torch.nn.MultiheadAttention`, where queries, keys and values come from equally wide sources.",
    "torch_separate": "`torch.nn.MultiheadAttention` with `kdim` or `vdim` of their own; its biases still are one vector.",
    "timm": "`timm.layers.attention.Attention`.",
    "bert": "BERT in transformers; its output projection, `output.dense`, belongs to the next module, which also normalises.",
    "gpt2": "GPT-2 in transformers, whose `Conv1D` keeps a matrix as it multiplies, not transposed.",
    "llama": "Llama in transformers.",
    "qwen3": "Qwen3 in transformers: Llama's, and a gain for normalised queries and keys, shared by the heads.",
    "gpt_oss": "gpt-oss in transformers: Llama's, and a sink for each head.",
    "phi3": "Phi-3 in transformers: all heads of queries, then all of keys, then all of values.",
    "gpt_neox": "GPT-NeoX in transformers: head by head its queries, keys and values.",
    "bloom": "BLOOM in transformers: as GPT-NeoX.",
    "falcon": "Falcon in transformers with the new decoder: group by group its queries, then its keys, then its values.",
    "megatron": "Megatron: as Falcon, under other names.",
    "codegen": "CodeGen in transformers: four blocks for its four machines, in each of them queries, values, keys.",
    "equinox": "`equinox.nn.MultiheadAttention`.",
    "flax": "`flax.nnx.MultiHeadAttention`, and Linen's, with heads as an axis of their own.",
    "keras": "`keras.layers.MultiHeadAttention` and `GroupQueryAttention`, with heads as an axis of their own.",
    "haiku": "`haiku.MultiHeadAttention`.",
    "x_transformers": "`x_transformers.Attention`; its groups are [strided](conventions.md#grouping).",
    "transformer_lens": "TransformerLens: kept for each head, as here.",
    "onnxruntime": "ONNX Runtime's contributed `Attention` operator, which has no output projection.",
}
"""Whose each layout is."""

_NAMED = {"q": "query", "k": "key", "v": "value"}


@block
def layouts() -> str:
    """Every layout: whose it is, where it keeps each parameter, and how the rows of a fused matrix stand."""
    if WHOSE.keys() != LAYOUTS.keys():
        raise ValueError(f"attnspec_docs.layouts says whose {sorted(WHOSE)} are, but there are {sorted(LAYOUTS)}.")
    return "\n\n".join(_section(name, layout) for name, layout in LAYOUTS.items())


def _section(name: str, layout: Layout) -> str:
    rows = [(f"`{held}`", f"`{tensor}`", f"`{pattern}`") for held, (tensor, pattern) in layout.items()]
    kept = table(("holds", "is called", "is laid out"), rows, numbers_from=3)
    return f"### {name} {{ #layout-{name} }}\n\n{WHOSE[name]}\n\n{kept}{_order(layout)}"


def _order(layout: Layout) -> str:
    """In which order the heads stand in a matrix that holds several parameters, seen by writing heads that say who they are."""
    fused = next((held for held in layout if held.startswith("w_") and len(held) > len("w_q")), None)
    if fused is None:
        return ""
    stored, pattern = layout[fused]
    h, h_kv = (8, 8) if "four" in pattern else (4, 2) if "part" in pattern else (4, 4)
    heads = Heads(d_model=1, h=h, h_kv=h_kv, d_k=1)
    counts = {"w_q": h, "w_k": h_kv, "w_v": h_kv}
    arrays = {held: np.arange(count)[:, None, None] + 10.0 * place for place, (held, count) in enumerate(counts.items())}
    lines = {fused: layout[fused], "w_o": ("o", "(h d_v) d_model")}
    rows = write(Parameters(**arrays, w_o=np.zeros((h, 1))), lines)[stored].ravel().astype(int)
    said = " · ".join(f"{_NAMED['qkv'[row // 10]]} {row % 10}" for row in rows)
    return f"\n\nWith {heads.h} query heads and {heads.h_kv} key/value heads, the heads stand in `{stored}` in this order: {said}."


@block
def parameters() -> str:
    """The names of the parameters, for the middle of a sentence."""
    return ", ".join(f"`{field.name}`" for field in fields(Parameters))
