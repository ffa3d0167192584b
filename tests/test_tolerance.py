"""The tolerances hold: for every option, every step, every dtype, in any order of summation; and they are no wider than they need be."""

import math
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from condition import compare
from enclosure import enclose
from hypothesis import given, settings, target
from hypothesis import strategies as st
from options import PAIRWISE, draw
from torch.nn import functional

import attnspec
from attnspec import Heads, Parameters
from attnspec.oracle.errors_attend import ATTEND
from attnspec.oracle.errors_fan import FAN
from attnspec.oracle.gradient_tolerance import gradient_tolerance
from attnspec.oracle.tolerance import ROUNDINGS, Rounding, tolerance
from attnspec.step import _functions

KINDS = ("cross", "causal", "sharp", "positive", "offset")
KERNELS = ("fused", "math", "softmax", "scaled_before", "by_hand")
SIZES = ((2, 8, 8, 16, 2), (1, 16, 24, 32, 4), (1, 32, 32, 64, 4), (1, 48, 48, 48, 3), (1, 1, 16, 16, 2))
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These arrays are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def traced(run):
    with attnspec.trace() as steps:
        run()
    return steps


def in_float32(a):
    return a.astype(np.float32) if a.dtype == np.float64 else a


def exact_in_float32(a):
    return in_float32(a).astype(a.dtype)


def ratio(error, limit):
    """The largest error over limit; nothing is no error."""
    return float(np.max(np.where(error == 0, 0.0, error / np.maximum(limit, 1e-300)), initial=0.0))


def squares(error, sigma):
    return np.where(error == 0, 0.0, error / np.maximum(sigma, 1e-300)).ravel() ** 2


# --- every option


def in_a_row(x, y):
    """A matrix product summed strictly from the first term to the last."""
    out = np.zeros((*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1]), x.dtype)
    for i in range(x.shape[-1]):
        out = out + x[..., :, i, None] * y[..., i, None, :]
    return out


def sequential():
    """Run the specification with such products."""

    def project(x, w, b=None, **_):
        return in_a_row(x[:, None], w) + (0 if b is None else b[:, None, :])

    def mix(x, w, b=None, **_):
        return in_a_row(x, w) + (0 if b is None else b)

    names = ("project_queries", "project_keys", "project_values")
    return attnspec.substitute(
        score=lambda q, k, **_: in_a_row(q, k.mT), blend=lambda a, v, **_: in_a_row(a, v), mix=mix, **dict.fromkeys(names, project)
    )


def off(name, steps, others):
    """How far a step's result is from the exact one, where that is finite."""
    exact, other = steps[name].result, others[name].result
    finite = np.isfinite(exact)
    assert (np.isfinite(other) == finite).all()
    return np.abs(np.where(finite, other, 0.0) - np.where(finite, exact, 0.0))


@pytest.mark.parametrize("order", [nullcontext, sequential])
def test_every_step_in_float32(order):
    """The errors of every step of every option stay within its tolerance; their root mean square is near one sigma."""
    rms = defaultdict(list)
    for seed, choice in enumerate(PAIRWISE):
        problem = draw(choice, seed).convert(exact_in_float32)
        steps = traced(problem.run)
        with order():
            others = traced(problem.convert(in_float32).run)
        for name in set(steps) & set(FAN | ATTEND):
            allowed, error = tolerance(steps, ROUNDINGS["float32"], of=name), off(name, steps, others)
            assert all(np.isfinite(array).all() for array in vars(allowed).values())
            assert ratio(error, allowed.worst) < 0.5, (name, choice)
            assert ratio(error, allowed.sigma) < 5, (name, choice)
            rms[name].append(float(np.mean(squares(error, allowed.sigma))))
        assert (tolerance(steps, ROUNDINGS["float32"]).worst <= tolerance(steps, ROUNDINGS["float32"], False).worst).all()
    found = {name: math.sqrt(np.mean(values)) for name, values in rms.items() if name != "extend_bias"}
    assert set(found) == set(FAN | ATTEND) - {"append_to_cache", "linear_bias", "relative_bias", "extend_bias"}
    assert {name: share for name, share in found.items() if not 0.12 < share < 1} == {}


