"""Guesses at the usual slips: which small repair of one array would make the call fit?"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .arrays import Outline, dtype_name
from .signature import Conflict, Entry, Signature, Sizes


def guess(signature: Signature, entries: Sequence[Entry], settled: Sizes, conflict: Conflict, /) -> str:
    """Guess why the arrays of a call do not fit together.

    Args:
        signature: the promises that they break.
        entries: the arrays of the call.
        settled: the sizes that settings fix.
        conflict: the first contradiction.

    Returns:
        A sentence with a blank before it, or nothing.
    """
    found: list[str] = []
    for suspect in [conflict.entry, *(entry for entry in entries if entry is not conflict.entry)]:
        for shape, sentence in _repairs(suspect, _sizes_without(suspect, signature, entries, settled)):
            if _fits(signature, [replace(e, value=Outline(shape)) if e is suspect else e for e in entries], settled):
                found.append(sentence)
    for kinds in ({"h", "seq"}, {"batch", "seq"}):
        if not found and _fits(signature, [_exchange(entry, kinds) for entry in entries], settled):
            found.append(f"every array {_exchanged(kinds)}")
    return f" Perhaps {_either(found[:2])}." if found else _hint_by_axis(conflict)


def _either(guesses: list[str]) -> str:
    """Join guesses; what stands behind a semicolon in all of them is said once."""
    heads, tails = zip(*(guess.partition("; ")[::2] for guess in guesses), strict=True)
    return f"{' or '.join(heads)}; {tails[0]}" if tails[0] and len(set(tails)) == 1 else " or ".join(guesses)


def guess_kind(entry: Entry, /) -> str:
    """End the sentence on an array that holds another kind of number than promised; of a mask, with its meaning and a guess."""
    if entry.label != "keep":
        return "."
    guessed = "1 means keep: keep != 0" if "int" in dtype_name(entry.value) else "it is additive: keep == 0 keeps what it leaves as it is"
    return f" (True: the query may attend to the key). Perhaps {guessed}."


def _fits(signature: Signature, entries: Sequence[Entry], settled: Sizes) -> bool:
    try:
        signature.bind(entries, settled)
    except Conflict:
        return False
    return True


def _sizes_without(suspect: Entry, signature: Signature, entries: Sequence[Entry], settled: Sizes) -> dict[str, int]:
    try:
        sizes = signature.bind([entry for entry in entries if entry is not suspect], settled)
    except Conflict:
        sizes = settled
    return {name: size for name, (size, _) in sizes.items()}


def _repairs(entry: Entry, sizes: dict[str, int]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Propose other shapes for an array, each with what it would mean."""
    names, got = [axis.text for axis in entry.shape.axes], tuple(entry.value.shape)
    missing = len(names) - len(got)
    if missing == 0:
        for i, j in itertools.combinations(range(len(got)), 2):
            yield _swap(got, i, j), f"{entry.label} {_exchanged({_kind(names[i]), _kind(names[j])}, names[i], names[j])}"
    if missing == 1 and names[1:2] != names[-1:]:
        head, wide = sizes.get(names[1], 0), got[-1]
        if head and wide == head * sizes.get(names[-1], wide // head):
            sentence = f"the heads of {entry.label} are not split yet: its last axis, {wide}, is {names[1]}*{names[-1]}"
            yield (got[0], head, *got[1:-1], wide // head), sentence
    optional = [place for place, axis in enumerate(entry.shape.axes) if axis.broadcast or axis.text == "batch"]
    for places in itertools.combinations(optional, missing) if missing > 0 else ():
        rest = iter(got)
        shape = tuple(1 if place in places else next(rest) for place in range(len(names)))
        index = ", ".join("None" if place in places else ":" for place in range(len(names)))
        yield shape, f"you mean {entry.label}[{index}], the same for all of {' and '.join(names[place] for place in places)}"


def _swap(shape: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
    order = list(shape)
    order[i], order[j] = shape[j], shape[i]
    return tuple(order)


def _kind(name: str) -> str:
    return name.partition("_")[0]


def _exchange(entry: Entry, kinds: set[str]) -> Entry:
    """Exchange the axes of these kinds in an array that has both."""
    shape = tuple(entry.value.shape)
    places = [place for place, axis in enumerate(entry.shape.axes[: len(shape)]) if _kind(axis.text) in kinds]
    return replace(entry, value=Outline(_swap(shape, *places))) if len(places) == len(kinds) else entry


def _exchanged(kinds: set[str], first: str = "", second: str = "") -> str:
    if kinds == {"batch", "seq"}:
        return "is sequence-first; here the batch comes first"
    if kinds == {"h", "seq"}:
        return "has heads and sequence swapped; here the heads come first"
    return f"is transposed; here {first} comes before {second}"


def _hint_by_axis(conflict: Conflict) -> str:
    if conflict.axis == "seq_k" and conflict.entry.label in {"values", "context_v", "value"}:
        return " Keys and values come in pairs, from the same positions."
    if conflict.axis == "h" and conflict.entry.label in {"keys", "values"}:
        return " If the heads are grouped, share_keys and share_values give every query head its own."
    return ""
