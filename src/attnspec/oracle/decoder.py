"""Decoders: what is called again and again, and keeps keys and values between calls."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .problem import Answer, Crash, Problem
from .subject import Subject

CHUNKS = ((7,), (1, 1, 1, 1, 1, 1, 1), (3, 1, 1, 2), (2, 3, 2), (1, 4, 1, 1))
"""How many tokens come in each call."""

_OF_TOKENS = ("keep", "bias")


@dataclass(frozen=True, eq=False)
class Stream:
    """Problems that follow one another: each has the tokens of those before in its cache.

    Attributes:
        calls: the problems.
    """

    calls: tuple[Problem, ...]


def stream(whole: Problem, sizes: tuple[int, ...], /, *, reorder: int | None = None) -> Stream:
    """Cut a problem of self-attention into calls.

    Args:
        whole: all tokens at once.
        sizes: how many tokens come in each call.
        reorder: before which call the sequences are picked anew; None for never.

    Returns:
        The calls, each a problem of its own over all tokens so far.
    """
    calls, start, keys, values = [], 0, whole.keys, whole.values
    for index, size in enumerate(sizes):
        end, picked = start + size, None
        if index == reorder and len(keys) > 1:
            picked = np.roll(np.arange(len(keys)), 1)
            keys, values = (np.concatenate([a[picked][..., :start, :], a[..., start:, :]], -2) for a in (keys, values))
        options = {name: _cut(name, value, start, end) for name, value in whole.options.items()}
        calls.append(
            replace(
                whole,
                queries=whole.queries[..., start:end, :],
                keys=keys[..., :end, :],
                values=values[..., :end, :],
                options=options,
                history=sizes[:index],
                reordered=picked,
                causal=True,
            )
        )
        start = end
    return Stream(tuple(calls))


def _cut(name: str, value: Any, start: int, end: int) -> Any:
    if name in _OF_TOKENS:
        return value[:, :, start:end, :end] if value.shape[2] > 1 else value[..., :end]
    return value[:, :end] if name == "padding" else value


def new_tokens(problem: Problem, /) -> Problem:
    """What a decoder is given for a problem: the new tokens alone, but masks over all so far."""
    past = problem.past or 0
    return replace(problem, keys=problem.keys[..., past:, :], values=problem.values[..., past:, :])


class Decoder:
    """A subject that is made anew for every stream.

    Attributes:
        subject: how a call is made.
        make: makes a fresh decoder.
    """

    def __init__(self, subject: Subject, make: Callable[[], Any]) -> None:
        self.subject, self.make = subject, make

    def answers(self, calls: Stream, /, *, precision: str = "float64") -> Iterator[Answer | Crash]:
        """Put the problems of a stream one after the other; after a crash nothing more is asked."""
        step = self.make()
        for problem in calls.calls:
            if problem.reordered is not None:
                step.reorder(self.subject.library.give(problem.reordered, precision))
            target = replace_target(self.subject, step)
            answer = target.answer(new_tokens(problem), precision=precision)
            yield answer
            if isinstance(answer, Crash):
                return

    @property
    def can_reorder(self) -> bool:
        """Whether its sequences can be picked anew."""
        return callable(inspect.getattr_static(type(self.make()), "reorder", None))


class CachingLayer:
    """A layer that takes a cache and returns it, behind the output.

    Attributes:
        subject: how a call is made.
    """

    can_reorder = False

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def answers(self, calls: Stream, /, *, precision: str = "float64") -> Iterator[Answer | Crash]:
        """Put the problems of a stream one after the other; after a crash nothing more is asked."""
        kept: dict[str, Any] = {"cache": None}
        name = next(name for name, role in self.subject.signature.places if role == "cache")

        def call(target: Any, **arguments: Any) -> Any:
            result = self.subject.call(target, **{**arguments, name: kept["cache"]})
            if not isinstance(result, tuple) or len(result) < 2:  # the output and the cache
                raise TypeError("it was given a cache, but returns none behind the output")
            kept["cache"] = result[-1]
            return result[0]

        for problem in calls.calls:
            answer = replace(self.subject, call=call).answer(new_tokens(problem), precision=precision)
            yield answer
            if isinstance(answer, Crash):
                return


class _Same:
    """A decoder in a wrapping that cannot be copied, since calls must leave their traces in it."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __deepcopy__(self, _: Any) -> "_Same":
        return self


def replace_target(subject: Subject, step: Any, /) -> Subject:
    """The same way of asking, of a decoder that keeps what it was given."""
    return replace(subject, target=_Same(step), call=lambda target, **arguments: subject.call(target.step, **arguments))
