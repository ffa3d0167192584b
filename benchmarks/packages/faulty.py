"""Packages of others in which something is known to be wrong; most of each is right, and that is asked about too."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from attnspec import Heads, Policy, Rotation

from .entry import Entry, Layout, dense, fused, left_alone, linear, over_heads
from .reading import EVEN, FREE, GROUPED, ROOM, ROWS, layer, module_of, module_of_file, ready, taken

ONE = Heads(d_model=24, h=1)


def llms(folder: Path, /) -> list[Entry]:
    """All causal; the one with a cache cuts its mask from the wrong side, so that a step with a past crashes."""
    names, d_in = "W_query W_key W_value out_proj", Heads(d_model=24, h=4)
    torch_names = fused("qkv", "proj")

    def chapter(name: str, *sizes: Any) -> Callable[[], Any]:
        return lambda: ready(getattr(module_of(folder, "llms_from_scratch.ch03"), name)(24, 24, *sizes, qkv_bias=True))

    def step(m: Any, x: Any, cache: Any) -> Any:
        return m(x, use_cache=True, cache=cache)

    cached = {"settings": layer(d_in, linear(names), step, causal=True), "wrong": "causal_geometry causal_alignment mask_construction"}
    return [
        Entry(
            "llms-from-scratch ch03.MultiHeadAttention", chapter("MultiHeadAttention", ROOM, 0.1, 4), "check",
            layer(d_in, linear(names) | left_alone("mask"), lambda m, x: m(x), causal=True),
        ),
        Entry(
            "llms-from-scratch ch03.PyTorchMultiHeadAttention", chapter("PyTorchMultiHeadAttention", 4, 0.1), "check",
            layer(d_in, torch_names, lambda m, x: m(x), causal=True),
        ),
        _llama(folder),
        Entry(
            "llms-from-scratch kv_cache.gpt2.MultiHeadAttention, cached",
            lambda: ready(module_of(folder, "llms_from_scratch.kv_cache.gpt2").MultiHeadAttention(24, 24, ROOM, 0.1, 4, qkv_bias=True)),
            "check", **cached,
        ),
        Entry(
            "llms-from-scratch kv_cache.gpt2.MultiHeadAttention, without a cache",
            lambda: ready(module_of(folder, "llms_from_scratch.kv_cache.gpt2").MultiHeadAttention(24, 24, ROOM, 0.1, 4, qkv_bias=True)),
            "check", layer(d_in, linear(names), lambda m, x: m(x)[0], causal=True),
        ),
    ]  # fmt: skip


def _llama(folder: Path) -> Entry:
    """Its file asks for a tokeniser; whoever calls it gives it the mask and the angles, here in double."""
    found = taken(folder / "llms_from_scratch" / "llama3.py", "GroupedQueryAttention compute_rope_params apply_rope")

    def call(m: Any, x: Any) -> Any:
        drop = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return m(x, drop, *found.compute_rope_params(6, dtype=torch.float64))

    layout = linear("W_query W_key W_value out_proj", bias=False)
    return Entry(
        "llms-from-scratch llama3.GroupedQueryAttention", lambda: ready(found.GroupedQueryAttention(24, 24, 4, 2)), "check",
        layer(GROUPED, layout, call, causal=True, policy=Policy(rotation=Rotation())),
    )  # fmt: skip


def attention_mechanism(folder: Path, /) -> list[Entry]:
    """One is right; one masks the weights; one, over pixels, shapes its result as if channels stood first."""

    def build(file: str, name: str, *sizes: Any, **options: Any) -> Callable[[], Any]:
        return lambda: ready(getattr(module_of(folder, f"AttentionMechanism.model.attention.{file}"), name)(*sizes, **options))

    def call(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
        return m(q, k, v, attention_mask=over_heads(keep))

    def over_pixels(m: Any, x: Any) -> Any:
        return m(x.mT[:, :, None])[:, 1:, 0].mT

    masked = {"mask": "drop", "policy": ROWS["nan"]}
    return [
        Entry(
            "AttentionMechanism ScaledDotProductAttention", build("SelfAttention", "ScaledDotProductAttention", 24, 5, 3, 4), "check",
            layer(FREE, linear("fc_q fc_k fc_v fc_o"), call, **masked),
        ),
        Entry(
            "AttentionMechanism EMSA", build("EMSA", "EMSA", 24, 5, 3, 4, ratio=1, apply_transform=False), "check",
            layer(FREE, linear("fc_q fc_k fc_v fc_o"), call, **masked), "mask_after_softmax",
        ),
        Entry(
            "AttentionMechanism EMSA, without a mask", build("EMSA", "EMSA", 24, 5, 3, 4, ratio=1, apply_transform=False), "check",
            layer(FREE, linear("fc_q fc_k fc_v fc_o"), lambda m, q, k, v: m(q, k, v)),
        ),
        Entry(
            "AttentionMechanism AugmentedConv", build("AAAttention", "AugmentedConv", 24, 25, 1, 24, 24, 4), "check",
            layer(EVEN, fused("qkv_conv", "attn_out", more=" 1 1") | left_alone("conv_out.*"), over_pixels), "head_split_merge_order",
        ),
    ]  # fmt: skip


def torch_multi_head(folder: Path, /) -> list[Entry]:
    """Bends all projections by default; without that, it gives each sample the masks of others."""

    def build(**options: Any) -> Callable[[], Any]:
        return lambda: ready(module_of(folder, "torch_multi_head_attention").MultiHeadAttention(24, 4, **options))

    def call(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
        return m(q, k, v, None if keep is None else keep.expand(len(q), q.shape[1], k.shape[1]))

    layout, name = linear("linear_q linear_k linear_v linear_o"), "torch-multi-head-attention MultiHeadAttention"
    return [
        Entry(f"{name}, as it comes", build(), "check", layer(EVEN, layout, lambda m, q, k, v: m(q, k, v)), ""),
        Entry(
            f"{name}, linear", build(activation=None), "check", layer(EVEN, layout, call, policy=ROWS["uniform"]), "mask_batch_head_tiling"
        ),
        Entry(
            f"{name}, linear, without a mask", build(activation=None), "check", layer(EVEN, layout, lambda m, q, k, v: m(q, k, v))
        ),
    ]  # fmt: skip


def simple(folder: Path, /) -> list[Entry]:
    """Its heads share their small matrices: with identities for all of them, it is attention alone."""

    def attend(queries: Any, keys: Any, values: Any, keep: Any = None) -> Any:
        h, width = queries.shape[1], queries.shape[-1]
        module = ready(module_of(folder, "simple_transformer.self_attention").SelfAttention(h * width, h))
        for each in (module.values, module.keys, module.queries, module.fc_out):
            nn.init.eye_(each.weight)
        nn.init.zeros_(module.fc_out.bias)
        merged = (each.transpose(1, 2).flatten(2) for each in (values, keys, queries))
        return module(*merged, keep).unflatten(2, (h, width)).transpose(1, 2)

    settings = {"heads": EVEN, "policy": ROWS["uniform"], "library": "torch"}
    return [
        Entry("simple-transformer SelfAttention", lambda: attend, "check_attention", settings, "scale_wrong_dim"),
        Entry("simple-transformer SelfAttention, one head", lambda: attend, "check_attention", {**settings, "heads": ONE}),
    ]


def nanodl(folder: Path, /) -> list[Entry]:
    """Layers of Flax: a pair of the module and its variables. Heads are cut from time, and the mask is a factor of the scores."""
    jax = importlib.import_module("jax")
    told = {
        "transformer.MultiHeadAttention": (2, dense("query_projection key_projection value_projection output")),
        "gpt.SelfMultiHeadAttention": (1, _joint("projection", "output")),
        "ijepa.MultiHeadedAttention": (1, _joint("attn_proj", "out_proj")),
    }
    faults = "head_split_merge_order scale_wrong_dim"

    def build(name: str, h: int) -> Callable[[], Any]:
        file, _, kind = name.partition(".")

        def made() -> Any:
            module = getattr(module_of(folder, f"nanodl.__src.models.{file}"), kind)(24, h)
            return module, module.init(jax.random.key(0), *[np.ones((1, 2, 24))] * told[name][0])

        return made

    def call(m: Any, x: Any) -> Any:
        return m[0].apply(m[1], x)

    def call_two(m: Any, q: Any, k: Any) -> Any:
        return m[0].apply(m[1], q, k)

    def masked(m: Any, q: Any, k: Any, keep: Any) -> Any:
        return m[0].apply(m[1], q, k, over_heads(keep))

    first, calls = next(iter(told)), {1: call, 2: call_two}
    found = [Entry(f"nanodl {first}, masked", build(first, 4), "check", layer(EVEN, told[first][1], masked), f"{faults} mask_finite_fill")]
    for name, (inputs, layout) in told.items():
        found += [
            Entry(f"nanodl {name}", build(name, 4), "check", layer(EVEN, layout, calls[inputs]), faults),
            Entry(f"nanodl {name}, one head", build(name, 1), "check", layer(ONE, layout, calls[inputs])),
        ]
    return found


def _joint(qkv: str, o: str) -> Layout:
    return {
        "w_qkv": (f"{qkv}.kernel", "d_model (three h d_k)"), "b_qkv": (f"{qkv}.bias", "(three h d_k)"),
        "w_o": (f"{o}.kernel", "(h d_v) d_model"), "b_o": (f"{o}.bias", "d_model"),
    }  # fmt: skip


def attnhut(folder: Path, /) -> list[Entry]:
    """Right without a mask and without causality; a mask switches causality off."""
    separate, multi = linear("q k v proj", bias=True), Heads(d_model=24, h=4, h_kv=1)
    shared = {name: line for name, line in separate.items() if name[-1] in "qo"}
    shared |= {"w_kv": ("kv.weight", "(two h_kv d_k) d_model"), "b_kv": ("kv.bias", "(two h_kv d_k)")}
    told = [
        ("StandardAttention", (24, 4), EVEN, fused("qkv", "proj")),
        ("GroupedQueryAttention", (24, 4, 2), GROUPED, separate),
        ("MultiQueryAttention", (24, 4), multi, shared),
    ]

    def build(name: str, sizes: tuple[int, ...], **options: Any) -> Callable[[], Any]:
        return lambda: ready(getattr(module_of(folder, "attnhut"), name)(*sizes, bias=True, **options))

    def masked(m: Any, x: Any, keep: Any) -> Any:
        return m(x, attn_mask=over_heads(keep))

    fault = "causal_dropped_or_forced mask_combination"
    found = []
    for name, sizes, heads, layout in told:
        causal = build(name, sizes, causal=True)
        found += [
            Entry(f"attnhut {name}", build(name, sizes), "check", layer(heads, layout, masked)),
            Entry(f"attnhut {name}, causal", causal, "check", layer(heads, layout, lambda m, x: m(x), causal=True)),
            Entry(f"attnhut {name}, causal and masked", causal, "check", layer(heads, layout, masked, causal=True), fault),
        ]
    latent = {"d_model": 24, "call": masked, "causal": True}
    sizes = {"qk_rope_head_dim": 4}
    return [
        *found,
        Entry(
            "attnhut MultiHeadLatentAttention, causal", build("MultiHeadLatentAttention", (24, 4), **sizes), "check_properties",
            {**latent, "call": lambda m, x: m(x)},
        ),
        Entry(
            "attnhut MultiHeadLatentAttention, causal and masked", build("MultiHeadLatentAttention", (24, 4), **sizes),
            "check_properties", latent, fault,
        ),
    ]  # fmt: skip


def flashmha(folder: Path, /) -> list[Entry]:
    """Attends over heads, and to the queries' own input alone; to import it is to run its demonstrations."""

    def build() -> Any:
        rearrange = importlib.import_module("einops").rearrange
        inner = module_of_file(folder / "FlashMHA" / "attention.py")
        found = taken(folder / "FlashMHA" / "FlashMHA.py", "FlashMHA", rearrange=rearrange, FlashAttention=inner.FlashAttention)
        return ready(found.FlashMHA(32, 4))

    settings = layer(Heads(d_model=32, h=4), fused("Wqkv", "out_proj"), lambda m, q, k, v: m(q, k, v))
    return [Entry("flashmha FlashMHA", build, "check", settings, "head_seq_axis_swap operand_routing")]


