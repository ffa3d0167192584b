"""What a model's attention layers were given on a text, and what they made of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float

from ..spec.parameters import Parameters
from ..spec.policy import Rotation


@dataclass(frozen=True)
class Projected:
    """The queries, keys and values that a model's attention worked on."""

    queries: Float[np.ndarray, "batch h seq_q d_k"]
    keys: Float[np.ndarray, "batch h_kv seq_k d_k"]
    values: Float[np.ndarray, "batch h_kv seq_k d_v"]


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model on a text.

    Attributes:
        index: which layer, counted from 0.
        x: what the layer was given; None if there are no parameters to start with.
        parameters: its parameters; None where its fan out is more than a projection, as `why` says.
        projected: its own queries, keys and values; None if they were not kept.
        blended: what its heads found.
        y: its output; None if it was not seen.
        keep: True where the query may attend to the key; None keeps all.
        causal: whether each query sees only the keys up to its own position.
        scale: the factor for the scores; None for `1 / sqrt(d_k)`.
        rotation: how the model turns its queries and keys with their position; None if it does not.
        why: what the model does to its queries and keys that the specification does not; empty if nothing.
    """

    index: int
    x: Float[np.ndarray, "batch seq_q d_model"] | None
    parameters: Parameters[npt.NDArray[Any]] | None
    projected: Projected | None
    blended: Float[np.ndarray, "batch h seq_q d_v"]
    y: Float[np.ndarray, "batch seq_q d_model"] | None = None
    keep: Bool[np.ndarray, "#batch #h #seq_q seq_k"] | None = None
    causal: bool = False
    scale: float | None = None
    rotation: Rotation | None = None
    why: str = ""


@dataclass(frozen=True)
class Run:
    """A model on a text.

    Attributes:
        model: what the model is called.
        text: what it was given.
        tokens: the words and pieces of words that the text became.
        layers: its attention layers, or some of them.
        note: what else a reader of its numbers should know.
        examples: heads worth a look, as layer and head.
    """

    model: str
    text: str
    tokens: tuple[str, ...]
    layers: tuple[Layer, ...]
    note: str = ""
    examples: tuple[tuple[int, int], ...] = ()
