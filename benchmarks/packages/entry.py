"""What an entry is: an implementation, and how the oracle is asked about it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Layout = dict[str, tuple[str, str | None]]


@dataclass(frozen=True)
class Entry:
    """One implementation.

    Attributes:
        name: the package or library, and what of it.
        build: makes the implementation.
        entry: which function of `attnspec.oracle` is asked: check, check_attention, check_properties or check_cache.
        settings: what is declared to it.
        wrong: the kinds of its faults, with spaces between; empty if it is wrong in a way that is none of the kinds; None
            if it is right.
    """

    name: str
    build: Callable[[], Any]
    entry: str = "check_attention"
    settings: dict[str, Any] = field(default_factory=dict)
    wrong: str | None = None


def linear(names: str, *, bias: bool = True, weight: str = ".weight") -> Layout:
    """Lay out four linear layers of PyTorch, which keep their matrix transposed."""
    q, k, v, o = names.split()
    lines = {
        "w_q": (q + weight, "(h d_k) d_model"),
        "w_k": (k + weight, "(h_kv d_k) d_key_in"),
        "w_v": (v + weight, "(h_kv d_v) d_value_in"),
        "w_o": (o + weight, "d_model (h d_v)"),
    }
    return lines | (_biases(names, ".bias", "") if bias else {})


def dense(names: str, *, weight: str = ".kernel", bias: str = ".bias", row: str = "") -> Layout:
    """Lay out four matrices that stand to the right of the input; `row` is what stands before the width of a bias."""
    q, k, v, o = names.split()
    lines = {
        "w_q": (q + weight, "d_model (h d_k)"),
        "w_k": (k + weight, "d_key_in (h_kv d_k)"),
        "w_v": (v + weight, "d_value_in (h_kv d_v)"),
        "w_o": (o + weight, "(h d_v) d_model"),
    }
    return lines | (_biases(names, bias, row) if bias else {})


def fused(qkv: str, o: str, *, bias: bool = True, more: str = "") -> Layout:
    """Lay out a linear layer of PyTorch for queries, keys and values, and one for the output; `more` is further axes."""
    lines = {"w_qkv": (f"{qkv}.weight", f"(three h d_k) d_model{more}"), "w_o": (f"{o}.weight", f"d_model (h d_v){more}")}
    return lines | ({"b_qkv": (f"{qkv}.bias", "(three h d_k)"), "b_o": (f"{o}.bias", "d_model")} if bias else {})


def left_alone(*names: str) -> Layout:
    """Say which tensors are no parameters."""
    return {f"other {name}": (name, None) for name in names}


def _biases(names: str, bias: str, row: str) -> Layout:
    q, k, v, o = (name + bias for name in names.split())
    return {
        "b_q": (q, f"{row}(h d_k)"),
        "b_k": (k, f"{row}(h_kv d_k)"),
        "b_v": (v, f"{row}(h_kv d_v)"),
        "b_o": (o, f"{row}d_model"),
    }


def over_heads(mask: Any, /) -> Any:
    """Give a mask an axis for the heads, all of which share it."""
    return None if mask is None else mask[:, None]
