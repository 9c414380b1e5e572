"""The line of a `.moe` file that an op serves."""

from __future__ import annotations

from dataclasses import dataclass

from moec.grammar.source import Span


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A file's name, as diagnostics show it, and a line number from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @classmethod
    def of(cls, span: Span | SourceLine | None) -> SourceLine | None:
        """The line on which `span` starts."""
        return cls(span.source.name, span.line) if isinstance(span, Span) else span
