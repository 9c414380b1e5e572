"""Diagnostics of a user's mistakes: code, place, message and, where possible, a fix."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from moec.grammar.diagnostics.visible import printable
from moec.grammar.source import Span


class Severity(StrEnum):
    """An error stops the compilation, a warning does not."""

    ERROR = "error"
    WARNING = "warning"


class Label(NamedTuple):
    """A further place that a diagnostic points at, with the reason."""

    span: Span
    message: str


def labels_at(*places: tuple[Span | None, str]) -> list[Label]:
    """A label for each of `places`, with its message, that the file has."""
    return [Label(span=span, message=message) for span, message in places if span]


class Edit(NamedTuple):
    """Replaces `span` by `text`: a fix that a tool may apply without asking."""

    span: Span
    text: str


class Diagnostic(NamedTuple):
    """One thing wrong with what the user wrote.

    `code` is stable (`MOE0311`); `title` names the broken rule; `message`, under the primary span, says how this value
    breaks the rule; `help` suggests a correction; `fix` has the edits, where there is only one correction.
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
    """Raised when a user's mistake stops moec; carries every diagnostic found.

    Its text has a line for each diagnostic, and one for its help: it is what `print(error)` and a log show.
    """

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(_lines(d) for d in self.diagnostics))

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.__dict__)


def _again(cls: type[DiagnosticError], state: dict[str, Any]) -> DiagnosticError:
    """An error as it was raised in another process; subclasses are made of other arguments."""
    error = cls.__new__(cls)
    DiagnosticError.__init__(error, state["diagnostics"])
    error.__dict__.update(state)
    return error


class InternalError(Exception):
    """A bug in moec. The command line asks for a report and exits with 3."""


def _lines(diagnostic: Diagnostic) -> str:
    place = f"{place_of(diagnostic.span, column=False)}: " if diagnostic.span else ""
    text = f"{place}{diagnostic.severity}[{diagnostic.code}]: {diagnostic.title}"
    text = f"{text}: {printable(diagnostic.message)}" if diagnostic.message else text
    return f"{text}\nhelp: {printable(diagnostic.help)}" if diagnostic.help else text


def place_of(span: Span, *, column: bool = True) -> str:
    """`mixtral.moe:31:8`; the name alone of a source without text, such as a missing file: it has no lines."""
    name = printable(span.source.name)
    if not span.source.text:
        return name
    return f"{name}:{span.line}:{span.column}" if column else f"{name}:{span.line}"
