"""Where implementations of attention differ: each field of the policy, and who does what.

A fact is about a version, and says how it is known: by a test of this repository, which holds it; by running that version once; or
by reading its source.
"""

import re
import types
import typing
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from attnspec.spec.policy import Policy, Rotation

from .blocks import block
from .guides import described
from .writing import table

_ROOT = Path(__file__).parents[2]
_PINNED = {
    "PyTorch": "torch", "JAX": "jax", "Flax": "flax", "Equinox": "equinox", "Haiku": "dm-haiku", "Keras": "keras", "ONNX": "onnx",
    "ONNX Runtime": "onnxruntime", "x-transformers": "x-transformers", "transformers": "transformers",
}  # fmt: skip
"""The projects whose versions are those that the tests ran with, by their name in `constraints.txt`."""

_OTHERS = {
    "timm": "1.0.31", "TransformerLens": "4cd36aa (July 2026)", "the Annotated Transformer": "", "labml": "", "flash-attn": "",
    "ONNX before April 2026": "",
}  # fmt: skip
"""Other projects, with the version that was looked at if it is known."""


@dataclass(frozen=True)
class Fact:
    """What one implementation does.

    Attributes:
        value: what the field must be to say it.
        project: whose it is.
        where: the function, class, model or path; empty for all of the project.
        known: the test that holds it, as the end of its file's name, or else `run` or `read`.
    """

    value: Any
    project: str
    where: str
    known: str


@dataclass(frozen=True)
class Convention:
    """A field, who does what, and what there is no value for.

    Attributes:
        facts: who does what.
        note: a sentence more.
    """

    facts: tuple[Fact, ...]
    note: str = ""


def _held(value: Any, test: str, *places: str) -> tuple[Fact, ...]:
    """What tests, or one of the other ways to know, say of several places: `PyTorch: scaled_dot_product_attention`."""
    return tuple(Fact(value, project.strip(), where.strip(), test) for project, _, where in (place.partition(":") for place in places))


