"""A pytest plugin: every check of the oracle as a test of its own.

Mark a test with the implementation and what `attnspec.oracle.check` needs to know; the test runs once for the verdict
and once for each check, and its body may look at the check by the fixture `conforms`. The implementation is made and
examined when the first of these tests runs, not while tests are collected; what does not apply to it is skipped.
A mark that is given a function or class and nothing else marks that instead, as pytest has it; then say `entry="check"`:

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
_NOT_ASKED = "it does not apply to this implementation, or what comes before it is wrong already"


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    text = "attnspec(subject, *, entry='check', **settings): test an implementation, or what a function gives, check by check"
    config.addinivalue_line("markers", text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of the verdict and of each check that there may be."""
    mark = metafunc.definition.get_closest_marker(_MARK)
    if mark is None:
        return
    from .oracle.run import CHECKS

    entry = mark.kwargs.get("entry", "check")
    if len(mark.args) != 1 or entry not in CHECKS:
        raise pytest.UsageError(f"attnspec: the mark takes one implementation, and as entry one of {', '.join(CHECKS)}.")
    if _FIXTURE not in metafunc.fixturenames:
        metafunc.fixturenames.append(_FIXTURE)
    names = (_VERDICT, *CHECKS[entry])
    metafunc.parametrize(_FIXTURE, names, ids=names, indirect=True)


def _report(config: pytest.Config, mark: pytest.Mark) -> "Report":
    """Examine what a mark names; the same mark, as on a class, only once."""
    known = config.stash.setdefault(_REPORTS, {})
    if id(mark) not in known:
        from . import oracle
        from .errors import AttnspecError

        subject, settings = mark.args[0], dict(mark.kwargs)
        entry = settings.pop("entry", "check")
        is_recipe = entry in {"check", "check_properties"} and (inspect.isroutine(subject) or inspect.isclass(subject))
        try:
            report = getattr(oracle, entry)(subject() if is_recipe else subject, **settings)
        except AttnspecError as error:  # the mark says it wrongly, and the error says how
            pytest.fail(f"{type(error).__name__}: {error}", pytrace=False)
        known[id(mark)] = mark, report
    return known[id(mark)][1]


_REPORTS = pytest.StashKey[dict[int, "tuple[pytest.Mark, Report]"]]()


@pytest.fixture
def conforms(request: pytest.FixtureRequest) -> "Check":
    """Give the check that this test is about; it needs the mark `attnspec`."""
    mark, name = request.node.get_closest_marker(_MARK), getattr(request, "param", None)
    if mark is None or name is None:
        raise pytest.UsageError("attnspec: the fixture conforms needs the mark @pytest.mark.attnspec(implementation, ...).")
    return _check(_report(request.config, mark), name)


def _check(report: "Report", name: str) -> "Check":
    """Look up a check by its name; what was not asked is not decided."""
    from .oracle.report import Check

    checks = [Check(_VERDICT, report.verdict == "conforms", report.sentence), *report.checks]
    return next((check for check in checks if check.name == name), Check(name, None, _NOT_ASKED))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Fail a test whose check does not hold, and skip one that could not be decided, before its body runs."""
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        return
    report = _report(pyfuncitem.config, mark)
    check = _check(report, str(pyfuncitem.callspec.params[_FIXTURE]))
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
