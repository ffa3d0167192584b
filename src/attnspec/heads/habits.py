"""What a head looks at, said in words, where that can be counted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

_STEPS = {-1: "previous word", 1: "next word", 0: "itself"}


@dataclass(frozen=True)
class Habit:
    """What most words look at most in one head.

    Attributes:
        name: what it is; empty if no pattern holds for more than half of the words.
        hits: for how many words it holds.
        words: how many words have a choice of what to look at.
        weight: how much those for which it holds give to it, on average.
    """

    name: str
    hits: int
    words: int
    weight: float

    def __str__(self) -> str:
        return f"{self.name} ({self.hits} of {self.words} words, weight {self.weight:.2f})" if self.name else "no one pattern"


def habit(weights: Float[np.ndarray, "seq_q seq_k"], keep: Bool[np.ndarray, "seq_q seq_k"], tokens: Sequence[str], /) -> Habit:
    """Describe a head by the pattern that holds for most words, if it holds for more than half of them.

    The patterns are: the previous word, the next word, the word itself, and any one word of the text.

    Args:
        weights: how each word shares its attention.
        keep: which words each word may look at; one with a single such word has no choice and does not count.
        tokens: the words.

    Returns:
        The pattern and how often it holds.
    """
    asking = [int(i) for i in np.flatnonzero(keep.sum(axis=-1) > 1)]
    looks = {i: int(weights[i].argmax()) for i in asking}
    patterns = {name: [i for i in asking if looks[i] - i == step] for step, name in _STEPS.items()}
    patterns |= {place_name(j, tokens): [i for i in asking if looks[i] == j] for j in range(len(tokens))}
    name, hits = max(patterns.items(), key=lambda pattern: len(pattern[1]))
    if 2 * len(hits) <= len(asking):
        return Habit("", 0, len(asking), 0.0)
    return Habit(name, len(hits), len(asking), float(np.mean([weights[i, looks[i]] for i in hits])))


def place_name(index: int, tokens: Sequence[str], /) -> str:
    """Quote a word of the text, with its place, counted from 0, if the text has it more than once."""
    quoted = f'"{tokens[index]}"'
    return quoted if tokens.count(tokens[index]) == 1 else f"{quoted} at {index}"