POLICY = {
    "scale": Convention(
        (
            *_held(None, "torch", "PyTorch: `scaled_dot_product_attention`"),
            *_held(None, "jax", "JAX: `jax.nn.dot_product_attention`"),
            *_held(1.0, "transformers", "transformers: T5"),
            *_held(0.0625, "transformers", "transformers: Gemma 2, `query_pre_attn_scalar=256`, whatever the width of a head is"),
        ),
        "GPT-2 in transformers can also divide by the number of the layer, which is the option `scale` of a call.",
    ),
    "cap": Convention((
        *_held(None, "torch", "PyTorch: `torch.nn.MultiheadAttention`"),
        *_held(50.0, "transformers", "transformers: Gemma 2, `attn_logit_softcapping=50`"),
        *_held(50.0, "x_transformers", "x-transformers: `softclamp_logits=True, logit_softclamp_value=50`"),
        *_held(50.0, "onnx", "ONNX: `softcap=50`"),
    )),
    "cap_order": Convention(
        (
            *_held("before", "onnx", "ONNX: `Attention`"),
            *_held("before", "torch", "PyTorch: `flex_attention` with a `score_mod` and a `mask_mod`"),
            *_held("before", "transformers", "transformers: Gemma 2"),
            *_held("before", "read", "TransformerLens"),
            *_held("after", "read", "ONNX before April 2026: its reference implementation"),
        ),
        "x-transformers caps before its mask but after its bias, for which there is no value; "
        "[`substitute`][attnspec.substitute] says it.",
    ),
    "causal_anchor": Convention(
        (
            *_held("top_left", "torch", "PyTorch: `scaled_dot_product_attention(is_causal=True)`"),
            *_held("top_left", "jax", "JAX: `jax.nn.dot_product_attention`"),
            *_held("top_left", "flax", "Flax: `nnx.MultiHeadAttention`"),
            *_held("top_left", "keras", "Keras: `MultiHeadAttention`, `GroupQueryAttention`"),
            *_held("top_left", "onnx", "ONNX: `Attention` without a past"),
            *_held("top_left", "x_transformers", "x-transformers: fused, with more queries than keys"),
            *_held("bottom_right", "torch", "PyTorch: `torch.nn.attention.bias.causal_lower_right`"),
            *_held("bottom_right", "x_transformers", "x-transformers: `Attention`"),
            *_held("bottom_right", "onnx", "ONNX: `Attention` with a past"),
            *_held("bottom_right", "read", "flash-attn"),
        ),
        "TransformerLens refuses a causal call in which the lengths differ and no past explains it.",
    ),
    "window": Convention(
        (
            *_held((None, None), "torch", "PyTorch: `torch.nn.MultiheadAttention`"),
            *_held((2, 1), "jax", "JAX: `local_window_size=(2, 1)`"),
            *_held((2, None), "transformers", "transformers: Gemma 2 and gpt-oss, `sliding_window=3`, which counts the query"),
            *_held((2, None), "x_transformers", "x-transformers: `max_attend_past=2`"),
            *_held((1, 1), "keras", "Keras: `sliding_window=2`, on both sides, even if it is causal"),
            *_held((2, 1), "onnx", "ONNX: `left_window_size=2, right_window_size=1`"),
        ),
    ),
    "empty_row": Convention(
        (
            *_held("zero", "onnx", "ONNX: `Attention`"),
            *_held("zero", "torch", "PyTorch: `scaled_dot_product_attention`, boolean mask or minus infinity", "PyTorch: `flex_attention`",
                   "PyTorch: `MultiheadAttention(need_weights=False)`"),
            *_held("zero", "keras", "Keras: `return_attention_scores=True`"),
            *_held("zero", "x_transformers", "x-transformers: `Attention` with a mask"),
            *_held("zero", "transformers", "transformers: Llama and BERT, `sdpa`"),
            *_held("zero", "run", "timm: `Attention`, fused"),
            *_held("zero", "read", "TransformerLens"),
            *_held("nan", "torch", "PyTorch: `MultiheadAttention(need_weights=True)`, and its fast path"),
            *_held("nan", "jax", "JAX: a `bias` of minus infinity"),
            *_held("nan", "transformers", "transformers: Llama, `eager`, float64"),
            *_held("nan", "x_transformers", "x-transformers: emptied by causality, own path, float64"),
            *_held("nan", "run", "timm: `Attention`, not fused"),
            *_held("nan", "read", "labml"),
            *_held("uniform", "torch", "PyTorch: `scaled_dot_product_attention`, the lowest number added"),
            *_held("uniform", "jax", "JAX: `mask`, `key_value_seq_lengths`"),
            *_held("uniform", "flax", "Flax: `nnx.MultiHeadAttention`"),
            *_held("uniform", "equinox", "Equinox: `MultiheadAttention`"),
            *_held("uniform", "run", "Haiku: `MultiHeadAttention`"),
            *_held("uniform", "keras", "Keras: fused"),
            *_held("uniform", "transformers", "transformers: Llama, `eager`, float32; BERT, `eager`"),
            *_held("uniform", "read", "the Annotated Transformer"),
            *_held("unmasked", "run", "ONNX Runtime: contributed `MultiHeadAttention`, every key padded"),
        ),
        "No other convention has so many answers; some layers give two, depending on the path that they take. Where a caller never looks "
        "at such a row, declare `any`.",
    ),
    "grouping": Convention((
        *_held("contiguous", "torch", "PyTorch: `enable_gqa=True`"),
        *_held("contiguous", "jax", "JAX: `jax.nn.dot_product_attention`"),
        *_held("contiguous", "flax", "Flax: `nnx.MultiHeadAttention`"),
        *_held("contiguous", "keras", "Keras: `GroupQueryAttention`"),
        *_held("contiguous", "transformers", "transformers: Llama, Falcon"),
        *_held("contiguous", "read", "TransformerLens"),
        *_held("strided", "x_transformers", "x-transformers: `kv_heads`"),
    ), "A converter that misses this passes every check of shapes."),
    "rotation": Convention((
        *_held(None, "torch", "PyTorch: `torch.nn.MultiheadAttention`"),
        *_held(None, "transformers", "transformers: BERT, GPT-2, T5, BLOOM"),
        *_held(Rotation(), "transformers", "transformers: Llama, Gemma 2, Qwen3, Falcon, gpt-oss"),
        *_held(Rotation(width=4, pairing="interleaved"), "transformers", "transformers: GPT-J, CodeGen, `rotary_dim=4`"),
    ), "The fields of a `Rotation` are conventions too, [below](#rotationpairing)."),
    "normalise": Convention((
        *_held(None, "torch", "PyTorch: `torch.nn.MultiheadAttention`"),
        *_held("rms", "transformers", "transformers: Qwen3"),
        *_held("rms", "x_transformers", "x-transformers: `qk_rmsnorm`"),
        *_held("layer", "flax", "Flax: `normalize_qk`"),
        *_held("l2", "x_transformers", "x-transformers: `qk_norm`"),
    )),
    "epsilon": Convention((
        *_held(1e-6, "flax", "Flax: `normalize_qk`"),
        *_held(0.3, "transformers", "transformers: Qwen3, `rms_norm_eps=0.3`"),
        *_held(0.0, "x_transformers", "x-transformers: `qk_rmsnorm`"),
    )),
    "softmax_precision": Convention((
        *_held("float32", "jax", "JAX: `jax.nn.dot_product_attention`, whatever it is given"),
        *_held("float32", "flax", "Flax: `nnx.MultiHeadAttention`"),
        *_held("float32", "x_transformers", "x-transformers: own path"),
        *_held("float32", "transformers", "transformers: Llama, Gemma 2, Qwen3, GPT-NeoX, `eager`; BLOOM, MPT"),
        *_held("input", "flax", "Flax: `nnx.MultiHeadAttention` that sows its weights"),
        *_held("input", "x_transformers", "x-transformers: `flash=True`"),
        *_held("input", "transformers", "transformers: Falcon, gpt-oss, and the others with `sdpa`"),
        *_held("float32", "onnx", "ONNX: `Attention`, `softmax_precision=1`"),
        *_held("input", "read", "PyTorch: `torch.nn.MultiheadAttention`", "Haiku: `MultiHeadAttention`"),
        *_held(None, "read", "Equinox: `MultiheadAttention`, at least float32"),
    ), "What is in float32 is not exact in float64: the answer is off by some millionths, which is no fault if it is declared."),
    "product_precision": Convention((
        *_held(None, "torch", "PyTorch: `torch.nn.MultiheadAttention`"),
        *_held("float32", "keras", 'Keras: fused, even with `dtype="float64"`'),
    ), "Of GPT-J in transformers, too, the `eager` scores are taken in float32; its other products are not."),
}  # fmt: skip
"""The conventions by the field of `Policy`."""

