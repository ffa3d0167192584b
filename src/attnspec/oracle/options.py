"""What an implementation of attention may be asked for: the names of its options, and values for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..spec.positions import alibi_slopes

Sizes = Mapping[str, int]
Draw = Callable[[np.random.Generator, Sizes], Any]


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        meaning: what it asks for.
        synonyms: what else an argument with this meaning is called.
        draws: ways to draw a value, by a word that says what is particular about it.
        square: whether it makes sense only where queries and keys are the same tokens.
        needs: options that must be asked for too.
        excludes: options that it cannot be asked for with.
    """

    meaning: str
    synonyms: tuple[str, ...] = ()
    draws: Mapping[str, Draw] = field(default_factory=dict)
    square: bool = False
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()


def _keep(rng: np.random.Generator, sizes: Sizes, *axes: str, share: float = 0.6) -> Any:
    """Draw a mask in which every query keeps a key."""
    shape = tuple(sizes[axis] if axis in axes else 1 for axis in ("batch", "h", "seq_q", "seq_k"))
    keep = rng.random(shape) < share
    np.put_along_axis(keep, rng.integers(shape[-1], size=(*shape[:-1], 1)), values=True, axis=-1)
    keep[..., 0, :] &= ~_whole(keep)[..., 0, :] | (np.arange(shape[-1]) > 0)  # a mask that drops nothing would test nothing
    return keep


def _whole(keep: Any) -> Any:
    return keep.all(axis=-1, keepdims=True) & (keep.shape[-1] > 1)


def _keep_with_empty_row(rng: np.random.Generator, sizes: Sizes) -> Any:
    keep = _keep(rng, sizes, "batch", "seq_q", "seq_k")
    keep[0, :, rng.integers(sizes["seq_q"])] = False
    return keep


def _padding(rng: np.random.Generator, sizes: Sizes) -> Any:
    return _lengths(rng, sizes)[:, None] > np.arange(sizes["seq_k"])


def _left_padding(rng: np.random.Generator, sizes: Sizes) -> Any:
    return _padding(rng, sizes)[:, ::-1]


def _lengths(rng: np.random.Generator, sizes: Sizes) -> Any:
    """Draw a length for each sequence, all different where that is possible."""
    batch, seq = sizes["batch"], sizes["seq_k"]
    return rng.permutation(np.arange(max(1, seq - batch), seq + 1))[:batch] if seq >= batch else rng.integers(1, seq + 1, batch)


def _empty(rng: np.random.Generator, sizes: Sizes) -> Any:
    lengths = _lengths(rng, sizes)
    lengths[0] = 0
    return lengths


