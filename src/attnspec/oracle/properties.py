"""Properties: what must hold for any weights, each with its law."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from . import laws_apart, laws_calls, laws_seen
from .bench import Bench, Failure, UndecidedError
from .design import Profile
from .subject import Subject


@dataclass(frozen=True)
class Outcome:
    """What came of trying one property.

    Attributes:
        name: the property.
        passed: whether it holds; None where that could not be decided.
        kind: the kind of fault, by its name in the catalogue; empty where it holds.
        sentence: what is wrong; or the law, where it holds.
        detail: on what problem.
        level: `wrong` makes the verdict; a `warning` and a `note` do not.
    """

    name: str
    passed: bool | None
    kind: str
    sentence: str
    detail: str
    level: Literal["wrong", "warning", "note"]


@dataclass(frozen=True)
class Property:
    """A property.

    Attributes:
        law: what must hold.
        test: tries it and reports where it does not hold.
        core_only: whether it can be seen only where attention alone is asked for.
    """

    law: str
    test: Callable[[Bench], Iterator[Failure]]
    core_only: bool = False


PROPERTIES: dict[str, Property] = {
    "shape": Property("there is an output for every query, of the declared width", laws_calls.right_shape),
    "dtype": Property("the output has the dtype of the inputs", laws_calls.right_dtype),
    "same_twice": Property("the same inputs give the same output, whatever was asked before", laws_calls.same_twice),
    "inputs_stay": Property("inputs and masks are not modified", laws_calls.inputs_stay),
    "strides": Property("only the numbers count, not how they lie in memory", laws_calls.strides_do_not_matter),
    "token_mixing": Property("without a mask every key has influence on every query", laws_seen.mix_tokens),
    "masks": Property("a key has influence on a query exactly where masks, causality and window allow it", laws_seen.follow_masks),
    "dropped_size": Property("a dropped key has no influence, however large its numbers are", laws_seen.ignore_dropped_sizes),
    "dropped_nan": Property("NaN in a dropped key or value does not reach the output", laws_seen.ignore_dropped_nan),
    "visible_nan": Property("NaN in what is seen reaches the output", laws_seen.pass_on_nan),
    "samples": Property("samples are independent of each other", laws_apart.separate_samples),
    "batch_padding": Property("one more sample changes nothing for the others", laws_apart.ignore_more_samples),
    "heads": Property("heads are independent of each other", laws_apart.separate_heads, core_only=True),
    "queries": Property("queries are independent of each other", laws_apart.separate_queries),
    "chunks": Property("queries in two calls get the same as in one", laws_apart.separate_chunks),
    "order_of_keys": Property("the order of keys is irrelevant where no position counts", laws_apart.any_order_of_keys),
    "linear_in_values": Property("the output is linear in the values", laws_apart.linear_in_values),
    "constant_values": Property("where all values are the same, so is the output: weights add up to one", laws_apart.constant_values),
    "training": Property("training and evaluation differ by dropout only", laws_calls.drops_in_training),
    "bad_shapes": Property("inputs that do not fit together are refused", laws_calls.refuses_bad_shapes),
}
"""The properties by name."""


def check_properties(
    subject: Subject, profile: Profile, *, seed: int, names: Collection[str] | None = None, rounding: float = 1e-9
) -> list[Outcome]:
    """Check what must hold for any weights.

    Args:
        subject: the implementation.
        profile: what it can be asked for.
        seed: what problems are drawn from.
        names: the properties to check; None for all.
        rounding: how far two answers that should be equal may differ, as a share of the largest number in them.

    Returns:
        What came of it: for each property that was tried one outcome, or one for each kind of fault.
    """
    found = []
    for name, prop in PROPERTIES.items():
        if (names is None or name in names) and not (prop.core_only and profile.template is not None):
            found += _try(name, prop, Bench(subject, profile, seed, rounding))
    return found


def _try(name: str, prop: Property, bench: Bench) -> list[Outcome]:
    failures: dict[tuple[str, str], Failure] = {}
    undecided = ""
    try:
        for failure in prop.test(bench):
            failures.setdefault((failure.kind, failure.sentence if failure.level == "warning" else ""), failure)
    except UndecidedError as error:
        undecided = str(error)
    if failures:
        return [Outcome(name, False, f.kind, f"{f.sentence}.", f.detail, f.level) for f in failures.values()]
    if undecided:
        return [Outcome(name, None, "", f"It could not be seen whether {prop.law}.", undecided, "note")]
    if not bench.asked:
        return []
    return [Outcome(name, True, "", f"{prop.law[0].upper()}{prop.law[1:]}.", f"{bench.asked} calls", "note")]
