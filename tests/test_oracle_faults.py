"""The catalogue of faults: each one alters something, spares what it is not about, and is named when it is put in."""

import numpy as np
import pytest

from attnspec import Heads, Parameters, Policy, Rotation
from attnspec.oracle.decoder import CHUNKS, stream
from attnspec.oracle.design import Profile, choices, draw
from attnspec.oracle.diagnosis import LAST, diagnose
from attnspec.oracle.faults.catalogue import CATALOGUE
from attnspec.oracle.faults.fault import run
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
