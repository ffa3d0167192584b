"""The names of the axes that the annotations use, each with its one meaning, and how a picture draws it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Word:
    """What the name of an axis means.

    Attributes:
        symbol: how formulas call its size, in LaTeX.
        meaning: what one counts along it.
        colour: its colour in every picture and table, on light and on dark ground.
        length: how long a picture draws it, in pixels.
    """

    symbol: str
    meaning: str
    colour: tuple[str, str]
    length: int


_GREY = ("#57606a", "#a9b1bb")
_BLUE = ("#0550ae", "#79b8ff")
_TEAL = ("#0a6b62", "#56d4c4")
_ORANGE = ("#9a4a00", "#ffa657")
_BROWN = ("#7a5200", "#e3b341")
_PURPLE = ("#6639ba", "#d2a8ff")
_PINK = ("#a81764", "#ff8fc7")
_RED = ("#b3261e", "#ff9b92")
_GREEN = ("#1a6b2f", "#6fdd8b")

GLOSSARY = {
    "batch": Word("B", "independent sequences", _GREY, 40),
    "seq_q": Word("T", "query positions: those that ask", _BLUE, 60),
    "seq_k": Word("S", "key and value positions: those that can be looked at; in self-attention the query positions", _TEAL, 78),
    "seq": Word("n", "positions, of queries or of keys, where a step treats both alike", _BLUE, 60),
    "d_model": Word("d", "width of the residual stream, in and out", _PURPLE, 112),
    "d_key_in": Word("d_{K,in}", "width of the source of keys, where it is not that of the residual stream", _PURPLE, 112),
    "d_value_in": Word("d_{V,in}", "width of the source of values, where it is not that of the residual stream", _PURPLE, 112),
    "h": Word("h", "query heads", _ORANGE, 48),
    "h_kv": Word("h_{kv}", "key/value heads; each serves as many query heads as every other", _BROWN, 48),
    "heads": Word("n_h", "heads, of queries or of keys, where a step treats both alike", _ORANGE, 48),
    "d_k": Word("d_k", "width of one head's queries and keys", _PINK, 36),
    "d_v": Word("d_v", "width of one head's values", _RED, 42),
    "width": Word("w", "width of a head's tokens, where a step treats keys and values alike", _PINK, 36),
    "past": Word("S_0", "tokens that are in the cache already", _GREEN, 66),
    "batch_new": Word("B'", "sequences of a cache after some were picked", _GREY, 40),
    "extra": Word("S_+", "learnt keys that every query may attend to besides the context", _GREEN, 20),
    "buckets": Word("n_b", "distances that share a learnt bias", _GREEN, 66),
    "boundaries": Word("n_c", "where documents begin and end in a packed sequence, its own start and end among them", _GREEN, 40),
}
"""Every name of an axis; a name that is missing here stops the build of the documentation."""
