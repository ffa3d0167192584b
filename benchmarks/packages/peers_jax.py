"""JAX, Flax, Haiku, Equinox and Keras, all of it right.

A layer of Flax' linen or of Haiku is a pair: the module, and its variables as nested dictionaries.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from attnspec import Heads, Policy

from .entry import Entry, over_heads

EVEN = Heads(d_model=24, h=4)
FREE = Heads(d_model=24, h=4, d_k=5, d_v=3, d_key_in=17, d_value_in=19)
UNIFORM = Policy(empty_row="uniform")
FLOAT32 = Policy(empty_row="uniform", softmax_precision="float32")
SINGLE = Policy(empty_row="any", softmax_precision="float32", product_precision="float32")  # in float16 it is not uniform


def _jax() -> Any:
    return importlib.import_module("jax")


def _function() -> Any:
    return _jax().nn.dot_product_attention


def _dot_product(f: Any, q: Any, k: Any, v: Any, keep: Any, bias: Any, causal: Any, scale: Any, window: Any) -> Any:  # noqa: PLR0917
    sides = None if window is None else (window - 1, 0)
    return f(q, k, v, bias, keep, is_causal=causal, scale=scale, local_window_size=sides)


def _with_lengths(f: Any, q: Any, k: Any, v: Any, lengths: Any, h_kv: Any) -> Any:  # noqa: PLR0917
    del h_kv  # it sees how many there are
    return f(q, k, v, key_value_seq_lengths=None if lengths is None else lengths.astype("int32"))


def _linen() -> Any:
    jax, nn = _jax(), importlib.import_module("flax.linen")
    module = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=24, out_features=24)
    return module, module.init(jax.random.key(0), np.ones((1, 1, 24)))


def _linen_call(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
    return m[0].apply(m[1], q, k, v, mask=over_heads(keep))


def _nnx(h_kv: int, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        nnx = importlib.import_module("flax.nnx")
        sizes = {"num_heads": 4, "in_features": 24, "qkv_features": 24, "num_kv_heads": h_kv}
        return nnx.MultiHeadAttention(**sizes, decode=False, rngs=nnx.Rngs(0), **options)

    return build


def _nnx_call(m: Any, q: Any, k: Any, v: Any, keep: Any, causal: Any) -> Any:  # noqa: PLR0917
    return m(q, k, v, mask=over_heads(keep), is_causal=causal)


def _haiku() -> Any:
    """Build its layer, whose -1e30 for dropped scores is minus infinity in float16: a row without keys is NaN there, or uniform."""
    jax, hk = _jax(), importlib.import_module("haiku")

    def forward(q: Any, k: Any, v: Any, mask: Any) -> Any:
        constant = hk.initializers.Constant(0.0)
        return hk.MultiHeadAttention(4, 5, w_init=constant, value_size=3, model_size=24)(q, k, v, mask=mask)

    module = hk.transform(forward)
    return module, module.init(jax.random.key(0), *(np.ones((1, 1, width)) for width in (24, 17, 19)), None)


def _haiku_call(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
    return m[0].apply(m[1], None, q, k, v, over_heads(keep))


def _equinox() -> Any:
    jax, nn = _jax(), importlib.import_module("equinox").nn
    sizes = {"key_size": 17, "value_size": 19, "qk_size": 5, "vo_size": 3}
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    return nn.MultiheadAttention(4, 24, **sizes, **biases, key=jax.random.key(0))


def _equinox_call(m: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
    """It knows no batch; a mask may be shared by the samples."""
    keep = None if keep is None else keep + np.zeros((len(q), q.shape[1], k.shape[1]), bool)
    return _jax().vmap(m)(q, k, v, keep)


def _keras(h_kv: int) -> Callable[[], Any]:
    """Build its layer, on the backend that is chosen; it knows float64 only on the path that returns the weights."""

    def build() -> Any:
        os.environ.setdefault("KERAS_BACKEND", "torch")
        layers = importlib.import_module("keras").layers
        multi = layers.MultiHeadAttention(4, 6, dtype="float64")
        layer = multi if h_kv == EVEN.h else layers.GroupQueryAttention(6, 4, h_kv, dtype="float64")
        layer.build(*[(1, 1, 24)] * 3)
        return layer

    return build


def _keras_call(m: Any, q: Any, k: Any, v: Any, keep: Any, causal: Any) -> Any:  # noqa: PLR0917
    return m(q, v, k, attention_mask=keep, use_causal_mask=causal)


def _keras_scores(m: Any, q: Any, k: Any, v: Any, keep: Any, causal: Any) -> Any:  # noqa: PLR0917
    return m(q, v, k, attention_mask=keep, use_causal_mask=causal, return_attention_scores=True)


def _layer(name: str, build: Any, layout: str, call: Any, heads: Heads = EVEN, policy: Policy = UNIFORM) -> Entry:  # noqa: PLR0917
    return Entry(name, build, "check", {"heads": heads, "layout": layout, "call": call, "policy": policy})


_BSHD = {"order": "bshd", "library": "jax", "policy": FLOAT32}
_GROUPED = Heads(d_model=24, h=4, h_kv=2)

ENTRIES = [
    Entry("jax dot_product_attention", _function, "check_attention", {"heads": EVEN, "call": _dot_product, **_BSHD}),
    Entry("jax dot_product_attention, grouped", _function, "check_attention", {"heads": _GROUPED, "call": _with_lengths, **_BSHD}),
    _layer("flax linen.MultiHeadDotProductAttention", _linen, "flax", _linen_call),
    _layer("flax nnx.MultiHeadAttention", _nnx(4), "flax", _nnx_call, policy=FLOAT32),
    _layer("flax nnx.MultiHeadAttention, grouped", _nnx(2), "flax", _nnx_call, _GROUPED, FLOAT32),
    _layer("haiku MultiHeadAttention", _haiku, "haiku", _haiku_call, FREE, Policy(empty_row="any")),
    _layer("equinox MultiheadAttention", _equinox, "equinox", _equinox_call, FREE),
    _layer("keras MultiHeadAttention", _keras(4), "keras", _keras_call, policy=SINGLE),
    _layer("keras GroupQueryAttention", _keras(2), "keras", _keras_call, _GROUPED, SINGLE),
    _layer("keras MultiHeadAttention, with its weights", _keras(4), "keras", _keras_scores, policy=Policy()),
    _layer("keras GroupQueryAttention, with its weights", _keras(2), "keras", _keras_scores, _GROUPED, Policy()),
]
