"""The seam of every step: checked, recorded, replaced, remembered."""

import inspect
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float, jaxtyped
from options import PAIRWISE, draw
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import attnspec
from attnspec import ShapeError
from attnspec.arrays import Outline
from attnspec.bookkeeping import evaluate
from attnspec.signature import Conflict, Signature
from attnspec.step import _steps

HEADS = attnspec.Heads(d_model=17, h=6, h_kv=3, d_k=7, d_v=13, d_key_in=19, d_value_in=23)
CHAIN = (
    "project_queries project_keys project_values count_positions keep_causal keep_both share_keys share_values "
    "score scale mask softmax blend concatenate mix"
).split()


def run_every_step():
    """Trace at least one call of each step there is."""
    with attnspec.trace() as steps:
        for choice in PAIRWISE:
            drawn = draw(choice)
            drawn.run()
        _, cache = attnspec.decode(drawn.x[:, :2], drawn.parameters, None, policy=drawn.options["policy"])
        attnspec.decode(drawn.x[:, 2:], drawn.parameters, cache, policy=drawn.options["policy"])
        attnspec.packed(np.array([0, 2, 5]), seq_q=5)
    return steps


EVERY_STEP = run_every_step()


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    parameters = attnspec.Parameters.random(HEADS, seed=1)
    context, context_v = rng.normal(size=(2, 11, 19)), rng.normal(size=(2, 11, 23))
    options = {"context": context, "context_v": context_v, "keep": rng.random((2, 1, 5, 11)) < 0.7, "causal": True, "offset": 6}
    return rng.normal(size=(2, 5, 17)), parameters, options


def test_a_trace_holds_every_step_in_order_with_axes_and_results(problem):
    x, parameters, options = problem
    with attnspec.trace() as steps:
        y = attnspec.multi_head_attention(x, parameters, **options)
    assert list(steps) == CHAIN
    assert steps["mix"].result is y
    assert steps["softmax"].result.shape == (2, 6, 5, 11)
    assert steps["softmax"].axes == {"scores": ("batch", "h", "seq_q", "seq_k"), "return": ("batch", "h", "seq_q", "seq_k")}
    assert steps["scale"].arguments["d_k"] == 7
    for call in steps.calls:
        for axis, size in zip(call.shapes["return"].axes, call.result.shape, strict=True):
            assert (axis.broadcast and size == 1) or size == evaluate(axis.text, call.sizes)


def test_every_step_of_the_package_runs_for_some_option():
    assert set(EVERY_STEP) == set(_steps)


def test_a_step_that_did_not_run_is_named(problem):
    with attnspec.trace() as steps, pytest.raises(KeyError, match="no step 'mask' ran; those that did: none"):
        steps["mask"]
    x, parameters, options = problem
    del options["keep"], options["causal"], options["offset"]
    with attnspec.trace() as steps:
        attnspec.multi_head_attention(x, parameters, **options)
    with pytest.raises(KeyError, match="no step 'mask' ran; those that did: project_queries, "):
        steps["mask"]
    assert "mask" not in steps


def test_a_trace_keeps_all_calls_and_gives_the_latest_by_name(problem):
    x, parameters, options = problem
    with attnspec.trace() as steps:
        attnspec.multi_head_attention(x, parameters, **options)
        last = attnspec.multi_head_attention(2 * x, parameters, **options)
    assert sum(call.step.name == "mix" for call in steps.calls) == 2
    assert steps["mix"].result is last


def test_nothing_is_recorded_outside(problem):
    x, parameters, options = problem
    with attnspec.trace() as steps:
        pass
    attnspec.multi_head_attention(x, parameters, **options)
    assert len(steps) == 0


def test_a_substitute_replaces_one_step_and_may_call_it(problem):
    x, parameters, options = problem
    plain = attnspec.multi_head_attention(x, parameters, scale=1 / math.sqrt(7) / 2, **options)
    calls = []

    def half(scores, /, **sizes):
        calls.append(sizes)
        return attnspec.scale(scores, **sizes) / 2

    with attnspec.substitute(scale=half), attnspec.trace() as steps:
        halved = attnspec.multi_head_attention(x, parameters, **options)
    assert calls == [{"d_k": 7}]
    np.testing.assert_array_equal(halved, plain)
    assert [call.step.name for call in steps.calls].count("scale") == 1
    np.testing.assert_array_equal(attnspec.multi_head_attention(x, parameters, scale=1 / math.sqrt(7) / 2, **options), plain)


def test_substitutes_nest_and_the_inner_one_wins():
    scores = np.zeros((1, 1, 1, 1))
    with attnspec.substitute(scale=lambda s, **_: s + 1, softmax=lambda s, **_: s + 10):
        with attnspec.substitute(scale=lambda s, **_: s + 2):
            assert attnspec.scale(scores, d_k=1) == 2
            assert attnspec.softmax(scores) == 10
        assert attnspec.scale(scores, d_k=1) == 1
    assert attnspec.scale(scores, d_k=1) == 0