ALONE = {
    "bias": lambda s, t: _functions["bias"](s, t[:, :, :, :1]),
    "rms": lambda s, t: attnspec.normalise(s, kind="rms"),
    "layer": lambda s, t: attnspec.normalise(s, t[0, :, 0], kind="layer"),
    "l2": lambda s, t: attnspec.normalise(s, kind="l2"),
    "rotate": lambda s, t: attnspec.rotate(s, np.arange(0, 800, 100)[None]),
    "cap": lambda s, t: attnspec.cap(s, limit=1.5),
    "score": attnspec.score,
    "gate": lambda s, t: attnspec.gate(s, t[0, :, 0, 0]),
    "weights": lambda s, t: attnspec.softmax(s),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_step_alone_has_the_errors_that_it_makes(name):
    """Nothing that comes before hides an error of its own; six sigmas of an element are about its worst case."""
    rng, used, rms = np.random.default_rng(3), 0.0, []
    for _ in range(40):
        s, t = (exact_in_float32(rng.normal(size=(2, 3, 8, 6))) for _ in range(2))
        steps = traced(lambda: ALONE[name](s, t))  # noqa: B023
        error = np.abs(ALONE[name](in_float32(s), in_float32(t)) - steps.calls[-1].result)
        allowed = tolerance(steps, ROUNDINGS["float32"])
        used = max(used, ratio(error, allowed.worst))
        rms.append(np.mean(squares(error, allowed.sigma)))
    assert 0.02 < used < 1
    assert 0.05 < math.sqrt(np.mean(rms)) < 1


def test_exponentials_may_be_off_by_four_units_in_the_last_place():
    scores, signs = np.zeros((1, 1, 1, 2)), np.array([1, -1])
    steps = traced(lambda: attnspec.softmax(scores))
    shares = 1 + 8 * 2.0**-24 * signs
    error = np.abs(shares / shares.sum() - steps["softmax"].result)
    assert 0.5 < ratio(error, tolerance(steps, ROUNDINGS["float32"]).worst) < 1


def test_results_that_are_stored_narrow():
    """The queries alone, the worst case of whose product is far less than what storing them adds."""
    rng, change = np.random.default_rng(4), exact_in("bfloat16")
    x, w = change(rng.normal(size=(2, 5, 8))), change(rng.normal(size=(2, 8, 3)))
    steps = traced(lambda: attnspec.project_queries(x, w))
    y = torch.einsum("bsd,hdk->bhsk", *(torch.tensor(a).bfloat16() for a in (x, w))).double().numpy()
    assert 0.5 < ratio(np.abs(y - steps["project_queries"].result), tolerance(steps, ROUNDINGS["bfloat16"]).worst) < 1


@pytest.mark.parametrize("seed", range(0, len(PAIRWISE), 3))
def test_float64_against_the_exact_result(seed):
    problem = draw(PAIRWISE[seed], seed)
    steps = traced(problem.run)
    agreement = compare(enclose(problem.x, problem.parameters, problem.options), steps["mix"].result)
    allowed = tolerance(steps, ROUNDINGS["float64"])
    assert agreement.nan_agrees
    assert ratio(agreement.error, allowed.worst / 2) < 1  # the half of it that is not the reference's own
    assert ratio(agreement.error, allowed.sigma) < 5


def test_every_step_with_numbers_has_a_rule():
    kinds = {name: function.__step__.signature.hints["return"] for name, function in _functions.items()}
    assert {name for name, kind in kinds.items() if kind.dtype.__name__ == "Float"} == set(FAN | ATTEND)


def test_a_bias_that_was_made_in_the_trace():
    where = np.arange(9)[None], np.arange(9)[None]
    slopes, rng = np.array([0.7, 0.03]), np.random.default_rng(0)
    q = rng.normal(size=(1, 2, 9, 4))
    slopes, q = exact_in_float32(slopes), exact_in_float32(q)
    steps = traced(lambda: attnspec.attend(q, q, q, bias=attnspec.linear_bias(slopes, *where)))
    others = traced(lambda: attnspec.attend(*[in_float32(q)] * 3, bias=attnspec.linear_bias(in_float32(slopes), *where)))
    assert off("linear_bias", steps, others).max() > 0
    for name in ("linear_bias", "bias", "blend"):
        assert ratio(off(name, steps, others), tolerance(steps, ROUNDINGS["float32"], of=name).worst) < 1
    given_ = traced(lambda: attnspec.attend(q, q, q, bias=steps["linear_bias"].result))
    more = tolerance(steps, ROUNDINGS["float32"], of="bias").worst - tolerance(given_, ROUNDINGS["float32"], of="bias").worst
    np.testing.assert_allclose(more, 2.0**-24 * np.abs(steps["linear_bias"].result), rtol=1e-4, atol=1e-20)


def test_a_cache_keeps_the_errors_of_its_keys():
    """Token by token has the tolerance of all at once, less what a sum over fewer keys saves."""
    parameters = Parameters.random(Heads(d_model=12, h=3))
    x = np.random.default_rng(0).normal(size=(2, 5, 12))

    def decode():
        cache = None
        for i in range(5):
            y, cache = attnspec.decode(x[:, i : i + 1], parameters, cache)
        return y

    once = tolerance(traced(lambda: attnspec.multi_head_attention(x, parameters, causal=True)), ROUNDINGS["float32"])
    np.testing.assert_allclose(tolerance(traced(decode), ROUNDINGS["float32"]).worst[:, 0], once.worst[:, -1], rtol=1e-9)


def test_numbers_that_are_not_finite_have_no_tolerance():
    q = np.random.default_rng(0).normal(size=(1, 1, 3, 4))
    k = q.copy()
    k[0, 0, 1] = np.nan
    for keep in (None, np.array([True, False, True])[None, None, None]):
        allowed = tolerance(traced(lambda keep=keep: attnspec.attend(q, k, k, keep=keep)), ROUNDINGS["float32"])
        assert (allowed.worst == 0).all() == (keep is None)
        assert np.isfinite(allowed.worst).all()
        assert np.isfinite(allowed.drawn).all()


@pytest.mark.parametrize("shift", [-1e9, -3e38])
def test_a_bias_in_place_of_a_mask(shift):
    q = np.random.default_rng(0).normal(size=(1, 2, 4, 4))
    keep = np.tri(4, dtype=bool)[None, None]
    masked = tolerance(traced(lambda: attnspec.attend(q, q, q, keep=keep, bias=np.zeros_like(q))), ROUNDINGS["float32"])
    shifted = tolerance(traced(lambda: attnspec.attend(q, q, q, bias=np.where(keep, 0.0, shift))), ROUNDINGS["float32"])
    for name in ("worst", "sigma", "sigma_any"):
        np.testing.assert_allclose(getattr(shifted, name), getattr(masked, name), rtol=1e-9)


@pytest.mark.parametrize("steps", [{}, {"of": "gate"}])
def test_nothing_to_be_off(steps):
    q = np.ones((1, 1, 2, 2))
    trace = traced(lambda: attnspec.attend(q, q, q) if steps else None)
    with pytest.raises(attnspec.ConfigError, match="tolerance: "):
        tolerance(trace, ROUNDINGS["float32"], **steps)


# --- PyTorch's kernels, in every dtype


def drawn(kind, rng, sizes, change=lambda a: a):
    """A layer, its input and context; `change` is applied to every array."""
    batch, seq_q, seq_k, d_model, h = sizes
    parameters = Parameters.random(Heads(d_model=d_model, h=h), seed=int(rng.integers(1 << 30)))
    x, context = rng.normal(size=(batch, seq_q, d_model)), rng.normal(size=(batch, seq_k, d_model))
    if kind == "sharp":
        parameters = replace(parameters, w_q=8 * parameters.w_q, b_q=8 * parameters.b_q)
    if kind == "positive":
        x, context = rng.random(x.shape), rng.random(context.shape)
        parameters = parameters.map(lambda a: rng.random(a.shape) * (2 / d_model))
    if kind == "offset":
        parameters = replace(parameters, b_v=parameters.b_v + 50)
    return change(x), change(context), parameters.map(change)


def attend_in_torch(kernel, q, k, v, causal):
    if kernel in ("fused", "math"):
        chosen = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH) if kernel == "math" else nullcontext()
        with chosen:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    factor = 1 / math.sqrt(q.shape[-1])
    scores = (q * factor) @ k.mT if kernel == "scaled_before" else q @ k.mT * factor
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if kernel == "by_hand":
        shares = torch.exp(scores - scores.amax(-1, keepdim=True))
        return (shares / shares.sum(-1, keepdim=True)) @ v
    return torch.softmax(scores, -1) @ v