def _documents(rng: np.random.Generator, sizes: Sizes) -> Any:
    return np.sort(rng.integers(0, 2 + sizes["seq_k"] // 4, (sizes["batch"], sizes["seq_k"])))


def _cumulative(rng: np.random.Generator, sizes: Sizes) -> Any:
    seq = sizes["seq_k"]
    return np.array([0, *np.sort(rng.choice(np.arange(1, seq), size=min(2, seq - 1), replace=False)), seq]) if seq > 1 else np.array([0, 1])


def _positions(rng: np.random.Generator, sizes: Sizes) -> Any:
    return np.sort(rng.permuted(np.tile(np.arange(2 * sizes["seq_k"]), (sizes["batch"], 1)), axis=1)[:, : sizes["seq_k"]])


def _survivors(rng: np.random.Generator, sizes: Sizes) -> Any:
    return rng.random(tuple(sizes[name] for name in ("batch", "h", "seq_q", "seq_k"))) < 0.7


def _of_scores(rng: np.random.Generator, sizes: Sizes) -> Any:
    return 2 * rng.normal(size=tuple(sizes[name] for name in ("batch", "h", "seq_q", "seq_k")))


OPTIONS: dict[str, Option] = {
    "keep": Option(
        "True where the query may attend to the key",
        ("mask", "attn_mask", "attention_mask", "attend"),
        {
            "drawn": lambda rng, sizes: _keep(rng, sizes, "batch", "h", "seq_q", "seq_k"),
            "shared by the heads": lambda rng, sizes: _keep(rng, sizes, "batch", "seq_q", "seq_k"),
            "shared by the queries": lambda rng, sizes: _keep(rng, sizes, "batch", "seq_k"),
            "shared by the samples": lambda rng, sizes: _keep(rng, sizes, "seq_q", "seq_k"),
            "all kept": lambda _, sizes: np.ones((sizes["batch"], 1, sizes["seq_q"], sizes["seq_k"]), bool),
            "with an empty row": _keep_with_empty_row,
        },
    ),
    "padding": Option(
        "True for a key that is real",
        ("key_padding_mask", "padding_mask", "keep_keys"),
        {"drawn": _padding, "on the left": _left_padding, "none": lambda _, s: np.ones((s["batch"], s["seq_k"]), bool)},
    ),
    "lengths": Option(
        "how many keys of each sample are real", ("valid_lens", "seq_lens"), {"drawn": _lengths, "with an empty one": _empty}
    ),
    "causal": Option("whether a query sees only keys up to its own position", ("is_causal",), {"on": lambda *_: True}),
    "offset": Option(
        "the position of the first query, where the first key is at 0", ("query_offset", "start_pos"),
        {"drawn": lambda rng, _: int(rng.integers(1, 4))}, needs=("causal",),
    ),
    "scale": Option("the factor for the scores", ("softmax_scale", "sm_scale"), {"drawn": lambda rng, _: float(rng.uniform(0.2, 0.6))}),
    "bias": Option(
        "what is added to the scaled scores", ("attn_bias", "attention_bias", "position_bias"),
        {
            "drawn": _of_scores,
            "shared by the samples": lambda rng, sizes: _of_scores(rng, {**sizes, "batch": 1}),
        },
    ),
    "window": Option(
        "how many keys a query sees, up to itself and itself included", ("sliding_window", "window_size"),
        {"drawn": lambda rng, sizes: int(rng.integers(2, max(3, sizes["seq_k"] - 1)))},
    ),
    "window_left": Option("how many keys before itself a query sees", ("left",), {"drawn": lambda rng, _: int(rng.integers(1, 4))}),
    "window_right": Option("how many keys behind itself a query sees", ("right",), {"drawn": lambda rng, _: int(rng.integers(1, 3))}),
    "softcap": Option(
        "the limit of cap * tanh(score / cap)", ("cap", "logit_cap", "logits_soft_cap"),
        {"drawn": lambda rng, _: float(rng.uniform(1, 3))},
    ),
    "sinks": Option("a score for each head that takes its share", ("sink",), {"drawn": lambda rng, sizes: rng.normal(size=sizes["h"])}),
    "slopes": Option(
        "slopes of a bias that falls with the distance", ("alibi_slopes",), {"drawn": lambda _, sizes: np.array(alibi_slopes(sizes["h"]))}
    ),
    "positions": Option("where the tokens stand", ("position_ids",), {"drawn": _positions}, square=True, excludes=("offset", "cumulative")),
    "cumulative": Option(
        "where packed documents begin and end", ("cu_seqlens",), {"drawn": _cumulative}, square=True, excludes=("lengths", "positions")
    ),
    "documents": Option("the number of each token's document", ("segment_ids", "document_ids"), {"drawn": _documents}, square=True),
    "gates": Option(
        "a factor for each head", ("head_mask",),
        {"drawn": lambda rng, sizes: rng.uniform(0.5, 2, sizes["h"]) * (np.arange(sizes["h"]) != 0)},
    ),
    "survivors": Option("which weights stay, where some are dropped", ("dropout_mask",), {"drawn": _survivors}),
    "return_weights": Option(
        "whether the weights are returned too", ("need_weights", "return_attention", "output_attentions"), {"on": lambda *_: True}
    ),
}  # fmt: skip
"""The options by their names; `dropout` goes with `survivors`, `training` and `cache` say how a call is made."""

MODES = ("dropout", "training", "cache", "h_kv", "enable_gqa", "grouped")
"""What a call says besides: the rate of dropout, whether it is training, the cache, and that heads may share keys."""

_DROPOUT = {"dropout_p": "dropout", "dropout_rate": "dropout", "p": "dropout", "train": "training", "is_training": "training"}

NAMES = {word: name for name, option in OPTIONS.items() for word in (name, *option.synonyms)} | {name: name for name in MODES} | _DROPOUT
"""The option that an argument of this name stands for."""
