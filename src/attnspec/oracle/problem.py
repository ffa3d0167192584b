"""A problem: one call of attention, to which the specification has the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..spec.attend import Dropout, blend, gate
from ..spec.chain import Places, compute, dropped, realise, weigh
from ..spec.fan_out import normalise, share_keys, share_values
from ..spec.parameters import Parameters
from ..spec.policy import Policy
from ..spec.positions import Positions, linear_bias, rotate
from ..spec.ragged import packed
from ..spec.rules import Mask
from ..step import Trace, trace

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Answer:
    """What an implementation answered, or what the specification does.

    Attributes:
        y: the output, in float64.
        weights: each head's weights; None where they were not asked for.
        dtype: the dtype in which the output came.
    """

    y: Array
    weights: Array | None = None
    dtype: str = "float64"


@dataclass(frozen=True, eq=False)
class Problem:
    """One call of attention; all arrays are NumPy's, in float64.

    Attributes:
        queries: the input of a layer; or each head's queries, where attention alone is asked for.
        keys: the context of a layer; or each head's keys.
        values: the context whose content is blended; or each head's values.
        parameters: those of a layer; None where attention alone is asked for.
        policy: the conventions.
        options: what else the call asks for, by the names of `OPTIONS`; what is not there is not asked for.
        history: how many tokens each call before this one gave to the cache; None where there is no cache.
        reordered: which sequence goes on in each place of the batch since the call before; None where each goes on in its own.
        causal: whether causality is built in.
        seed: what it was drawn from.
        spread: the standard deviation of the scaled scores that it was drawn for.
    """

    queries: Array
    keys: Array
    values: Array
    parameters: Parameters[Array] | None = None
    policy: Policy = field(default_factory=Policy)
    options: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[int, ...] | None = None
    reordered: Array | None = None
    causal: bool = False
    seed: int = 0
    spread: float = 1.0

    def change(self, **fields: Any) -> Self:
        """Make another problem of it: fields of its own, or options by name; an option that is None is taken away."""
        changed: dict[str, Any] = {name: value for name, value in fields.items() if name in self.__dataclass_fields__}
        asked = {**self.options, **{name: value for name, value in fields.items() if name not in changed}}
        changed.setdefault("options", {name: value for name, value in asked.items() if value is not None})
        return replace(self, **changed)

    @property
    def past(self) -> int | None:
        """How many of the keys a cache held before this call; None where there is no cache."""
        return None if self.history is None else sum(self.history)

    @property
    def is_layer(self) -> bool:
        """Whether it asks for a whole layer, or for attention alone."""
        return self.parameters is not None

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis."""
        if self.parameters is not None:
            heads = {name: int(size) for name, size in vars(self.parameters.heads).items()}
            return {"batch": len(self.queries), "seq_q": self.queries.shape[1], "seq_k": self.keys.shape[1], **heads}
        (batch, h, seq_q, d_k), (h_kv, seq_k, d_v) = self.queries.shape, self.values.shape[1:]
        return {"batch": batch, "seq_q": seq_q, "seq_k": seq_k, "h": h, "h_kv": h_kv, "d_k": d_k, "d_v": d_v}

    @property
    def is_causal(self) -> bool:
        """Whether a query sees only keys up to its own position."""
        return self.causal or bool(self.options.get("causal"))

    @property
    def effective_policy(self) -> Policy:
        """The policy with what the options say."""
        options, said = self.options, {}
        if "softcap" in options:
            said["cap"] = options["softcap"]
        if "window" in options:
            said["window"] = (options["window"] - 1, 0)
        if "window_left" in options or "window_right" in options:
            said["window"] = (options.get("window_left"), options.get("window_right"))
        return replace(self.policy, **said)

    @property
    def keep(self) -> Array | None:
        """All that says which keys a query may attend to, but for causality and the window, as one array."""
        rules = self._rules()
        return None if not rules.rules else rules.realise(self._outline("seq_q"), self._outline("seq_k"), None)

    @property
    def visible(self) -> Array:
        """Which keys each query may attend to, all told."""
        policy, queries, keys = self.effective_policy, self._outline("seq_q"), self._outline("seq_k")
        kept = realise(queries, keys, self._rules(), self.places(queries, keys), policy, causal=self.is_causal)
        sizes = self.sizes
        shape = tuple(sizes[name] for name in ("batch", "h", "seq_q", "seq_k"))
        return np.ones(shape, bool) if kept is None else np.broadcast_to(kept, shape)

    @property
    def empty_rows(self) -> Array:
        """For which queries some head keeps no key."""
        empty: Array = ~np.all(np.any(self.visible, axis=-1), axis=1)
        return empty

    def run(self) -> Answer:
        """Answer it by the specification."""
        found = self._attend() if self.parameters is None else self._layer(self.parameters)
        return Answer(*found)

    def traced(self) -> tuple[Answer, Trace]:
        """Answer it by the specification, and record its steps."""
        with trace() as steps:
            return self.run(), steps

    def _layer(self, parameters: Parameters[Array]) -> tuple[Array, Array | None]:
        options = self.options
        more = {name: options[name] for name in ("sinks", "gates") if name in options}
        asked = self.is_causal or self.effective_policy.window != (None, None) or self.policy.rotation is not None
        positions = self._positions()
        offset = options.get("offset", self.past) if asked and positions is None else None
        found = compute(
            self.queries, replace(parameters, **more) if more else parameters, self.effective_policy, context=self.keys,
            context_v=self.values, keep=self._rules(), bias=self._bias(), causal=self.is_causal, offset=offset,
            scale=options.get("scale"), positions=positions, dropout=self._dropout(), need_weights=True,
        )  # fmt: skip
        return found.y, found.weights

    def _attend(self) -> tuple[Array, Array]:
        policy, queries, keys, values = self.effective_policy, self.queries, self.keys, self.values
        if policy.normalise is not None:
            queries = normalise(queries, None, kind=policy.normalise, epsilon=policy.epsilon)
            keys = normalise(keys, None, kind=policy.normalise, epsilon=policy.epsilon)
        places = self.places(queries, keys)
        if policy.rotation is not None:
            queries = rotate(queries, places.positions().queries, **vars(policy.rotation))
            keys = rotate(keys, places.positions().keys, **vars(policy.rotation))
        if (h := queries.shape[1]) != keys.shape[1]:
            keys, values = share_keys(keys, h=h, grouping=policy.grouping), share_values(values, h=h, grouping=policy.grouping)
        kept = realise(queries, keys, self._rules(), places, policy, causal=self.is_causal)
        scale, sinks = self.options.get("scale"), self.options.get("sinks")
        weights = weigh(queries, keys, policy, kept=kept, bias=self._bias(), scale=scale, sinks=sinks)
        found = blend(dropped(weights, self._dropout()), values, precision=policy.product_precision)
        return (gate(found, self.options["gates"]) if "gates" in self.options else found), weights

    def _outline(self, seq: str) -> Array:
        return np.empty((self.sizes["batch"], self.sizes["h"], self.sizes[seq], 0))

    def places(self, queries: Array, keys: Array, /) -> Places[Array]:
        """Where queries and keys stand."""
        offset = self.options.get("offset", self.past)
        if offset is None:
            offset = keys.shape[2] - queries.shape[2] if self.policy.causal_anchor == "bottom_right" else 0
        return Places(queries, keys, self._positions(), offset)

    def _positions(self) -> Positions[Array] | None:
        if "positions" in self.options:
            return Positions(self.options["positions"], self.options["positions"])
        if "cumulative" in self.options:
            return packed(self.options["cumulative"], seq_q=self.sizes["seq_q"], seq_k=self.sizes["seq_k"])[1]
        return None

    def _rules(self) -> Mask:
        options, rules = self.options, Mask()
        if "keep" in options:
            rules &= Mask.keep(options["keep"])
        if "padding" in options:
            rules &= Mask.keep(options["padding"], "batch seq_k")
        if "lengths" in options:
            rules &= Mask.lengths(options["lengths"])
        if "documents" in options:
            rules &= Mask.documents(options["documents"])
        if "cumulative" in options:
            rules &= packed(options["cumulative"], seq_q=self.sizes["seq_q"], seq_k=self.sizes["seq_k"])[0]
        return rules

    def _bias(self) -> Array | None:
        bias: Array | None = self.options.get("bias")
        slopes: Array | None = self.options.get("slopes")
        if slopes is None:
            return bias
        places = self.places(self._outline("seq_q"), self._outline("seq_k")).positions()
        linear = linear_bias(slopes, places.queries, places.keys)
        return linear if bias is None else linear + bias

    def _dropout(self) -> Dropout | None:
        survivors = self.options.get("survivors")
        if survivors is None:
            return None
        return Dropout(self.options["dropout"], lambda _: np.where(survivors, 1.0, 0.0))