def test_other_threads_are_not_recorded(problem):
    x, parameters, options = problem
    with attnspec.trace() as steps:
        thread = threading.Thread(target=attnspec.multi_head_attention, args=(x, parameters), kwargs=options)
        thread.start()
        thread.join()
    assert len(steps) == 0


def test_a_known_signature_skips_the_judge_and_another_does_not(monkeypatch):
    judged = []
    original = attnspec.step.judge
    monkeypatch.setattr(attnspec.step, "judge", lambda *args, **kwargs: judged.append(args[0].name) or original(*args, **kwargs))
    queries, keys = np.ones((1, 2, 3, 29)), np.ones((1, 2, 5, 29))
    for _ in range(3):
        attnspec.score(queries, keys)
    assert judged == ["score"]
    attnspec.score(queries.astype("float32"), keys.astype("float32"))
    attnspec.score(queries, np.ones((1, 2, 7, 29)))
    attnspec.score(torch.ones(1, 2, 3, 29), torch.ones(1, 2, 5, 29))
    assert len(judged) == 4
    for _ in range(2):
        with pytest.raises(ShapeError):
            attnspec.score(queries, keys[:, :1])


def test_sizes_that_are_symbols_are_judged_each_time():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    queries, keys = (mode.from_tensor(torch.ones(2, 3, n, 7), static_shapes=False) for n in (5, 11))
    with mode:
        assert attnspec.score(queries, keys).dim() == 4


def test_an_annotation_is_read_once():
    """jaxtyping and beartype keep what they make of each annotation, so a new one for each call would pile up."""
    signature = attnspec.step.step_of(attnspec.mix).signature
    arrays = {"concatenated": np.ones((1, 2, 3)), "w_o": np.ones((3, 5))}
    for first, second in zip(signature.entries(arrays), signature.entries(arrays), strict=True):
        assert first.hint is second.hint
        assert first.shape is second.shape


def test_the_memory_of_signatures_is_bounded():
    known = inspect.getclosurevars(attnspec.concatenate).nonlocals["known"]
    for seq in range(1, 4200):
        attnspec.concatenate(np.empty((1, 1, seq, 1), "float32"))
    assert len(known) <= 4096
    attnspec.concatenate(np.empty((1, 1, 4199, 1), "float32"))


def test_many_threads_may_learn_signatures_at_once():
    errors = []

    def work(start):
        try:
            for seq in range(start, start + 3000, 7):
                attnspec.concatenate(np.empty((1, 2, seq, 3), "float32"))
                with pytest.raises(ShapeError):
                    attnspec.concatenate(np.empty((1, seq, 3), "float32"))
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def split(call):
    arrays = {label: value for label, value in call.arguments.items() if isinstance(value, np.ndarray)}
    return arrays, {label: value for label, value in call.arguments.items() if label not in arrays and value is not None}


@pytest.mark.parametrize("name", _steps)
def test_each_step_refuses_a_wrong_rank_for_each_array(name):
    """No annotation may silently have become Any."""
    arrays, others = split(EVERY_STEP[name])
    step = getattr(attnspec, name)
    positional = {label: others.pop(label) for label in ("offset",) if label in others and name == "count_positions"}
    step(*arrays.values(), *positional.values(), **others)
    for label in arrays:
        worse = {**arrays, label: arrays[label][None]}
        with pytest.raises(ShapeError, match=f"{label} .* axes, but needs"):
            step(*worse.values(), *positional.values(), **others)


@pytest.mark.parametrize("name", _steps)
def test_outlines_have_the_shapes_that_arrays_get(name):
    call = EVERY_STEP[name]
    arrays, others = split(call)
    positional = {label: others.pop(label) for label in ("offset",) if label in others and name == "count_positions"}
    drawn = [Outline(array.shape, array.dtype.name) for array in arrays.values()]
    outline = getattr(attnspec, name)(*drawn, *positional.values(), **others)
    assert outline.dtype == call.result.dtype.name
    for axis, size, got in zip(call.shapes["return"].axes, outline.shape, call.result.shape, strict=True):
        assert size == got or (axis.broadcast and got == 1)


Array = np.ndarray
SIZE = st.integers(1, 3)


def pair(left: Float[Array, "a #b c"], right: Float[Array, "#a b d"], third: Float[Array, "c*d b 2"], /) -> None: ...


@given(st.tuples(SIZE, SIZE, SIZE), st.tuples(SIZE, SIZE, SIZE), st.tuples(st.integers(1, 6), SIZE, st.just(2)))
def test_who_set_what_agrees_with_the_judge(left, right, third):
    """The explanation of a refusal is a second checker, so it must accept exactly what jaxtyping accepts."""
    signature = Signature(pair)
    entries = signature.entries(dict(zip(("left", "right", "third"), map(np.zeros, (left, right, third)), strict=True)))
    try:
        signature.bind(entries, {})
        ours = True
    except Conflict:
        ours = False
    with jaxtyped("context"):
        theirs = all(isinstance(entry.value, entry.hint) for entry in entries)
    assert ours == theirs
