"""The kernel for NumPy does what the specification says, whatever the blocks and the threads."""

import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import threadpoolctl
from arrays import POISONS, PRIMES, assert_same
from arrays import draw as draw_layer

import attnspec
from attnspec import Dropout
from attnspec.layers import numpy_kernel as kernel

# Rounding: sums of at most 1031 products of numbers of size 1 to 10, in other orders than the specification's.
ROUNDING = 1e-12

PLAIN = {"keep": None, "bias": None, "band": (None, None), "scale": 0.5}
BANDS = [(None, None), (None, 0), (None, 3), (-4, 0), (-2, 5), (3, None), (None, -7), (6, 9), (2, 1), (-(10**30), 10**30), (10**30, None)]


LAYOUTS = [
    np.copy,
    lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    lambda x: x[..., ::-1].copy()[..., ::-1],
    lambda x: x.swapaxes(1, 3).copy().swapaxes(1, 3),
]


@pytest.fixture(params=["whole", "blocks", "threads"])
def route(request, monkeypatch):
    """Whether there is one block for all, many of them, or many on several threads."""
    monkeypatch.setattr(kernel, "CORES", 3 if request.param == "threads" else 1)
    if request.param != "whole":
        for name in ("ROWS", "KEYS", "PRODUCTS"):
            monkeypatch.setattr(kernel, name, 5)
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(kernel._crew, "pool", pool)
        yield request.param


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape)


def arrays(*, batch=2, h_kv=3, group=2, seq_q=13, seq_k=17, d_k=7, d_v=11, seed=0):
    sizes = ((batch, h_kv * group, seq_q, d_k), (batch, h_kv, seq_k, d_k), (batch, h_kv, seq_k, d_v))
    return tuple(normal(*size, seed=seed + place) for place, size in enumerate(sizes))


def in_band(seq_q, seq_k, band):
    distance = (np.arange(seq_k) - np.arange(seq_q)[:, None]).astype(object)
    low, high = (limit if bound is None else bound for bound, limit in zip(band, (-np.inf, np.inf), strict=True))
    return ((distance >= low) & (distance <= high)).astype(bool)[None, None]


def specified(queries, keys, values, *, keep, bias, band, scale, dropout=None):
    """What the specification gives, in float64."""
    group = queries.shape[1] // keys.shape[1]
    queries, keys, values = (np.asarray(x, np.float64) for x in (queries, keys, values))
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    seen = in_band(queries.shape[2], keys.shape[2], band)
    keep = seen if keep is None else seen & keep
    bias = None if bias is None else bias.astype(np.float64)
    with np.errstate(all="ignore"):
        return attnspec.attend(queries, keys, values, keep=keep, bias=bias, scale=scale, dropout=dropout)


def assert_as_specified(*args, within=ROUNDING, **options):
    wanted = specified(*args, **options)
    assert_same(kernel.attend(*args, **options), wanted.astype(args[0].dtype), within=within)


SIZES = {
    "batch": [1, 2, 5],
    "h_kv": [1, 3],
    "group": [1, 2, 7],
    "seq_q": [1, 2, 11, 23],
    "seq_k": [1, 3, 13, 29],
    "d_k": [1, 5, 8],
    "d_v": [1, 4, 7],
}


def draw(seed):
    """Draw sizes and options; axes of the mask and of the bias are there or are 1."""
    rng = np.random.default_rng(seed)
    args = arrays(**{name: int(rng.choice(some)) for name, some in SIZES.items()}, seed=seed)
    sizes = np.array([*args[0].shape[:3], args[1].shape[2]])
    keep = rng.random([*np.where(rng.random(3) < 0.5, 1, sizes[:3]), sizes[3]]) < 0.6 if rng.random() < 0.5 else None
    bias = rng.normal(size=np.where(rng.random(4) < 0.5, 1, sizes)) if rng.random() < 0.5 else None
    return args, {"keep": keep, "bias": bias, "band": BANDS[rng.integers(len(BANDS))], "scale": rng.choice([0.3, 1.0, -2.0])}


@pytest.mark.parametrize("seed", range(100))
def test_draws_agree_with_the_specification(route, seed):
    args, options = draw(seed)
    assert_as_specified(*args, **options)