ROTATION = {
    "pairing": Convention((
        *_held("half", "transformers", "transformers: Llama, GPT-NeoX"),
        *_held("interleaved", "transformers", "transformers: GPT-J, CodeGen"),
        *_held("interleaved", "x_transformers", "x-transformers: `RotaryEmbedding`"),
        *_held("interleaved", "read", "timm: by default"),
    ), "One is the other with the channels of each head in another order."),
    "width": Convention((
        *_held(None, "transformers", "transformers: Llama"),
        *_held(4, "transformers", "transformers: GPT-NeoX, `partial_rotary_factor=0.4` of 10 channels; GPT-J and CodeGen, `rotary_dim=4`"),
        *_held(4, "x_transformers", "x-transformers: `RotaryEmbedding(4)`"),
    )),
    "base": Convention((
        *_held(10_000.0, "transformers", "transformers: Llama, `rope_theta=10000`"),
        *_held(4096.0, "x_transformers", "x-transformers: `RotaryEmbedding(4, base=4096)`"),
    )),
}  # fmt: skip
"""The conventions by the field of `Rotation`."""


@block
def conventions() -> str:
    """Every field of `Policy` and of `Rotation`, its meaning, its values, and who does what."""
    return "\n\n".join([*_sections(Policy, POLICY, ""), *_sections(Rotation, ROTATION, "rotation.")])


def _sections(kind: type, entries: dict[str, Convention], prefix: str) -> list[str]:
    names = [field.name for field in fields(kind)]
    if names != list(entries):
        raise ValueError(f"attnspec_docs.conventions has {list(entries)}, but the fields of {kind.__name__} are {names}.")
    meanings, hints = described(f"spec.policy.{kind.__name__}", "attributes"), typing.get_type_hints(kind)
    return [
        "\n\n".join([
            f"### `{prefix}{field.name}`",
            _sentence(meanings[field.name][1]),
            f"**Values**: {_values(hints[field.name])}; by default {_written(field.default)}.",
            _table(kind, field.name, entries[field.name]),
            entries[field.name].note,
        ])
        for field in fields(kind)
        if field.default is not MISSING
    ]  # fmt: skip


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def _values(hint: Any) -> str:
    """The values that a field may have, in words."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(_written, typing.get_args(hint)))
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_values(kind) for kind in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"two, each {_values(typing.get_args(hint)[0])}"
    return {float: "a number", int: "a whole number", types.NoneType: "`None`", Rotation: "a [`Rotation`][attnspec.Rotation]"}[hint]


def _written(value: Any) -> str:
    if isinstance(value, Rotation):
        given = [f"{field.name}={getattr(value, field.name)!r}" for field in fields(value) if getattr(value, field.name) != field.default]
        return f"`Rotation({', '.join(given)})`"
    return f"`{value!r}`"


def _table(kind: type, name: str, convention: Convention) -> str:
    for fact in convention.facts:
        kind(**{name: fact.value})  # which refuses what is no value
    rows = [
        (_written(fact.value), version_of(fact.project), fact.where, _known(fact.known))
        for fact in sorted(convention.facts, key=lambda fact: [other.value for other in convention.facts].index(fact.value))
    ]
    return table(("value", "who", "where", "known by"), rows, numbers_from=4)


def version_of(project: str, /) -> str:
    """Name a project and the version that was looked at.

    Args:
        project: its name.

    Returns:
        Both; the name alone where there is no version.

    Raises:
        KeyError: it is not among the projects.
    """
    version = _constraints()[_PINNED[project]] if project in _PINNED else _OTHERS[project]
    return f"{project} {version}".strip()


@cache
def _constraints() -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (_ROOT / "constraints.txt").read_text(), re.MULTILINE))


def _known(how: str) -> str:
    if how in {"run", "read"}:
        return {"run": "a run", "read": "its source"}[how]
    found = [path.name for path in _ROOT.glob(f"tests/test_*{how}.py") if path.stem in {f"test_peers_{how}", f"test_{how}"}]
    if len(found) != 1:
        raise ValueError(f"attnspec_docs.conventions: {how!r} is no test of peers: {found}.")
    return "a test"