def forgenn(folder: Path, /) -> list[Entry]:
    """A layer of NumPy with a backward pass of its own, which gives back what it is given; drops weights unless told not to."""
    layout = dense("W_q W_k W_v W_o", weight="", bias="", row="1 ")
    layout |= {f"b_{role}": (f"b_{role}", f"1 {'d_model' if role == 'o' else '(h d_k)'}") for role in "qkvo"}

    whole = layout | left_alone("input", "output")  # which a call leaves behind

    def new() -> Any:
        return module_of(folder, "forgenn.core").MultiHeadAttention(24, 4, 0.3)

    def called() -> Any:
        module = new()
        module.forward(np.ones((1, 1, 24)))
        return module

    return [
        Entry("forgenn MultiHeadAttention", called, "check", layer(EVEN, whole, lambda m, x: m.forward(x, training=False))),
        Entry("forgenn MultiHeadAttention, as it comes", called, "check", layer(EVEN, whole, lambda m, x: m.forward(x)), "dropout_mode"),
        Entry(
            "forgenn MultiHeadAttention, backward", lambda: _Differentiated(new()), "check", layer(EVEN, layout, lambda m, x: m(x)),
            "gradient_wrong gradient_missing",
        ),
    ]  # fmt: skip


class _Differentiated(nn.Module):
    """A layer of NumPy with a backward pass of its own, for PyTorch to differentiate; its arrays are this module's parameters."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        for name, array in vars(inner).items():
            if isinstance(array, np.ndarray):
                self.register_parameter(name, nn.Parameter(torch.from_numpy(array)))
        self.inner = lambda: inner

    def forward(self, x: Any) -> Any:
        for name, parameter in self.named_parameters():
            setattr(self.inner(), name, parameter.detach().numpy())
        return _Own.apply(x, self.inner())


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, inner: Any) -> Any:
        ctx.inner = inner
        return torch.from_numpy(inner.forward(x.detach().numpy(), training=False))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.from_numpy(ctx.inner.backward(gradient.numpy(), 0.0)), None


def llm(folder: Path, /) -> list[Entry]:
    """Causal, but for several new tokens after a past, to which no mask is applied."""
    layout = fused("qkv_proj", "out_proj", bias=False) | left_alone("mask")

    def build() -> Any:
        return ready(module_of(folder, "llm_from_scratch.models.attention").MultiHeadCausalSelfAttention(24, 4, ROOM, 0.1))

    def step(m: Any, x: Any, cache: Any) -> Any:
        forward = module_of(folder, "llm_from_scratch.models.attention").mha_forward_with_cache
        y, *cache = forward(m, x, *(cache or ()))
        return y, tuple(cache)

    return [
        Entry("llm-from-scratch MultiHeadCausalSelfAttention", build, "check", layer(EVEN, layout, lambda m, x: m(x), causal=True)),
        Entry(
            "llm-from-scratch mha_forward_with_cache", build, "check", layer(EVEN, layout, step, causal=True), "causal_dropped_or_forced"
        ),
    ]  # fmt: skip