@pytest.mark.parametrize("band", BANDS)
def test_every_band_with_a_mask_and_without(route, band):
    args = arrays()
    assert_as_specified(*args, **PLAIN | {"band": band})
    assert_as_specified(*args, **PLAIN | {"band": band, "keep": normal(2, 1, 13, 17) < 0.3})


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("band", [(None, None), (None, 0), (-300, 100)])
def test_blocks_of_their_own_size(monkeypatch, band, cores):
    monkeypatch.setattr(kernel, "CORES", cores)
    args = arrays(batch=1, h_kv=1, seq_q=521, seq_k=1031, d_v=5)
    assert len(kernel._Problem(*args, None, None, 0, 0, 1.0).places(together=True)) > 1
    assert_as_specified(*args, **PLAIN | {"band": band, "keep": normal(1, 1, 1, 1031) < 1, "bias": normal(1, 2, 521, 1)})


def test_keys_outside_the_band_are_not_touched(route):
    queries, keys, values = arrays(seq_q=40, seq_k=40)
    scored = []
    score = kernel._Problem.score

    def counting(problem, block):
        scored.append(block.stop - block.start)
        return score(problem, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel._Problem, "score", counting)
        patch.setattr(kernel, "CORES", 1)
        kernel.attend(queries[:1, :1], keys[:1, :1], values[:1, :1], **PLAIN | {"band": (-3, 3)})
    assert sum(scored) <= (40 if route == "whole" else 8 * 11)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("where", ["keys", "values"])
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_dropped_key_has_no_influence(route, where, poison, with_mask):
    args, band = dict(zip(("queries", "keys", "values"), arrays(), strict=True)), (None, None) if with_mask else (-4, 2)
    keep = normal(2, 1, 13, 17) < 0.3 if with_mask else None
    seen = np.broadcast_to(in_band(13, 17, band) if keep is None else keep, (2, 1, 13, 17))
    gone = ~seen[:, :, 6]
    options = PLAIN | {"keep": keep, "band": band}
    clean = kernel.attend(*args.values(), **options)[:, :, 6]
    args[where][np.broadcast_to(gone, (2, 3, 17))] = poison
    assert_same(kernel.attend(*args.values(), **options)[:, :, 6], clean, within=ROUNDING)


@pytest.mark.parametrize("poison", POISONS[:3])
@pytest.mark.parametrize("where", range(3))
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_not_finite_reaches_who_sees_it(route, where, poison, masked):
    args = arrays()
    args[where][1, 1, 5, 3] = args[where][0, 2, 12, 1] = poison
    assert_as_specified(*args, **PLAIN | {"keep": normal(2, 6, 13, 17) < 0 if masked else None})


def test_a_query_of_zeros_does_not_hide_a_key_that_is_not_finite(route):
    for seq_q, d_k in ((1, 1), (1, 64), (13, 7)):
        queries, keys, values = arrays(seq_q=seq_q, d_k=d_k)
        keys[1, 2, 3, 0] = -np.inf
        assert_as_specified(queries * 0, keys, values, **PLAIN)


def test_a_weight_that_vanishes_only_later_hides_what_is_not_finite(route):
    queries, keys, values = arrays(seq_q=5)
    queries[:], keys[:], values[:, :, 2, 0] = 1, 0, np.nan
    keys[:, 0, 16], keys[:, 1, 9], values[:, 0, 4, 1] = 1e4, 1e4, np.inf
    got = kernel.attend(queries, keys, values, **PLAIN)
    assert np.isfinite(got[:, :4]).all()
    assert np.isnan(got[:, 4:]).all()
    assert_as_specified(queries, keys, values, **PLAIN)


def test_a_bias_of_minus_infinity_drops_a_key_and_one_that_is_not_finite_spoils(route):
    queries, keys, values = arrays()
    bias = np.where(normal(2, 1, 13, 17) < 0, -np.inf, 1.0)
    bias[0, 0, 2], bias[1, 0, 3, 4], bias[1, 0, 5, 6] = -np.inf, np.nan, np.inf
    values[:, :, 8] = np.nan
    assert_as_specified(queries, keys, values, **PLAIN | {"bias": bias})


def test_large_numbers_do_not_overflow(route):
    queries, keys, values = (x.astype(np.float32) for x in arrays())
    assert_as_specified(queries * 1e6, keys * 1e6, values, **PLAIN, within=1e-5)
    huge = np.full_like(values, 3e38)
    assert_same(kernel.attend(queries, keys, huge, **PLAIN), np.full((2, 6, 13, 11), 3e38, np.float32), within=1e33)


