"""A user's mistake: a code, a place, what was expected, and where possible the way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from moec.grammar.source import Span


class Severity(StrEnum):
    """How bad it is: an error stops the compilation, a warning does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A second place that a diagnostic points at, with a word on why."""

    span: Span
    message: str


@dataclass(frozen=True, slots=True)
class Edit:
    """`text` in the place of `span`: what a machine may do about a mistake without asking."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One thing wrong with what the user wrote.

    `code` is stable (`MOE0311`); `title` says the rule that was broken, `message` stands under the primary span
    and says what about this value breaks it; `help` names a way out; `fix` goes it, where there is only one.
    """

    code: str
    title: str
    span: Span | None
    message: str = ""
    labels: tuple[Label, ...] = ()
    help: str = ""
    severity: Severity = Severity.ERROR
    fix: tuple[Edit, ...] = ()


class DiagnosticError(Exception):
    """Raised when a user's mistake ends the work; carries every diagnostic found."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(_line(d) for d in self.diagnostics))


class InternalError(Exception):
    """A mistake of moec's own. The command line asks for a report and exits with 3."""


def _line(diagnostic: Diagnostic) -> str:
    place = f"{diagnostic.span}: " if diagnostic.span else ""
    text = f"{place}{diagnostic.severity}[{diagnostic.code}]: {diagnostic.title}"
    return f"{text}: {diagnostic.message}" if diagnostic.message else text
