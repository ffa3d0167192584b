"""The softmax that several implementations share: a row without keys gets zeros."""

from typing import Any

import numpy as np
import torch


def softmax(scores: Any, axis: int = -1) -> Any:
    """Normalise NumPy scores, where -inf is a key that is not seen."""
    peak = scores.max(axis, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(peak), peak, 0))
    total = weights.sum(axis, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def masked_softmax(scores: Any, keep: Any) -> Any:
    """Normalise PyTorch scores over the keys that are kept; None keeps all."""
    if keep is None:
        return scores.softmax(-1)
    return scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~keep, 0)