@pytest.mark.parametrize("empty", ["batch", "seq_q", "seq_k", "d_k", "d_v"])
def test_axes_of_size_zero(route, empty):
    args = arrays(**{empty: 0})
    sizes = (args[0].shape[0], 1, args[0].shape[2], args[1].shape[2])
    assert_as_specified(*args, **PLAIN)
    options = PLAIN | {"keep": np.ones(sizes, bool), "bias": np.ones(sizes)}
    assert_as_specified(*args, **options, dropout=Dropout(0.5, lambda shape: np.arange(np.prod(shape)).reshape(shape) % 2))


def test_any_layout_is_read_and_none_is_written(route):
    given = [*arrays(), normal(2, 1, 13, 17) < 1, normal(1, 6, 13, 17)]
    wanted = specified(*given[:3], **PLAIN | {"keep": given[3], "bias": given[4]})
    for layout in LAYOUTS:
        laid = [layout(x) for x in given]
        for x in laid:
            x.flags.writeable = False
        assert_same(kernel.attend(*laid[:3], **PLAIN | {"keep": laid[3], "bias": laid[4]}), wanted, within=ROUNDING)
        for x, was in zip(laid, given, strict=True):
            np.testing.assert_array_equal(x, was)


@pytest.mark.parametrize(("dtype", "within"), [("float64", ROUNDING), ("float32", 1e-5), ("float16", 2**-9), (ml_dtypes.bfloat16, 2**-6)])
def test_dtypes_are_kept_and_narrow_ones_are_rounded_once(route, dtype, within):
    args, bias = [x.astype(dtype) for x in arrays()], normal(2, 6, 13, 17).astype(dtype)
    options = PLAIN | {"bias": bias, "keep": normal(2, 6, 13, 17) < 1, "dropout": None}
    got, wanted = kernel.attend(*args, **options), specified(*args, **options)
    assert got.dtype == dtype
    assert_same(got.astype(np.float64), wanted, within=within)
    if np.dtype(dtype).itemsize == 2:  # what lies within float32's error of a tie may go either way
        assert np.mean(got == wanted.astype(dtype)) > 0.99
    x, w, w_o = (normal(*size).astype(dtype) for size in ((2, 3, 5), (2, 5, 7), (14, 5)))
    assert kernel.mix(kernel.project(x, w, None), w_o, None).dtype == dtype


def test_dropout_with_given_chances_is_as_specified(route):
    args, options = arrays(), PLAIN | {"band": (None, 3)}
    args[2][:, :, 3] = np.inf
    chances = np.random.default_rng(1).random((2, 6, 13, 17))
    assert_as_specified(*args, **options, dropout=Dropout(0.4, chances.reshape))


def test_dropout_draws_what_the_specification_draws(route):
    args = arrays()
    wanted = specified(*args, **PLAIN, dropout=Dropout(0.4, np.random.default_rng(3)))
    for _ in range(2):
        assert_same(kernel.attend(*args, **PLAIN, dropout=Dropout(0.4, np.random.default_rng(3))), wanted, within=ROUNDING)


def test_dropout_drops_the_rate_of_weights(route):
    queries, keys, values = arrays(seq_q=100, seq_k=100, d_v=100)
    values[:] = np.eye(100)
    weights = kernel.attend(queries, keys, values, **PLAIN)
    dropped = kernel.attend(queries, keys, values, **PLAIN, dropout=Dropout(0.3, np.random.default_rng(0)))
    gone = dropped == 0
    assert abs(gone.mean() - 0.3) < 6 * (0.3 * 0.7 / gone.size) ** 0.5
    np.testing.assert_allclose(dropped[~gone], weights[~gone] / 0.7, rtol=1e-12)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("batch", "seq"), [(2, 13), (1, 1), (3, 0), (0, 5), (1, 300)])
def test_projections(route, batch, seq, with_bias):
    x, w, b, w_o, b_o = normal(batch, seq, 7), normal(3, 7, 5), normal(3, 5), normal(15, 11), normal(11)
    wanted = np.einsum("bsd,hdw->bhsw", x, w) + (b[:, None] if with_bias else 0)
    heads = kernel.project(x, w, b if with_bias else None)
    assert_same(heads, wanted, within=ROUNDING)
    for given in (heads, wanted):
        mixed = np.einsum("bhsw,hwd->bsd", wanted, w_o.reshape(3, 5, 11)) + (b_o if with_bias else 0)
        assert_same(kernel.mix(given, w_o, b_o if with_bias else None), mixed, within=ROUNDING)


def test_projections_of_what_is_not_finite_do_not_warn(route):
    x, w = normal(1, 300, 7), normal(3, 7, 5)
    x[0, 0], x[0, 1, 3], x[0, 2, 4] = 1e308, np.inf, np.nan
    mixed = kernel.mix(kernel.project(x, w * 1e3, None), normal(15, 11), None)
    assert np.isnan(mixed[0, 1:3]).all()
    assert np.isfinite(mixed[0, 3:]).all()


