"""The catalogue of faults: each one alters something, spares what it is not about, and is named when it is put in."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from attnspec import Heads, Parameters, Policy, Rotation, alibi_slopes, rotate
from attnspec.oracle.decoder import CHUNKS, stream
from attnspec.oracle.design import Profile, choices, draw
from attnspec.oracle.diagnosis import _PLACES, LAST, diagnose
from attnspec.oracle.faults import caches
from attnspec.oracle.faults.biases import _DISTANCES, _SLOPES
from attnspec.oracle.faults.caches import _OFFSETS
from attnspec.oracle.faults.catalogue import CATALOGUE
from attnspec.oracle.faults.fault import run
from attnspec.oracle.faults.fits import _FITS, fits
from attnspec.oracle.faults.rotations import _turned
from attnspec.oracle.faults.scales import FACTORS
from attnspec.oracle.faults.softmax import _unrescaled
from attnspec.oracle.options import OPTIONS
from attnspec.oracle.verdict import ask, judge

CORE = (Heads(d_model=97, h=3, d_k=10, d_v=13), Heads(d_model=97, h=4, d_k=6, d_v=9))
EVEN, GROUPED = Heads(d_model=24, h=4), Heads(d_model=36, h=6, h_kv=2)
TURNED = Policy(rotation=Rotation(width=4))


def layer(heads, **more):
    return Profile(template=Parameters.random(heads), **more)


def core(**more):
    return Profile(heads=CORE, tokens=("wide", "square", "tall", "one query"), **more)


PROFILES = {
    "attention": core(options=tuple(name for name in OPTIONS if name != "positions")),
    "equal widths": Profile(heads=(Heads(d_model=97, h=3, d_k=8),), tokens=("wide", "square")),
    "a layer": layer(EVEN, options=("keep", "padding", "causal", "bias")),
    "a grouped layer": layer(GROUPED),
    "a layer of other widths": layer(Heads(d_model=24, h=4, d_k=5, d_v=3)),
    "grouped attention": Profile(heads=(GROUPED,), tokens=("wide", "square"), options=("causal",)),
    "uniform rows": core(policy=Policy(empty_row="uniform"), options=("keep",)),
    "turned slowly": core(policy=Policy(rotation=Rotation(base=500.0)), options=("cumulative",)),
    "capped attention": core(policy=Policy(cap=2.0), options=("keep", "bias")),
    "scaled attention": core(policy=Policy(scale=0.3)),
    "turned attention": core(policy=TURNED, options=("positions", "causal", "offset")),
    "turned in pairs": core(policy=Policy(rotation=Rotation(pairing="interleaved"))),
    "from the lower right": core(policy=Policy(causal_anchor="bottom_right", window=(2, 1)), options=("causal",)),
}


def problems(profile):
    wanted = choices(profile)
    return [draw(profile, choice, seed=seed, spread=4.0) for choice in wanted for seed in range(1 + (len(wanted) < 20))]


def long_problem():
    """As many keys as tiles of kernels have."""
    return draw(PROFILES["attention"], {"tokens": "wide"}, seed=0, spread=4.0, sizes={"seq_q": 3, "seq_k": 131})


def streams():
    for policy in (Policy(), TURNED, Policy(rotation=Rotation(pairing="interleaved"))):
        profile = Profile(policy=policy, heads=CORE, tokens=("square",), options=("padding",), causal=True)
        for sizes in CHUNKS:
            for choice in ({"tokens": "square"}, {"tokens": "square", "padding": "drawn"}):
                seq = sum(sizes)
                whole = draw(profile, choice, seed=0, spread=4.0, sizes={"seq_q": seq, "seq_k": seq})
                yield from stream(whole, sizes, reorder=len(sizes) - 1 if len(sizes) > 1 else None).calls


@pytest.fixture(scope="module")
def everything():
    found = [problem for profile in PROFILES.values() for problem in problems(profile)] + [*streams(), long_problem()]
    return [(problem, problem.run()) for problem in found]


def alters(fault, problem, right):
    wrong = run(problem, fault)
    if wrong is None:
        return False
    if wrong.y.shape != right.y.shape or not np.allclose(wrong.y, right.y, rtol=0, atol=1e-9, equal_nan=True):
        return True
    if "return_weights" not in problem.options or wrong.weights is None:
        return False
    return wrong.weights.shape != right.weights.shape or not np.allclose(wrong.weights, right.weights, rtol=0, atol=1e-9, equal_nan=True)


# A key bias adds the same to all scores of a query; two rules rarely meet in so few problems; not every width has these divisors.
RARELY_SEEN = ("b_k is left out", "is ignored where", "the width is cut into")


def test_every_fault_alters_the_answer_to_some_problem(everything):
    dead = [
        f"{fault.kind}: {fault.says}"
        for fault in CATALOGUE
        if fault.rank < LAST
        and not any(words in fault.says for words in RARELY_SEEN)
        and not any(alters(fault, problem, right) for problem, right in everything)
    ]
    assert not dead, "\n".join(dead)


ABOUT_OPTIONS = (
    "mask_",
    "window_off_by_one",
    "causal_alignment",
    "causal_geometry",
    "softcap",
    "dropout_",
    "ragged_packing",
    "cache_",
    "rope_",
)


def test_faults_of_options_spare_a_problem_without_them():
    problem = draw(PROFILES["attention"], {"tokens": "square"}, seed=0)
    right = problem.run()
    spoiling = [
        f"{fault.kind}: {fault.says}"
        for fault in CATALOGUE
        if fault.kind.startswith(ABOUT_OPTIONS) and "samples behind the first" not in fault.says and alters(fault, problem, right)
    ]
    assert not spoiling, "\n".join(spoiling)


# On masks of 0 and minus infinity the first of these is a bias left out, and a rule ignored where another is given is that rule ignored.
SAME_AS_ANOTHER = {"mask_type_confusion", "mask_combination"}
FIRST = {}
for one in sorted(CATALOGUE, key=lambda fault: fault.rank):
    FIRST.setdefault(one.kind, one)


@pytest.mark.parametrize("kind", FIRST)
def test_the_first_fault_of_each_kind_is_named_when_it_is_put_in(kind, everything):
    fault = FIRST[kind]
    shown = [problem for problem, right in everything if alters(fault, problem, right)][:12]
    spared = [problem for problem, right in everything if not alters(fault, problem, right)][:12]
    verdicts = [judge(question := ask(problem), run(problem, fault) or question.expected) for problem in [*shown, *spared]]
    found, _ = diagnose(verdicts, seconds=1.0)
    assert any(one.kind == kind for diagnosis in found for one in diagnosis.faults) or kind in SAME_AS_ANOTHER, found[0].sentence


SIZES = {"batch": 2, "h": 6, "h_kv": 3, "seq_q": 5, "seq_k": 7, "d_k": 10, "d_v": 13, "d_model": 97}


def said(name):
    """The number that the name of a factor says."""
    formula, _, padding = name.partition(":")[0].partition(" of d_k padded to a ")
    if padding:
        serves = {"power of two": lambda n: n & (n - 1) == 0}.get(padding, lambda n: n % int(padding.split()[-1]) == 0)
        return next(n for n in range(SIZES["d_k"], 200) if serves(n)) ** -0.5
    formula = formula.replace("ln 2", "log(2)").replace("log2(e)", "1 / log(2)")
    return eval(formula, {"sqrt": math.sqrt, "log": math.log}, SIZES)


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_is_the_number_that_its_name_says(name):
    _, factor = FACTORS[name]
    assert factor(SIZES) == pytest.approx(said(name), rel=1e-14)


def test_a_decoder_that_miscounts_positions_is_put_where_it_says():
    assert {text: offsets((3, 1, 2, 1)) for text, offsets in _OFFSETS} == {
        "positions count from 0 in every call": [0, 0, 0, 0],
        "positions count calls, not tokens": [0, 1, 2, 3],
        "the position of a call is the length of the prompt, ever after": [0, 3, 3, 3],
        "positions grow by the length of the prompt with each call": [0, 3, 6, 9],
        "positions jump by the length of the prompt after the first call behind it": [0, 3, 6, 8],
        "positions are one too high behind the first call": [0, 4, 5, 7],
        "positions are one too low behind the first call": [0, 2, 3, 5],
        "positions count the tokens before twice": [0, 6, 8, 12],
        "positions count the new tokens too": [3, 4, 6, 7],
        "positions count the new tokens too, behind the first call": [0, 4, 6, 7],
    }


def test_a_wrong_distance_is_the_one_that_it_says():
    queries, keys = np.array([[4, 6]])[:, None, :, None], np.array([[3, 5, 9]])[:, None, None, :]
    assert {text: np.broadcast_to(distance(queries, keys), (1, 1, 2, 3))[0, 0].tolist() for text, distance in _DISTANCES} == {
        "the bias falls with the position of the key, not with its distance": [[3, 5, 9], [3, 5, 9]],
        "the bias grows with the position of the key": [[-3, -5, -9], [-3, -5, -9]],
        "the distance has a sign: keys behind the query are raised": [[1, -1, -5], [3, 1, -3]],
        "the distance has a sign: keys before the query are raised": [[-1, 1, 5], [-3, -1, 3]],
        "the distance counts from the first query, whatever its position": [[3, 5, 9], [1, 3, 7]],
        "the distance counts from the last query at the last key": [[4, 2, 2], [6, 4, 0]],
        "the distance is off by one": [[0, 2, 6], [2, 0, 4]],
        "the distance is off by one, the other way": [[2, 0, 4], [4, 2, 2]],
    }


def test_wrong_slopes_are_those_that_it_says():
    right = np.array(alibi_slopes(4))  # 1/4, 1/16, 1/64, 1/256
    assert {text: slopes(right).tolist() for text, slopes in _SLOPES} == {
        "the bias that falls with the distance is left out": [0, 0, 0, 0],
        "the bias grows with the distance": [-1 / 4, -1 / 16, -1 / 64, -1 / 256],
        "the slopes are one step too steep: the first is 1": [1, 1 / 4, 1 / 16, 1 / 64],
        "the slopes are one step too flat": [1 / 16, 1 / 64, 1 / 256, 1 / 1024],
        "the slopes stand in reverse order": [1 / 256, 1 / 64, 1 / 16, 1 / 4],
        "the slopes are off by one head": [1 / 256, 1 / 4, 1 / 16, 1 / 64],
        "the slopes are off by one head, the other way": [1 / 16, 1 / 64, 1 / 256, 1 / 4],
        "all heads have the slope of the first": [1 / 4, 1 / 4, 1 / 4, 1 / 4],
        "the slopes are 2^(-8 i / h), for every h": [1 / 4, 1 / 16, 1 / 64, 1 / 256],
        "the slopes are 2^(-8 i / h) counted from 0, for every h": [1, 1 / 4, 1 / 16, 1 / 64],
    }


@pytest.mark.parametrize("options", [{}, {"width": 4}, {"pairing": "interleaved"}, {"pairing": "interleaved", "width": 6, "base": 50.0}])
def test_what_turns_without_a_slip_turns_as_specified(options):
    tokens, positions = np.random.default_rng(0).normal(size=(2, 3, 5, 8)), np.arange(3, 8)[None]
    np.testing.assert_allclose(_turned(tokens, positions, options), rotate(tokens, positions, **options), rtol=1e-12)


def test_pairs_of_the_whole_width_are_as_specified_where_all_channels_turn():
    tokens, positions = np.random.default_rng(0).normal(size=(2, 3, 5, 8)), np.arange(3, 8)[None]
    np.testing.assert_allclose(_turned(tokens, positions, {}, far=True), rotate(tokens, positions), rtol=1e-12)


def test_a_softmax_that_is_not_rescaled_takes_each_part_by_the_peak_so_far():
    shares = np.exp([0.0, 0.0, -0.5])
    np.testing.assert_allclose(_unrescaled(1)(None, np.array([[-2.0, -1.0, -1.5]])), [shares / shares.sum()], rtol=1e-14)


@pytest.mark.parametrize(("family", "number"), [*zip(_FITS, (0.37, -7.5, -2.5, 0.02, 0.03), strict=True)])
def test_a_number_that_nobody_named_is_found(family, number):
    problem = draw(PROFILES["attention"], {"tokens": "wide", "keep": "shared by the heads"}, seed=0)
    fault = family.make(number, problem)
    assert fault.says in [found.says for found in fits(ask(problem), run(problem, fault))]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (3, 1, 1, 2)])
@pytest.mark.parametrize("option", ["keep", "bias", "padding"])
@pytest.mark.parametrize("policy", [Policy(), TURNED], ids=["still", "turned"])
def test_calls_with_a_cache_are_the_rows_of_one_call(sizes, option, policy):
    profile = Profile(policy=policy, heads=CORE, tokens=("square",), options=(option,), causal=True)
    for word in profile.draws.get(option, OPTIONS[option].draws):
        whole = draw(profile, {"tokens": "square", option: word}, seed=0, sizes={"seq_q": sum(sizes), "seq_k": sum(sizes)})
        rows = np.concatenate([call.run().y for call in stream(whole, sizes).calls], axis=2)
        np.testing.assert_allclose(rows, whole.run().y, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "holds"),
    [("wide", "fewer differ more-than-one"), ("square", "as-many more-than-one"), ("tall", "more differ more-than-one"),
     ("one query", "fewer differ one"), ("self", "as-many more-than-one same")],
)  # fmt: skip
def test_what_problems_have_in_common_is_true_of_them(tokens, holds):
    words = {
        "where there are as many queries as keys": "as-many", "where there are fewer queries than keys": "fewer",
        "where there are more queries than keys": "more", "where the numbers of queries and keys differ": "differ",
        "where there is more than one query": "more-than-one", "where there is one query": "one",
        "where queries, keys and values are the same": "same", "where a cache holds tokens": "past",
        "where a query may attend to no key": "empty",
    }  # fmt: skip
    problem = draw(Profile(template=Parameters.random(EVEN), tokens=(tokens,)), {"tokens": tokens}, seed=0)
    assert {words[text] for text, test in _PLACES.items() if test(problem)} == set(holds.split())


def test_of_the_past_the_first_tokens_alone_stay():
    """Those of the first call, however many each of the others brought; the new ones follow."""
    tokens, problem = np.arange(7.0)[None, None, :, None], SimpleNamespace(history=(2, 3, 1), past=6)
    assert caches._first_only(tokens, problem).ravel().tolist() == [0, 1, 6]
