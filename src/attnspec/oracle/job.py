"""A job: an examination, said in such a way that another process can do it."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ..errors import ConfigError
from .examination import Progress
from .report import Report
from .snippet import completed
from .written import arguments_of, function_of, target_of

Entry = Literal["check", "check_attention", "check_properties", "check_cache"]


@dataclass(frozen=True)
class Job:
    """An examination of an implementation that can be imported.

    Attributes:
        target: the implementation, as `module:attribute`.
        entry: which function examines it; None for `check_attention` where it is a function that is taken as it is, else `check`.
        arguments: what the attribute is called with, as text; None to call a class with nothing and take anything else as it is.
        call: how to call it, as an expression in `m`; None where it is called as it is.
        settings: what else the entry is told.
    """

    target: str
    entry: Entry | None = None
    arguments: str | None = None
    call: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """Import the attribute, and call it where that is asked for.

        Raises:
            ConfigError: it cannot be imported, or not be called with these arguments.
        """
        found = target_of(self.target)
        if self.arguments is None and (self.entry == "check_cache" or not inspect.isclass(found)):
            return found
        positional, named = arguments_of(self.arguments or "")
        if self.entry == "check_cache":
            return partial(found, *positional, **named)
        try:
            return found(*positional, **named)
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"check: {self.target} cannot be called with ({self.arguments or ''}): {text}. Say with what, by --args."
            ) from error

    def examine(self, made: Any, /, progress: Progress | None = None) -> Report:
        """Examine what was made.

        Args:
            made: the implementation.
            progress: is told what is being done, how much of it is done, and how much there is.

        Returns:
            The report.

        Raises:
            ConfigError: it is said wrongly how to call it, or what its tensors hold.
        """
        from . import entries

        name = self.entry or ("check_attention" if inspect.isroutine(made) and self.arguments is None else "check")
        entry = getattr(entries, name)
        settings = dict(self.settings) | ({} if self.call is None else {"call": function_of(self.call)})
        if strange := [word for word in settings if word not in inspect.signature(entry).parameters]:
            raise ConfigError(f"{name}: it takes no {strange[0]}.")
        report: Report = entry(made, progress=progress, **settings)
        if name == "check_cache" or report.counterexample is None:
            return report
        arguments = self.arguments if self.arguments is not None or made is target_of(self.target) else ""
        code = completed(report.counterexample.snippet, report.subject, self.target, arguments, self.call)
        return replace(report, counterexample=replace(report.counterexample, snippet=code))
