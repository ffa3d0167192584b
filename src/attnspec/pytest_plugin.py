"""A pytest plugin: every check of the oracle as a test of its own.

Mark a test with the implementation and what `attnspec.oracle.check` needs to know; the test runs once for the verdict
and once for each check, and its body may look at the check by the fixture `conforms`:

    @pytest.mark.attnspec(lambda: MyAttention(24, 4), heads=Heads(d_model=24, h=4), layout="separate")
    def test_my_attention(conforms):
        pass
"""

import inspect
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .oracle.report import Check, Report

_MARK, _FIXTURE, _VERDICT = "attnspec", "conforms", "verdict"


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    text = "attnspec(subject, *, entry='check', **settings): test an implementation, or what a function gives, check by check"
    config.addinivalue_line("markers", text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the oracle once, and make a test of each check."""
    mark = metafunc.definition.get_closest_marker(_MARK)
    if mark is None:
        return
    report = _report(metafunc, mark)
    if _FIXTURE not in metafunc.fixturenames:
        metafunc.fixturenames.append(_FIXTURE)
    from .oracle.report import Check

    checks = [Check(_VERDICT, report.verdict == "conforms", report.sentence), *report.checks]
    metafunc.parametrize(_FIXTURE, [(report, check) for check in checks], ids=[check.name for check in checks], indirect=True)


def _report(metafunc: pytest.Metafunc, mark: pytest.Mark) -> "Report":
    """Examine what a mark names; the same mark, as on a class, only once."""
    known = metafunc.config.stash.setdefault(_REPORTS, {})
    if id(mark) not in known:
        from . import oracle

        subject, *rest = mark.args or (None,)
        entries = {name: getattr(oracle, name) for name in ("check", "check_attention", "check_properties", "check_cache")}
        settings = dict(mark.kwargs)
        entry = settings.pop("entry", "check")
        if subject is None or rest or entry not in entries:
            raise pytest.UsageError(f"attnspec: the mark takes one implementation, and as entry one of {', '.join(entries)}.")
        is_recipe = entry in {"check", "check_properties"} and (inspect.isroutine(subject) or inspect.isclass(subject))
        known[id(mark)] = mark, entries[entry](subject() if is_recipe else subject, **settings)
    return known[id(mark)][1]


_REPORTS = pytest.StashKey[dict[int, "tuple[pytest.Mark, Report]"]]()


@pytest.fixture
def conforms(request: pytest.FixtureRequest) -> "Check":
    """Give the check that this test is about; it needs the mark `attnspec`."""
    param: tuple[Report, Check] | None = getattr(request, "param", None)
    if param is None:
        raise pytest.UsageError("attnspec: the fixture conforms needs the mark @pytest.mark.attnspec(implementation, ...).")
    return param[1]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Fail a test whose check does not hold, and skip one that could not be decided, before its body runs."""
    if pyfuncitem.get_closest_marker(_MARK) is None:
        return
    param: tuple[Report, Check] = pyfuncitem.callspec.params[_FIXTURE]  # type: ignore[assignment]
    report, check = param
    from .oracle.show import standing

    ends = "not decided" if check.passed is None else standing(check)
    if ends == "not decided":
        pytest.skip(f"not decided: {check.detail or check.name}")
    if ends == "fails":
        pytest.fail(_message(report, check), pytrace=False)


def _message(report: "Report", check: "Check") -> str:
    """What a reader of the tests' output needs: the sentence and the code that shows it."""
    if check.name == _VERDICT:
        return str(report)
    detail = f" ({check.detail})" if check.detail else ""
    opening = f"{report.subject}: {check.name} does not hold{detail}."
    if check.sentence or report.counterexample is None:
        return f"{opening} {check.sentence or report.sentence}"
    return f"{opening} {report.sentence}\n\n{report.counterexample.snippet}"
