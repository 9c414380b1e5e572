"""Sources and spans: places in a `.moe` file."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple


class Source:
    """One file's text under the name that diagnostics and plans show.

    `name` is relative (to the main file's folder, or `library:clusters/dgx_h100.moe`), never a path of this
    machine, so that two compilations of one file give identical bytes.
    """

    __slots__ = ("line_starts", "name", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.line_starts = (0, *(i + 1 for i, c in enumerate(text) if c == "\n"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and (self.name, self.text) == (other.name, other.text)

    def __hash__(self) -> int:
        return hash((self.name, self.text))

    def __repr__(self) -> str:
        return f"Source({self.name!r}, {self.text!r})"

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column, both from 1, of a character offset."""
        line = bisect_right(self.line_starts, offset)
        return line, offset - self.line_starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of line `number` (from 1), without its newline."""
        start = self.line_starts[number - 1]
        end = self.text.find("\n", start)
        return self.text[start : end if end >= 0 else len(self.text)].rstrip("\r")


class Span(NamedTuple):
    """Characters `start` to `end` (exclusive) of a source."""

    source: Source
    start: int
    end: int

    def __repr__(self) -> str:  # without the source's text
        return f"Span({self.source.name}, {self.start}, {self.end})"

    @property
    def line(self) -> int:
        """Line of the first character, from 1."""
        return self.source.position(self.start)[0]

    @property
    def column(self) -> int:
        """Column of the first character, from 1."""
        return self.source.position(self.start)[1]

    def __str__(self) -> str:
        """`mixtral.moe:17`, as plans and error messages quote it."""
        return f"{self.source.name}:{self.line}"

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of `other`, which is in the same source."""
        return Span(self.source, self.start, max(self.end, other.end))