def layer_in_torch(kernel, dtype, problem, *, causal=False):
    x, context, parameters = problem
    p, x, context = parameters.to_torch(dtype=dtype), torch.tensor(x).to(dtype), torch.tensor(context).to(dtype)

    def heads(x, w, b):
        return functional.linear(x, w.mT.flatten(0, 1), b.flatten()).unflatten(-1, w.shape[::2]).transpose(1, 2)

    blended = attend_in_torch(kernel, heads(x, p.w_q, p.b_q), heads(context, p.w_k, p.b_k), heads(context, p.w_v, p.b_v), causal)
    return functional.linear(blended.transpose(1, 2).flatten(2), p.w_o.T, p.b_o).double().numpy()


def exact_in(name):
    return lambda a: torch.tensor(a).to(HALF[name]).double().numpy()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", HALF)
def test_layers_of_torch(name, kernel):
    rng, rms = np.random.default_rng(0), []
    for i in range(30):
        kind, sizes = KINDS[i % 5], SIZES[(i + i // 5) % 5]
        x, context, parameters = drawn(kind, rng, sizes, exact_in(name))
        causal = kind == "causal" and sizes[1] == sizes[2]
        steps = traced(lambda: attnspec.multi_head_attention(x, parameters, context=context, causal=causal))  # noqa: B023
        allowed = tolerance(steps, ROUNDINGS[name])
        error = np.abs(layer_in_torch(kernel, HALF[name], (x, context, parameters), causal=causal) - steps["mix"].result)
        assert ratio(error, allowed.worst) < 0.5
        assert ratio(error, allowed.sigma) < 5
        rms.append(math.sqrt(np.mean(squares(error, allowed.sigma))))
        assert rms[-1] < 1.2
    assert 0.3 < np.median(rms) < 1


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", HALF)
def test_heads_of_torch(name, kernel):
    """Attention alone, at all widths and lengths, from weights that are all alike to a single one."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        d_k, seq_k, seq_q = int(rng.choice([1, 2, 8, 64])), int(rng.choice([1, 2, 7, 64, 300])), int(rng.integers(1, 9))
        spread, level = rng.choice([0.1, 1.0, 3.0, 8.0]), rng.choice([0.0, 10.0])
        q, k, v = (rng.normal(size=(1, 2, seq, d_k)) for seq in (seq_q, seq_k, seq_k))
        q, k, v = map(exact_in(name), (q * spread, k, v + level))
        steps = traced(lambda: attnspec.attend(q, k, v))  # noqa: B023
        allowed = tolerance(steps, ROUNDINGS[name])
        given_ = (torch.tensor(a).to(HALF[name]) for a in (q, k, v))
        error = np.abs(attend_in_torch(kernel, *given_, causal=False).double().numpy() - steps["blend"].result)
        assert ratio(error, allowed.worst) < 1
        assert ratio(error, allowed.sigma) < 5


# --- structured data


def structured(kind, rng, seq, d_model, h):
    """Numbers that repeat or are sorted, so that rounding errors are not independent."""
    x, context, parameters = drawn("cross", rng, (1, seq, seq, d_model, h))
    if kind == "constant":
        return np.full_like(x, 0.1), np.full_like(x, 0.1), parameters.map(lambda a: np.full_like(a, 0.3 / math.sqrt(d_model)))
    if kind == "two_valued":
        pick = lambda a: np.where(rng.random(a.shape) < 0.5, 0.1, -0.3)
        return pick(x), pick(x), parameters.map(lambda a: pick(a) / math.sqrt(d_model))
    if kind == "same_keys":
        return x, context[:, rng.integers(0, 4, seq)], parameters
    return np.sort(x), np.sort(context), parameters.map(lambda a: np.sort(a, axis=-2) if a.ndim > 1 else np.sort(a))


@pytest.mark.parametrize("kind", ["constant", "two_valued", "same_keys", "sorted"])
@pytest.mark.parametrize("sizes", [(32, 64, 4), (48, 192, 6)])
def test_structured_data(kind, sizes):
    """The worst case holds in any case; sigma for any order does once numbers are jittered a little."""
    rng = np.random.default_rng(2)
    for jitter in (0, 2**-7):
        x, context, parameters = structured(kind, rng, *sizes)
        change = lambda a: exact_in_float32(a * (1 + jitter * rng.uniform(-1, 1, a.shape)))  # noqa: B023
        x, context, parameters = change(x), change(context), parameters.map(change)
        steps = traced(lambda: attnspec.multi_head_attention(x, parameters, context=context))  # noqa: B023
        allowed = tolerance(steps, ROUNDINGS["float32"])
        with sequential():
            y = attnspec.multi_head_attention(in_float32(x), parameters.map(in_float32), context=in_float32(context))
        error = np.abs(y - steps["mix"].result)
        assert ratio(error, allowed.worst) < 0.5
        assert not jitter or ratio(error, allowed.outside) < 0.8


@settings(max_examples=100, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    seq=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    h=st.integers(1, 3),
    d_k=st.integers(1, 6),
    spread=st.floats(0.01, 20),
    level=st.floats(0, 50),
    name=st.sampled_from(["float32", "bfloat16", "float16"]),
    kernel=st.sampled_from(KERNELS),
)
def test_no_drawn_data_break_it(*, seed, seq, h, d_k, spread, level, name, kernel):
    rng, change = np.random.default_rng(seed), exact_in(name)
    x, context, parameters = drawn("cross", rng, (1, *seq, h * d_k, h))
    x, context, parameters = change(x * spread), change(context + level), parameters.map(change)
    steps = traced(lambda: attnspec.multi_head_attention(x, parameters, context=context))
    allowed = tolerance(steps, ROUNDINGS[name])
    error = np.abs(layer_in_torch(kernel, HALF[name], (x, context, parameters)) - steps["mix"].result)
    target(ratio(error, allowed.drawn))
    assert ratio(error, allowed.worst) < 1
    assert ratio(error, allowed.drawn) < 1


# --- what they catch


def rounded_to(dtype):
    return lambda a: torch.tensor(a).to(dtype).float().numpy()


def tf32(a):
    """11 bits, as the matrix products of accelerators take them."""
    bits = np.ascontiguousarray(a).view(np.uint32)
    return ((bits + 0x0FFF + (bits >> 13 & 1)) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def with_factors(change):
    """Run the specification with changed factors of all matrix products."""

    def project(step):
        return lambda x, w, b=None, **_: step(change(x), change(w), b)

    names = ("project_queries", "project_keys", "project_values", "mix")
    return {name: project(_functions[name]) for name in names} | {
        name: (lambda x, y, step=_functions[name], **_: step(change(x), change(y))) for name in ("score", "blend")
    }


def softmax_with(exp):
    def softmax(scores, *_, **__):
        shares = exp(scores - scores.max(axis=-1, keepdims=True))
        return shares / shares.sum(axis=-1, keepdims=True)

    return {"softmax": softmax}


def scale_off(share):
    return {"scale": lambda scores, *, d_k: attnspec.scale(scores, d_k=d_k) * np.float32(1 + share)}


FAULTS = {
    "scale off by 1e-4": scale_off(1e-4),
    "scale off by 3e-6": scale_off(3e-6),
    "exponentials off by 1e-5": softmax_with(lambda z: np.exp(z) * (1 + np.float32(1e-5) * np.sin(37 * z))),
    "matrix products of tf32": with_factors(tf32),
    "weights in float16": {"softmax": lambda s, *_, **__: rounded_to(torch.float16)(attnspec.softmax(s))},
    "what heads found in float16": {"concatenate": lambda z: rounded_to(torch.float16)(attnspec.concatenate(z))},
    "a key dropped": {"mask": lambda s, keep, **_: attnspec.mask(s, keep & (np.arange(32) < 31))},
    "a bias missing": {"mix": lambda z, w, _, **__: attnspec.mix(z, w)},
}


def put(seed, causal=False):
    x, context, parameters = drawn("cross", np.random.default_rng(seed), (1, 32, 32, 64, 4), exact_in_float32)
    keep = np.tri(32, dtype=bool)[None, None] if causal else np.ones((1, 1, 32, 32), bool)

    def run(change=lambda a: a):
        return attnspec.multi_head_attention(change(x), parameters.map(change), context=change(context), keep=keep)

    return run, traced(run)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault):
    caught = 0
    for seed in range(20):
        run, steps = put(seed)
        allowed = tolerance(steps, ROUNDINGS["float32"])
        with attnspec.substitute(**FAULTS[fault]):
            error = np.abs(run(in_float32) - steps["mix"].result)
        caught += ratio(error, allowed.drawn) > 1
    assert caught >= 19


@pytest.mark.parametrize("order", [nullcontext, sequential])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_is_caught_falsely(order, causal):
    for seed in range(20):
        run, steps = put(seed, causal)
        with order():
            error = np.abs(run(in_float32) - steps["mix"].result)
        assert ratio(error, tolerance(steps, ROUNDINGS["float32"]).drawn) < 0.8


@pytest.mark.parametrize(("name", "change"), [("tf32", tf32), ("float32_bfloat16_inside", rounded_to(torch.bfloat16))])
def test_rounded_factors_have_a_rounding_of_their_own(name, change):
    for seed in range(10):
        run, steps = put(seed)
        with attnspec.substitute(**with_factors(change)):
            error = np.abs(run(in_float32) - steps["mix"].result)
        allowed = tolerance(steps, ROUNDINGS[name])
        assert ratio(error, allowed.worst) < 0.5
        assert 0.2 < ratio(error, allowed.drawn) < 0.8


PLACES = {
    "projected": ("project_keys", lambda steps: np.abs(steps["project_keys"].result)),
    "scores": ("score", lambda steps: np.abs(steps["score"].result) + np.abs(steps["score"].arguments["queries"]) @ keys_of(steps)),
    "weights": ("softmax", lambda steps: np.abs(steps["softmax"].result)),
    "blended": ("blend", lambda steps: np.abs(steps["blend"].result)),
    "output": ("mix", lambda steps: np.abs(steps["mix"].result)),
}


def keys_of(steps):
    return np.abs(steps["score"].arguments["keys"]).mT


@pytest.mark.parametrize("place", PLACES)
def test_every_place_of_rounding_counts(place):
    """One more rounding adds what it must to the worst case and to the variance."""
    _, steps = put(0)
    (step, size), unit, base = PLACES[place], 2.0**-12, Rounding(2.0**-40)
    less, more = (tolerance(steps, rounding, of=step) for rounding in (base, replace(base, **{place: unit})))
    np.testing.assert_allclose(more.worst - less.worst, unit * size(steps), rtol=0.02, atol=1e-9)
    if place != "scores":  # two roundings, of different sizes
        np.testing.assert_allclose(more.sigma**2 - less.sigma**2, unit**2 / 3 * size(steps) ** 2, rtol=0.02)


def test_narrow_exponentials_and_their_arguments_count():
    """A weight of half, far below a peak: what its argument is rounded to is a multiple of the distance."""
    scores, base = np.array([0.0, -8.0])[None, None, None], Rounding(2.0**-24, exponential=0.0, argument=0.0)
    steps = traced(lambda: attnspec.softmax(scores))
    least = tolerance(steps, base).worst[..., 1]
    for more, units in (({"argument": 2.0}, 16), ({"scores": 2.0**-12}, 8 * 2**12), ({"peak": 0.0}, 0)):
        found = (tolerance(steps, replace(base, **more)).worst[..., 1] - least) / steps["softmax"].result[..., 1]
        np.testing.assert_allclose(found, units * 2.0**-24, rtol=0.02, atol=1e-12)


def test_weights_may_be_rounded_to_the_smallest_numbers_twice():
    """First the exponentials, then what becomes of them: in float16, where both are kept."""
    rng = np.random.default_rng(0)
    queries, keys, values = (rng.normal(0, spread, (40, 4, 8, 1)).astype(np.float16) for spread in (8, 1, 1))
    with attnspec.trace() as steps:
        attnspec.attend(*(array.astype(np.float64) for array in (queries, keys, values)))
    scores = queries @ keys.mT
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    off = np.abs(shares / shares.sum(axis=-1, keepdims=True) - steps["softmax"].result)
    limit = tolerance(steps, ROUNDINGS["float16"], of="softmax").worst
    assert (off <= limit).all()
    assert (off > limit - 2.0**-25).any(), "no number here was rounded twice"


def test_gates_count_like_factors_of_the_output_projection():
    x, _, parameters = drawn("cross", np.random.default_rng(0), (1, 6, 6, 12, 3))
    gates = np.array([100.0, 0.01, 0.0])
    factors = np.repeat(gates, 4)[:, None]
    gated, folded = (replace(parameters, gates=gates), replace(parameters, w_o=parameters.w_o * factors))
    first, second = (tolerance(traced(lambda p=p: attnspec.multi_head_attention(x, p)), Rounding(2.0**-24)) for p in (gated, folded))
    np.testing.assert_allclose(first.worst, second.worst, rtol=0.15)
    assert (first.worst >= second.worst).all()


def test_an_error_of_a_query_is_common_to_its_keys():
    """It does not average out over many keys: a thousandfold repeated key counts like a single one."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(1, 3, 8)), rng.normal(size=(1, 8, 4))
    k, v = rng.normal(size=(1, 1, 2, 4)), rng.normal(size=(1, 1, 2, 5))
    few, many = (
        traced(lambda n=n: attnspec.attend(attnspec.project_queries(x, w), np.repeat(k, n, axis=2), np.repeat(v, n, axis=2)))
        for n in (1, 500)
    )
    rounding = Rounding(2.0**-40, projected=2.0**-12, exponential=0.0)
    np.testing.assert_allclose(tolerance(few, rounding).sigma, tolerance(many, rounding).sigma, rtol=1e-3)


def test_the_widest_rounding_counts():
    _, steps = put(0)
    both = tolerance(steps, ROUNDINGS["bfloat16"])
    each = [tolerance(steps, rounding) for rounding in ROUNDINGS["bfloat16"]]
    for name in ("worst", "sigma", "sigma_any", "drawn", "outside"):
        np.testing.assert_array_equal(getattr(both, name), np.maximum(*(getattr(one, name) for one in each)))


# --- gradients


def gradients(run, inputs, cotangent):
    found = torch.autograd.grad((run() * cotangent).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def worst_gradient(attend, dtype, seed):
    """The largest error of a gradient of attention over its tolerance."""
    rng = np.random.default_rng(seed)
    seq_q, seq_k, d = int(rng.integers(1, 9)), int(rng.integers(1, 24)), int(rng.choice([1, 3, 8, 16]))
    shapes = {"q": (2, 2, seq_q, d), "k": (2, 2, seq_k, d), "v": (2, 2, seq_k, d), "bias": (1, 2, seq_q, seq_k)}
    spread = rng.choice([0.3, 1.0, 4.0])
    exact = {name: torch.tensor(rng.normal(size=shape) * (spread if name == "q" else 1)).float().double() for name, shape in shapes.items()}
    inputs = {name: a.requires_grad_() for name, a in exact.items()}
    cotangent, others = torch.tensor(rng.normal(size=shapes["q"])).float().double(), [a.detach().to(dtype) for a in exact.values()]
    others = [a.requires_grad_() for a in others]
    run = lambda: attnspec.attend(inputs["q"], inputs["k"], inputs["v"], bias=inputs["bias"])
    allowed = gradient_tolerance(run, inputs, cotangent, torch.finfo(dtype).eps / 2, seed=seed)
    right = gradients(run, tuple(inputs.values()), cotangent)
    found = gradients(lambda: attend(*others), others, cotangent.to(dtype))
    errors = [np.abs((a.double() - b).numpy()) for a, b in zip(found, right, strict=True)]
    return max(ratio(error, limit) for error, limit in zip(errors, allowed.values(), strict=True))


def by_hand(q, k, v, bias, total=lambda shares: shares.sum(-1, keepdim=True)):
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    shares = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (shares / total(shares)) @ v


RIGHT = {
    "fused": lambda q, k, v, bias: functional.scaled_dot_product_attention(q, k, v, attn_mask=bias),
    "textbook": lambda q, k, v, bias: torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]) + bias, -1) @ v,
    "by_hand": by_hand,
}
WRONG = {
    "row sum detached": lambda q, k, v, bias: by_hand(q, k, v, bias, lambda shares: shares.sum(-1, keepdim=True).detach()),
    "keys detached": lambda q, k, v, bias: by_hand(q, k.detach(), v, bias),
    "no scale": lambda q, k, v, bias: by_hand(q * math.sqrt(q.shape[-1]), k, v, bias),
    "scale off by 1e-4": lambda q, k, v, bias: by_hand(q * (1 + 1e-4), k, v, bias),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RIGHT)
