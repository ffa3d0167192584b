"""The oracle against what it was made for: faults that were reported in public, right code that looks wrong, and other projects."""

import sys
from pathlib import Path

import pytest

from attnspec import oracle

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from corpus import cases  # noqa: E402
from packages import negatives  # noqa: E402

CASES = {f"{case.fault} {case.name}": case for case in cases()}
NEGATIVES = {entry.name: entry for entry in negatives.ENTRIES}

# Found, but under another name: what is seen is the same (O-094 shows only where weights are returned, O-118 is a shift by one sample).
OTHER_NAMES = {"O-094", "O-118"}


def peers():
    """The entries of other projects; they import them, so only where the peers are asked for."""
    pytest.importorskip("flax")
    from packages import peers as found

    return {entry.name: entry for entry in found.ENTRIES}


def test_every_kind_of_fault_has_a_case():
    from attnspec.oracle.faults import KINDS

    assert {case.kind for case in CASES.values()} == set(KINDS)
    assert len(CASES) == 123


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_found_and_named_and_its_right_twin_conforms(name):
    case = CASES[name]
    entry = getattr(oracle, case.entry)
    report = entry(case.right(), **case.settings)
    assert report.conforms is True, str(report)
    report = entry(case.wrong(), **case.settings)
    assert report.conforms is False, str(report)
    assert report.kind == case.kind or case.fault in OTHER_NAMES, str(report)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NEGATIVES)
def test_what_only_looks_wrong_conforms(name):
    entry = NEGATIVES[name]
    report = getattr(oracle, entry.entry)(entry.build(), **entry.settings)
    assert report.conforms is True, str(report)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_other_projects_are_judged_as_they_are_known():
    """One test, since the entries can be listed only where all projects are installed."""
    wrong = []
    for name, entry in peers().items():
        report = getattr(oracle, entry.entry)(entry.build(), **{"effort": "quick", **entry.settings})
        if report.conforms is not (entry.wrong is None):
            wrong.append(f"{name}: {report.sentence}")
    assert not wrong, "\n".join(wrong)


def test_every_fault_of_the_catalogue_is_of_a_kind_that_is_explained():
    from attnspec.oracle.faults import KINDS, OTHER
    from attnspec.oracle.faults.catalogue import CATALOGUE

    assert {fault.kind for fault in CATALOGUE} <= KINDS.keys() | OTHER.keys()
    assert len({(fault.kind, fault.says, fault.rank) for fault in CATALOGUE}) > 900
