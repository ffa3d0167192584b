"""The attention of a model's layer computed again, by the specification, and held against the model's own."""

from collections.abc import Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..spec.fan_out import share_keys, share_values
from ..spec.multi_head import attend, multi_head_attention
from ..spec.policy import Policy
from ..step import Trace, trace
from .habits import habit
from .rounding import allowances, projections_of
from .run import Layer

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Distance:
    """How far the specification and the model are apart.

    Attributes:
        difference: the largest difference of two elements.
        share: the largest share of what rounding explains that a difference takes; above 1 it is no rounding.
    """

    difference: float
    share: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains all of it."""
        return self.share <= 1


@dataclass(frozen=True)
class Replay:
    """A layer computed by the specification.

    Attributes:
        layer: what the model did.
        steps: what the specification did.
        distances: how far they are apart in each step's result, by the name of the step.
    """

    layer: Layer
    steps: Trace
    distances: Mapping[str, Distance]

    @property
    def weights(self) -> Array:
        """For each head and word, how it shares its attention among the words."""
        weights: Array = self.steps["softmax"].result[0]
        return weights

    @property
    def keep(self) -> Array:
        """For each head and word, which words it may look at; all, unless there is a mask."""
        weights: Array = self.steps["softmax"].result
        kept: Array = self.steps["mask"].arguments["keep"] if "mask" in self.steps else np.ones(weights.shape, bool)
        spread: Array = np.broadcast_to(kept, weights.shape)[0]
        return spread

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains all differences."""
        return all(distance.is_rounding for distance in self.distances.values())

    def to_dict(self, tokens: Sequence[str], /, *, heads: Sequence[int] | None = None) -> dict[str, Any]:
        """The layer as plain data.

        Args:
            tokens: the words.
            heads: which heads; None for all.

        Returns:
            The layer, how far it is from the model's, and for each head what it looks at and all its weights.
        """
        return {
            "layer": self.layer.index,
            "fan_out": f"the model's own: it {self.layer.why}" if self.layer.why else "the specification's",
            "distances": {step: vars(distance) for step, distance in self.distances.items()},
            "heads": [
                {
                    "head": head,
                    "most_look_at": vars(habit(self.weights[head], self.keep[head], tokens)),
                    "weights": [[round(float(weight), 6) for weight in row] for row in self.weights[head]],
                }
                for head in (range(len(self.weights)) if heads is None else heads)
            ],
        }


def replay(layer: Layer, /) -> Replay:
    """Compute a layer of a model by the specification.

    Args:
        layer: what the layer was given, its parameters, and what it made of it.

    Returns:
        Every step, and how far its result is from the model's own. A layer without parameters starts from the
        model's own queries, keys and values.

    Raises:
        AttnspecError: the layer's arrays do not fit together, or there are neither parameters nor queries.
    """
    options: dict[str, Any] = {"keep": layer.keep, "causal": layer.causal, "scale": layer.scale}
    with trace() as steps:
        if layer.x is not None and layer.parameters is not None:
            multi_head_attention(layer.x, layer.parameters, policy=Policy(rotation=layer.rotation), **options)
        elif layer.projected is not None:
            queries, keys, values = layer.projected.queries, layer.projected.keys, layer.projected.values
            if (h := queries.shape[1]) != keys.shape[1]:
                keys, values = share_keys(keys, h=h), share_values(values, h=h)
            attend(queries, keys, values, **options)
        else:
            raise ConfigError(f"replay: layer {layer.index} has neither parameters nor queries, keys and values to start from.")
    return Replay(layer, steps, _distances(layer, steps))


def _distances(layer: Layer, steps: Trace) -> dict[str, Distance]:
    own = {"blend": layer.blended}
    if layer.projected is not None:
        own |= {"project_queries": layer.projected.queries, "project_keys": layer.projected.keys, "project_values": layer.projected.values}
    if layer.y is not None:
        own["mix"] = layer.y
    allowed = Context().run(allowances, steps, scale=layer.scale)  # out of reach of what stands in for a step
    found = {name: steps[name].result for name in steps} | projections_of(steps)
    return {name: _distance(found[name], own[name], allowed[name]) for name in steps if name in own}


def _distance(ours: Array, own: Array, allowed: Array) -> Distance:
    difference = np.abs(ours - own)
    share = difference / np.maximum(allowed, np.finfo(allowed.dtype).tiny)
    return Distance(float(difference.max()), float(share.max()))
