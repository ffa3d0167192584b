"""A wrong transposition, planted in a step that an option asks for, is caught: by the check of shapes or by the exact answer."""

import functools

import numpy as np
import pytest
from condition import UNIT, compare
from enclosure import enclose
from options import NEUTRAL, SIZES, Drawn, draw
from test_planted import STEPS

import attnspec
from attnspec import ShapeError, substitute

RIGHT = {name: getattr(attnspec, name).__wrapped__ for name in attnspec.step._steps}
EQUAL = dict.fromkeys(SIZES, 3) | {"d_k": 4}
SQUARE = NEUTRAL | {"heads": "equal"}


def swapped(array, first, second):
    return array.swapaxes(first, second)


def misread(array, first, second):
    """The numbers of the transposed array, read as if it were not."""
    return array.swapaxes(first, second).reshape(array.shape)


def first(name, change):
    return lambda array, *rest, **options: RIGHT[name](change(array), *rest, **options)


def second(name, change):
    return lambda array, other, *rest, **options: RIGHT[name](array, change(other), *rest, **options)


def then(name, change):
    return lambda *arrays, **options: change(RIGHT[name](*arrays, **options))


def packed(drawn):
    keep, positions = attnspec.packed(np.array([0, 1, 3]), seq_q=3)
    return Drawn(drawn.x, drawn.parameters, drawn.options | {"keep": keep, "positions": positions})


def biased(kind):
    """The bias is drawn under the fault, but the exact answer has the right one."""
    return lambda: draw(SQUARE | {"bias": kind}, seed=1, sizes=EQUAL)


# step: (the choice that asks for it, wrong versions of it)
FAULTS = {
    "normalise": (
        {"normalise": "rms", "gains": "each"},
        [
            then("normalise", lambda x: misread(x, 1, 2)),
            second("normalise", lambda gain: gain[::-1]),
            lambda x, gain, **o: RIGHT["normalise"](x.transpose(0, 1, 3, 2).reshape(x.shape), gain, **o),
        ],
    ),
    "rotate": (
        {"rotation": "half"},
        [
            lambda x, at, **o: swapped(RIGHT["rotate"](swapped(x, 1, 2), at, **o), 1, 2),
            second("rotate", lambda at: at[:, ::-1]),
            lambda x, at, **_: RIGHT["rotate"](x, at, pairing="interleaved"),
        ],
    ),
    "cap": ({"cap": "before"}, [first("cap", lambda s: swapped(s, 2, 3)), then("cap", lambda s: misread(s, 1, 2))]),
    "bias": (
        {"bias": "full"},
        [
            second("bias", lambda b: swapped(b, 2, 3)),
            second("bias", lambda b: swapped(b, 1, 2)),
            second("bias", lambda b: misread(b, 0, 1)),
        ],
    ),
    "keep_window": ({"window": (1, 3)}, [then("keep_window", lambda m: swapped(m, 2, 3)), then("keep_window", lambda m: m[:, :, ::-1])]),
    "keep_lengths": ({"keep": "lengths"}, [second("keep_lengths", lambda n: n[::-1]), then("keep_lengths", lambda m: swapped(m, 2, 3))]),
    "keep_documents": ({"keep": "documents"}, [lambda q, k: RIGHT["keep_documents"](k, q), then("keep_documents", lambda m: m[::-1])]),
    "keep_extra": (
        {"keep": "array", "extra": True},
        [
            lambda keep, *, extra: np.concatenate((np.ones_like(keep[..., :1]).repeat(extra, 3), keep), 3),
            then("keep_extra", lambda m: swapped(m, 1, 2)),
        ],
    ),
    "extend_keys": (
        {"extra": True},
        [
            second("extend_keys", lambda e: e[::-1]),
            lambda keys, extra: np.concatenate((np.broadcast_to(extra, (3, *extra.shape)), keys), 2),
            lambda keys, extra: np.concatenate((keys, extra[:, None].repeat(3, 1)), 2),
        ],
    ),
    "extend_values": (
        {"extra": True},
        [
            second("extend_values", lambda e: e[::-1]),
            lambda values, extra: np.concatenate((np.broadcast_to(extra, (3, *extra.shape)), values), 2),
            lambda values, extra: np.concatenate((values, extra[:, None].repeat(3, 1)), 2),
        ],
    ),
    "extend_bias": (
        {"bias": "full", "extra": True},
        [
            lambda b, keys, *, extra: np.concatenate((0 * b[..., :1].repeat(extra, 3), b), 3),
            first("extend_bias", lambda b: swapped(b, 2, 3)),
        ],
    ),
    "draw_survivors": (
        {"dropout": True},
        [then("draw_survivors", lambda d: swapped(d, 2, 3)), then("draw_survivors", lambda d: misread(d, 0, 1))],
    ),
    "drop": ({"dropout": True}, [second("drop", lambda d: swapped(d, 1, 2)), second("drop", lambda d: misread(d, 2, 3))]),
    "gate": (
        {"gates": True},
        [second("gate", lambda g: g[::-1]), lambda z, g: z * g[:, None], lambda z, g: z * g, lambda z, g: z * g[:, None, None, None]],
    ),
    "linear_bias": (
        biased("linear"),
        [
            first("linear_bias", lambda m: m[::-1]),
            lambda m, q, k: swapped(RIGHT["linear_bias"](m, q + q[:, :1] + 1, k), 2, 3),
            lambda m, q, k: RIGHT["linear_bias"](m, q * 0, k),
        ],
    ),
    "relative_bias": (
        biased("relative"),
        [then("relative_bias", lambda b: swapped(b, 2, 3)), first("relative_bias", lambda t: t[:, ::-1])],
    ),
    "number_documents": (packed, [then("number_documents", lambda s: s[:, ::-1])]),
    "count_in_documents": (packed, [then("count_in_documents", lambda p: p[:, ::-1])]),
}


def is_exact(drawn, wanted):
    return compare(wanted, drawn.run()).within(4 * UNIT)


@functools.cache
def right(step):
    asked, _ = FAULTS[step]
    if step in ("number_documents", "count_in_documents"):
        drawn = packed(draw(SQUARE | {"causal": True, "rotation": "half"}, seed=1, sizes=EQUAL))
    else:
        sizes = EQUAL | {"batch": 2} if step == "keep_lengths" else EQUAL
        drawn = asked() if callable(asked) else draw(SQUARE | asked, seed=1, sizes=sizes)
    return drawn, enclose(drawn.x, drawn.parameters, drawn.options)


@pytest.mark.parametrize(("step", "index"), [(step, index) for step, (_, wrong) in FAULTS.items() for index in range(len(wrong))])
def test_a_wrong_transposition_in_an_optional_step_is_caught(step, index):
    drawn, wanted = right(step)
    asked, wrong = FAULTS[step]
    assert is_exact(drawn, wanted)
    with substitute(**{step: wrong[index]}):
        try:
            if step in ("number_documents", "count_in_documents"):
                drawn = packed(drawn)
            elif callable(asked):
                drawn = asked()
            assert not is_exact(drawn, wanted)
        except ShapeError as refusal:
            assert f"{step}: its result" in str(refusal)  # noqa: PT017


def test_every_optional_step_has_a_planted_transposition():
    """`append_to_cache` has its own in test_kinds, since it runs in `decode` alone."""
    assert {*FAULTS, *STEPS, "append_to_cache"} == set(attnspec.step._steps)
