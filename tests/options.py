"""Problems with every option of the specification, and a pairwise design over all of them.

A choice names a value for each option; `draw` makes the arrays that belong to it. Every pair of values of two options
occurs in one of the choices of `PAIRWISE`.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from allpairspy import AllPairs

import attnspec
from attnspec import Dropout, Heads, Mask, Parameters, Policy, Positions, Rotation

VALUES: dict[str, tuple[Any, ...]] = {
    "source": ("self", "cross", "cross_v"),
    "heads": ("equal", "contiguous", "strided", "one_kv"),
    "biases": (True, False),
    "normalise": (None, "rms", "layer", "l2"),
    "gains": ("none", "shared", "each"),
    "rotation": (None, "half", "interleaved", "partial"),
    "places": ("default", "offset", "given", "bottom_right"),
    "causal": (False, True),
    "window": ((None, None), (2, None), (1, 3)),
    "keep": ("none", "array", "padding", "lengths", "documents", "drop", "additive"),
    "bias": ("none", "full", "row", "linear", "relative"),
    "scale": (None, 0.3),
    "cap": (None, "before", "after"),
    "empty_row": ("zero", "nan", "uniform", "unmasked"),
    "sinks": (False, True),
    "extra": (False, True),
    "gates": (False, True),
    "dropout": (False, True),
    "softmax_precision": (None, "float64", "input"),
    "product_precision": (None, "float64"),
}

NEUTRAL = {name: values[0] for name, values in VALUES.items()}
"""A choice in which every option is at its neutral value."""

PAIRWISE = [
    dict(zip(VALUES, values, strict=True)) for values in AllPairs(OrderedDict((n, range(len(v))) for n, v in VALUES.items()).values())
]
PAIRWISE = [{name: VALUES[name][index] for name, index in choice.items()} for choice in PAIRWISE]

SIZES = {"batch": 2, "seq_q": 5, "seq_k": 7, "d_model": 13, "d_key_in": 11, "d_value_in": 17, "d_k": 6, "d_v": 3}


@dataclass(frozen=True)
class Drawn:
    """A call of `multi_head_attention`: its arrays and options."""

    x: Any
    parameters: Parameters[Any]
    options: dict[str, Any]

    def convert(self, wrap: Callable[[np.ndarray], Any]) -> "Drawn":
        """Bring the arrays to another library or dtype."""
        return Drawn(wrap(self.x), self.parameters.map(wrap), {name: _convert(value, wrap) for name, value in self.options.items()})

    def run(self) -> Any:
        """Compute it."""
        return attnspec.multi_head_attention(self.x, self.parameters, **self.options)


def _convert(value: Any, wrap: Callable[[np.ndarray], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return wrap(value)
    if isinstance(value, Dropout):
        return Dropout(value.rate, lambda shape: wrap(value.generator(shape)))
    if isinstance(value, tuple):
        return tuple(_convert(item, wrap) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, Policy):
        return replace(value, **{field.name: _convert(getattr(value, field.name), wrap) for field in dataclasses.fields(value)})
    return value


def draw(choice: dict[str, Any], seed: int = 0, sizes: dict[str, int] = SIZES) -> Drawn:  # never changed
    """Draw the arrays of a choice, in float64."""
    rng = np.random.default_rng(seed)
    sizes = _sizes(choice, sizes)
    heads = Heads(**{field.name: sizes[field.name] for field in dataclasses.fields(Heads)})
    x = rng.normal(size=(sizes["batch"], sizes["seq_q"], sizes["d_model"]))
    options: dict[str, Any] = {"policy": _policy(choice), "causal": choice["causal"], "scale": choice["scale"]}
    if choice["source"] != "self":
        options["context"] = rng.normal(size=(sizes["batch"], sizes["seq_k"], sizes["d_key_in"]))
    if choice["source"] == "cross_v":
        options["context_v"] = rng.normal(size=(sizes["batch"], sizes["seq_k"], sizes["d_value_in"]))
    options |= {"keep": _keep(choice["keep"], sizes, rng), "bias": _bias(choice["bias"], sizes, rng), **_places(choice, sizes, rng)}
    if choice["dropout"]:
        uniform = rng.random((sizes["batch"], sizes["h"], sizes["seq_q"], sizes["seq_k"] + 2 * choice["extra"]))
        options["dropout"] = Dropout(0.25, uniform.reshape)
    return Drawn(x, _parameters(choice, heads, rng), options)


def _sizes(choice: dict[str, Any], sizes: dict[str, int]) -> dict[str, int]:
    h, h_kv = {"equal": (3, 3), "contiguous": (6, 3), "strided": (6, 3), "one_kv": (4, 1)}[choice["heads"]]
    sizes = {**sizes, "h": h, "h_kv": h_kv}
    if choice["source"] == "self":
        sizes |= {"seq_k": sizes["seq_q"], "d_key_in": sizes["d_model"], "d_value_in": sizes["d_model"]}
    return sizes if choice["source"] == "cross_v" else sizes | {"d_value_in": sizes["d_key_in"]}


def _policy(choice: dict[str, Any]) -> Policy:
    rotations = {None: None, "half": Rotation(), "interleaved": Rotation(pairing="interleaved", base=100.0), "partial": Rotation(width=4)}
    return Policy(
        cap=1.5 if choice["cap"] else None,
        cap_order=choice["cap"] or "before",
        causal_anchor="bottom_right" if choice["places"] == "bottom_right" else "top_left",
        window=choice["window"],
        empty_row=choice["empty_row"],
        grouping="strided" if choice["heads"] == "strided" else "contiguous",
        rotation=rotations[choice["rotation"]],
        normalise=choice["normalise"],
        softmax_precision=choice["softmax_precision"],
        product_precision=choice["product_precision"],
    )


def _parameters(choice: dict[str, Any], heads: Heads, rng: np.random.Generator) -> Parameters[Any]:
    parameters = Parameters.random(heads, seed=int(rng.integers(1 << 30)), bias=choice["biases"])
    more: dict[str, Any] = {}
    if choice["normalise"] and choice["gains"] != "none":
        own = choice["gains"] == "each"
        more |= {
            "gain_q": rng.normal(size=(heads.h if own else 1, heads.d_k)),
            "gain_k": rng.normal(size=(heads.h_kv if own else 1, heads.d_k)),
        }
    if choice["extra"]:
        more |= {"extra_k": rng.normal(size=(heads.h_kv, 2, heads.d_k)), "extra_v": rng.normal(size=(heads.h_kv, 2, heads.d_v))}
    more |= {name: rng.normal(size=heads.h) for name in ("sinks", "gates") if choice[name]}
    return replace(parameters, **more)


def _keep(kind: str, sizes: dict[str, int], rng: np.random.Generator) -> Any:
    batch, h, seq_q, seq_k = (sizes[name] for name in ("batch", "h", "seq_q", "seq_k"))
    if kind == "array":
        keep = rng.random((batch, h, seq_q, seq_k)) < 0.6
        keep[0, 0, 1] = False  # a query that keeps no key
        return keep
    if kind == "drop":
        return Mask.drop(rng.random((h, seq_q, seq_k)) < 0.4, "h seq_q seq_k")
    if kind == "additive":
        return Mask.additive(np.where(rng.random((batch, seq_q, seq_k)) < 0.5, -np.inf, 0.0), "batch seq_q seq_k")
    if kind == "documents":
        return Mask.documents(np.sort(rng.integers(0, 3, (batch, seq_q))), np.sort(rng.integers(0, 3, (batch, seq_k))))
    if kind == "lengths":
        return Mask.lengths(np.array([0, seq_k - 1]))
    return Mask.keep(rng.random((batch, seq_k)) < 0.6, "batch seq_k") if kind == "padding" else None


def _bias(kind: str, sizes: dict[str, int], rng: np.random.Generator) -> Any:
    batch, h, seq_q, seq_k = (sizes[name] for name in ("batch", "h", "seq_q", "seq_k"))
    where = np.arange(seq_q)[None], np.arange(seq_k)[None]
    if kind == "linear":
        return attnspec.linear_bias(np.array(attnspec.alibi_slopes(h)), *where)
    if kind == "relative":
        return attnspec.relative_bias(rng.normal(size=(8, h)), *where, max_distance=5)
    shapes = {"full": (batch, h, seq_q, seq_k), "row": (1, h, seq_q, 1)}
    return rng.normal(size=shapes[kind]) if kind in shapes else None


def _places(choice: dict[str, Any], sizes: dict[str, int], rng: np.random.Generator) -> dict[str, Any]:
    asked = choice["causal"] or choice["window"] != (None, None) or choice["rotation"]
    if choice["places"] == "offset" and asked:
        return {"offset": 2}
    if choice["places"] == "given":
        queries, keys = (rng.integers(0, 9, (sizes["batch"], sizes[name])) for name in ("seq_q", "seq_k"))
        return {"positions": Positions(queries, keys)}
    return {}
