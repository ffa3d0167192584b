"""What a case of the corpus is: an implementation that is wrong in one known way, its right twin, and how the oracle is asked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One fault that was reported in public, written again.

    Attributes:
        fault: its number in the collection, O-001 to O-123.
        name: what it is called there.
        kind: which of the 48 kinds it is.
        thread: where it was reported.
        wrong: makes the implementation with the fault.
        right: makes the one without; they differ in the fault alone.
        entry: which function of `attnspec.oracle` is asked: check, check_attention, check_properties or check_cache.
        settings: what is declared to it.
    """

    fault: str
    name: str
    kind: str
    thread: str
    wrong: Callable[[], Any]
    right: Callable[[], Any]
    entry: str = "check_attention"
    settings: dict[str, Any] = field(default_factory=dict)