def test_projections_are_as_the_layer_specified():
    layer = draw_layer(**PRIMES | {"group": 2, "d_key_in": 17}, masked=True)
    p = layer.parameters
    fan_out = ((layer.x, p.w_q, p.b_q), (layer.context, p.w_k, p.b_k), (layer.context_v, p.w_v, p.b_v))
    blended = kernel.attend(*(kernel.project(*each) for each in fan_out), **PLAIN | {"keep": layer.keep, "scale": 7**-0.5})
    assert_same(kernel.mix(blended, p.w_o, p.b_o), layer.run(), within=ROUNDING)


def blas_threads():
    return [library.get_num_threads() for library in kernel._crew.blas]


def test_blas_has_its_threads_again_even_after_an_error(monkeypatch):
    monkeypatch.setattr(kernel, "ROWS", 5)
    monkeypatch.setattr(kernel, "CORES", 3)
    blend, seen = kernel._blend, []
    with threadpoolctl.threadpool_limits(2):
        before = blas_threads()
        monkeypatch.setattr(kernel, "_blend", lambda problem: seen.append(blas_threads()) or blend(problem))
        kernel.attend(*arrays(seq_q=100), **PLAIN)
        assert blas_threads() == before
        assert seen
        assert all(set(counts) == {1} for counts in seen)
        monkeypatch.setattr(kernel, "_blend", lambda problem: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kernel.attend(*arrays(seq_q=100), **PLAIN)
        assert blas_threads() == before


def test_blas_has_its_threads_again_after_the_last_of_several_callers():
    with threadpoolctl.threadpool_limits(2):
        before = blas_threads()
        with kernel._crew:
            with kernel._crew:
                assert set(blas_threads()) == {1}
            assert set(blas_threads()) == {1}
        assert blas_threads() == before


def test_an_error_of_a_helper_is_told(monkeypatch):
    monkeypatch.setattr(kernel, "CORES", 2)
    both = threading.Barrier(2, timeout=10)

    def work(piece):
        both.wait()
        if threading.current_thread() is not threading.main_thread():
            raise KeyError(piece)

    with pytest.raises(KeyError):
        kernel._share_out(work, [1, 2])


def test_callers_on_several_threads_do_not_disturb_each_other(monkeypatch):
    monkeypatch.setattr(kernel, "ROWS", 5)
    monkeypatch.setattr(kernel, "KEYS", 5)
    monkeypatch.setattr(kernel, "CORES", 3)
    problems = [draw(seed) for seed in range(40)]
    before = blas_threads()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda problem: kernel.attend(*problem[0], **problem[1]), problems))
    for got, (args, options) in zip(results, problems, strict=True):
        assert_same(got, specified(*args, **options), within=ROUNDING)
    assert blas_threads() == before


@pytest.mark.skipif(not hasattr(kernel.os, "fork"), reason="there is no fork here")
def test_a_forked_child_has_threads_of_its_own():
    program = """
import os, warnings
import numpy as np
from attnspec.layers import numpy_kernel as kernel
warnings.simplefilter("ignore")
kernel.CORES, kernel.ROWS = 3, 5
x = np.random.default_rng(0).normal(size=(2, 3, 200, 8))
run = lambda: kernel.attend(x, x, x, keep=None, bias=None, band=(None, 0), scale=1.0)
wanted = run()
kernel._crew.lock.acquire()
child = os.fork()
if child == 0:
    os._exit(0 if np.allclose(run(), wanted) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("dropout", [None, Dropout(0.5, np.random.default_rng(0))])
@pytest.mark.parametrize("poison", [1.0, np.nan])
def test_memory_grows_with_the_length_not_with_its_square(monkeypatch, dropout, poison):
    monkeypatch.setattr(kernel, "CORES", 2)
    monkeypatch.setattr(kernel, "ROWS", 32)
    monkeypatch.setattr(kernel, "KEYS", 32)

    def peak(seq):
        args = [x.astype(np.float32) for x in arrays(batch=1, h_kv=1, group=2, seq_q=seq, seq_k=seq, d_k=4, d_v=4)]
        args[2][0, 0, 0, 0] = poison
        tracemalloc.start()
        kernel.attend(*args, **PLAIN | {"band": (None, 0)}, dropout=dropout)
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return memory

    assert peak(2048) < 3 * peak(1024)