@dataclass(frozen=True)
class Crash:
    """That an implementation raised an error instead of answering.

    Attributes:
        error: the kind of the error and what it says.
        inside: whether it was raised in code that the implementation called, not where it was called itself.
    """

    error: str
    inside: bool = True


SIGNIFICANT = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""How many bits of a number each precision keeps."""


def round_to(x: Array, precision: str, /) -> Array:
    """Round numbers to a precision, so that they can be handed over exactly; what is no float stays.

    Args:
        x: the numbers.
        precision: the name of a dtype.

    Returns:
        The rounded numbers, in float64.
    """
    if x.dtype != np.float64 or precision == "float64":
        return x
    if precision != "bfloat16":
        return x.astype(precision).astype(np.float64)
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def rounded(problem: Problem, precision: str, /) -> Problem:
    """Round every number of a problem to a precision; arrays that are the same stay the same."""
    known: dict[int, Array] = {}

    def of(x: Any) -> Any:
        return known.setdefault(id(x), round_to(x, precision)) if isinstance(x, np.ndarray) else x

    options = {name: of(value) for name, value in problem.options.items()}
    parameters = None if problem.parameters is None else problem.parameters.map(of)
    sources = {name: of(getattr(problem, name)) for name in ("queries", "keys", "values")}
    return replace(problem, **sources, options=options, parameters=parameters)
