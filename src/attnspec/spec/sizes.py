"""What sizes must be, as data: Python settles them by it, and so does the calculator of the documentation."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..axes import evaluate
from ..errors import ConfigError

SENTENCES = {
    "positive": "{owner}: {name}={size} must be a positive whole number.",
    "divides": "{owner}: {name}={size} does not divide {whole}={of}; {near} would{otherwise}.",
}


@dataclass(frozen=True)
class Size:
    """A size must be a positive whole number.

    Attributes:
        name: which size.
        default: what it is where it is None, in the sizes before it; empty if it must be given.
    """

    name: str
    default: str = ""


@dataclass(frozen=True)
class Divides:
    """A size must divide another.

    Attributes:
        name: which size.
        whole: which other.
        choices: whose divisors an error names.
        unless: the size with which, if it is given, nothing need divide; empty if there is none.
        otherwise: what else would help, as the end of the error.
    """

    name: str
    whole: str
    choices: str
    unless: str = ""
    otherwise: str = ""


OF_HEADS = (
    Size("d_model"),
    Size("h"),
    Size("h_kv", "h"),
    Divides("h_kv", "h", "h"),
    Divides("h", "d_model", "d_model", unless="d_k", otherwise=", or give d_k"),
    Size("d_k", "d_model//h"),
    Size("d_v", "d_k"),
    Size("d_key_in", "d_model"),
    Size("d_value_in", "d_key_in"),
)
OF_RANKS = (Size("ranks"), Divides("ranks", "h", "h_kv"), Divides("ranks", "h_kv", "h_kv"))
OF_INPUTS = (Size("batch"), Size("seq_q"), Size("seq_k", "seq_q"))

MERGED = {"h": "1", "h_kv": "1", "d_k": "h*d_k", "d_v": "h*d_v"}
"""One head as wide as all of them together, in their sizes."""

SHARE = {"h": "h//ranks", "h_kv": "h_kv//ranks"}
"""The heads of one rank, in the sizes of all."""


def settle(owner: str, rules: Sequence[Size | Divides], given: Mapping[str, Any], /, **called: str) -> dict[str, Any]:
    """Check sizes, and fill in those that were not given.

    Args:
        owner: what an error begins with.
        rules: what must hold, in order.
        given: the sizes, None where one was not given.
        called: what an error calls a size that does not go by its own name.

    Returns:
        All sizes.

    Raises:
        ConfigError: the first rule that does not hold.
    """
    sizes = dict(given)
    for rule in rules:
        name, size = called.get(rule.name, rule.name), sizes[rule.name]
        if isinstance(rule, Size):
            size = evaluate(rule.default, sizes) if size is None and rule.default else size
            if isinstance(size, bool) or not hasattr(size, "__index__") or operator.index(size) < 1:
                raise ConfigError(SENTENCES["positive"].format(owner=owner, name=name, size=repr(size)))
            sizes[rule.name] = operator.index(size)
        elif (not rule.unless or given[rule.unless] is None) and sizes[rule.whole] % size:
            near = _near_divisors(sizes[rule.choices], size, name)
            said = {"name": name, "size": size, "whole": rule.whole, "of": sizes[rule.whole], "near": near, "otherwise": rule.otherwise}
            raise ConfigError(SENTENCES["divides"].format(owner=owner, **said))
    return sizes


def _near_divisors(whole: int, wanted: int, name: str) -> str:
    """Name the divisors of `whole` next to `wanted`, below and above."""
    small = [size for size in range(1, math.isqrt(whole) + 1) if whole % size == 0]
    divisors = small + [whole // size for size in reversed(small)]
    below = [size for size in divisors if size < wanted][-1:]
    return " and ".join(f"{name}={size}" for size in below + [size for size in divisors if size > wanted][:1])
