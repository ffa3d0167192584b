"""The conventions on which implementations differ, each declared."""

import math
from dataclasses import dataclass
from typing import Literal

from ..arrays import Precision
from ..errors import ConfigError
from ..step import check_fields

EmptyRow = Literal["zero", "nan", "uniform", "unmasked", "any"]
Grouping = Literal["contiguous", "strided"]
Pairing = Literal["half", "interleaved"]
Norm = Literal["rms", "layer", "l2"]


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Rotary positions (Su et al., 2021): queries and keys turn with their position, pair of channels by pair.

    Attributes:
        pairing: which channels form a pair: `half`, i with i + width/2 (GPT-NeoX, Llama); `interleaved`, 2i with
            2i + 1 (GPT-J, the paper).
        width: how many channels turn; None for all of them.
        base: the slowest pair turns by about 1/base radians from one position to the next.
    """

    pairing: Pairing = "half"
    width: int | None = None
    base: float = 10_000.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.width is not None and (self.width < 2 or self.width % 2):  # noqa: PLR2004  # channels turn in pairs
            raise ConfigError(f"Rotation: width={self.width} must be an even number of channels, at least 2, since they turn in pairs.")
        if not 0 < self.base < math.inf:
            raise ConfigError(f"Rotation: base={self.base} must be positive and finite.")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What an implementation means by attention; the default is ONNX Attention-25, with the softmax at least in float32.

    Attributes:
        scale: what the scores are multiplied by; None for `1 / sqrt(d_k)`.
        cap: scores are bent into (-cap, cap) by `cap * tanh(score / cap)`; None for no cap.
        cap_order: whether the cap comes `before` bias and mask, or `after` them, where it revives dropped keys.
        causal_anchor: where causality starts if no offset is given: `top_left` puts the first query beside the first
            key, `bottom_right` the last beside the last.
        window: how many keys a query sees to the left and to the right of its own position; None for no bound.
        empty_row: what a query gets that keeps no key: `zero` weights, `nan`, `uniform` weights over all keys, or the
            weights it would have `unmasked`; `any` promises nothing, and computes as `zero`. A sink takes its share all
            the same, and all where the others get none.
        grouping: which key/value head query head i reads: `contiguous`, i // group, or `strided`, i % h_kv.
        rotation: how queries and keys turn with their position; None for not at all.
        normalise: how each head's queries and keys are normalised before that; None for not at all.
        epsilon: what the mean square is raised by before the root, in `rms` and `layer` normalisation.
        softmax_precision: the dtype of the softmax; None for that of the scores, but at least float32; `input` for
            that of the scores, whatever it is.
        product_precision: the dtype in which matrix products are taken; None for the library's own way.
    """

    scale: float | None = None
    cap: float | None = None
    cap_order: Literal["before", "after"] = "before"
    causal_anchor: Literal["top_left", "bottom_right"] = "top_left"
    window: tuple[int | None, int | None] = (None, None)
    empty_row: EmptyRow = "zero"
    grouping: Grouping = "contiguous"
    rotation: Rotation | None = None
    normalise: Norm | None = None
    epsilon: float = 1e-6
    softmax_precision: Precision | Literal["input"] | None = None
    product_precision: Precision | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.scale is not None and not math.isfinite(self.scale):
            raise ConfigError(f"Policy: scale={self.scale} must be finite.")
        if not 0 <= self.epsilon < math.inf:
            raise ConfigError(f"Policy: epsilon={self.epsilon} must be finite and at least 0.")
        if self.cap is not None and not 0 < self.cap < math.inf:
            raise ConfigError(f"Policy: cap={self.cap} must be positive and finite; None is for no cap.")
        if any(side is not None and side < 0 for side in self.window):
            raise ConfigError(f"Policy: window={self.window} must count keys; None is for no bound.")