def test_right_gradients_are_within(name, dtype):
    assert max(worst_gradient(RIGHT[name], dtype, seed) for seed in range(5)) < 0.7


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_are_far_outside(name):
    assert worst_gradient(WRONG[name], torch.float32, 7) > 5


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**20])
def test_the_tolerance_of_gradients_grows_with_them(factor):
    """What comes back is linear, so nothing in its tolerance has a size of its own."""
    rng = np.random.default_rng(0)
    inputs = {name: torch.tensor(rng.normal(size=(2, 2, 5, 3)), requires_grad=True) for name in ("q", "k", "v")}
    cotangent, unit = torch.tensor(rng.normal(size=(2, 2, 5, 3))), 2.0**-24
    one, other = (
        gradient_tolerance(lambda: attnspec.attend(*inputs.values()), inputs, g, unit, seed=0) for g in (cotangent, factor * cotangent)
    )
    for name in inputs:
        np.testing.assert_allclose(other[name], factor * one[name], rtol=1e-9)


def test_gradients_of_every_option():
    """Those of a whole layer, with respect to all its parameters, of the specification in float32."""
    for seed in range(0, len(PAIRWISE), 5):
        torch.manual_seed(seed)
        problem = draw(PAIRWISE[seed] | {"empty_row": "zero"}, seed).convert(exact_in_float32)

        def prepared(dtype, problem=problem):
            layer = problem.convert(lambda a: torch.tensor(a, dtype=dtype if a.dtype == np.float64 else None))
            named = {"x": layer.x} | {name: a for name, a in vars(layer.parameters).items() if a is not None}
            return layer.run, {name: a.requires_grad_() for name, a in named.items()}

        (run, inputs), (other, others) = prepared(torch.float64), prepared(torch.float32)
        cotangent = torch.randn(run().shape).double()
        allowed = gradient_tolerance(run, inputs, cotangent, 2.0**-24, seed=seed)
        right = gradients(run, tuple(inputs.values()), cotangent)
        found = gradients(other, tuple(others.values()), cotangent.float())
        for name, a, b in zip(inputs, found, right, strict=True):
            assert ratio(np.abs((a.double() - b).numpy()), allowed[name]) < 0.8, (name, seed)
