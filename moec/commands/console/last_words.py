"""The end of one rank's stderr: a traceback, a diagnostic, or other text.

Python ends with status 1 after an uncaught exception. A script that prints the traceback of a caught exception goes on,
and most often writes more. So a traceback counts as the cause of a rank's end only if no text follows it, or if torch
has marked its lines, because torch marks uncaught exceptions only.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from enum import Enum, auto

ANSI = re.compile(r"\x1b\[[0-9;]*m")
_COLOR = r"(?:\x1b\[[0-9;]*m)*"
MARK = re.compile(r"\[rank\d+\]: ")
"""torch puts this before each line of an uncaught exception, in a process with a process group."""
BEGINNING = re.compile(
    rf"(?:{MARK.pattern})?{_COLOR}(?:  \+ Exception Group )?"
    r"(?:Traceback \(most recent call last\):|error\[MOE0705\]: a rank has died or stalled)"
    rf"{_COLOR}\s*$"
)
"""The first line of a traceback or a verdict, also behind unfinished text on the same line."""
_TRACEBACK = re.compile(r"(?:  \+ Exception Group )?Traceback \(most recent call last\):")
_VERDICT = "error[MOE0705]"
_DIAGNOSTIC = re.compile(r"error\[MOE\d{4}\]")
_PART_OF_DIAGNOSTIC = re.compile(r"\s|\d+ \||help: |note: |error\[|warning\[|rank \d+:")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_TORCH_LOG = re.compile(r"\[rank\d+\]:\[[A-Z]|\[[A-Z]\d{4} ")
"""A line of torch's C++ log, such as the warning at exit that a process group was not destroyed."""
TORCH_ERROR = re.compile(r"(?:\[rank\d+\]:)?\[E\d{4} ")
"""A line of that log of level "error", such as that a rank which has ended cannot be reached."""
LONGEST = 200
"""Characters of a last line that a message shows."""


def plain_text(line: str) -> str:
    """`line` without colours and blanks around it."""
    return ANSI.sub("", line).strip()


class Kind(Enum):
    """The kind of the newest block of lines."""

    TEXT = auto()
    TRACEBACK = auto()
    DIAGNOSTIC = auto()
    VERDICT = auto()
    """MOE0705. Its rank is about to end, and other ranks write the same, or an error that it causes."""


@dataclass(slots=True)
class LastWords:
    """The newest traceback or diagnostic of a rank, and whether other text follows it."""

    kind: Kind = Kind.TEXT
    lines: list[str] = field(default_factory=list)
    """The lines of the newest traceback; of another block its first line."""
    since: float = 0.0
    newest: float = 0.0
    """The time of the newest line."""
    line: str = ""
    """The newest line with text, without colours."""
    is_marked: bool = False
    is_followed: bool = False
    _has_message: bool = False
    """Whether the traceback has its line with the exception."""
    _was_bar: bool = False

    @property
    def raises(self) -> bool:
        """Whether the rank's text ends with a traceback, or has one that torch has marked as uncaught."""
        return self.kind is Kind.TRACEBACK and (self.is_marked or not self.is_followed)

    @property
    def diagnoses(self) -> bool:
        """Whether the rank's text ends with a diagnostic."""
        return self.kind in (Kind.DIAGNOSTIC, Kind.VERDICT) and not self.is_followed

    def add(self, line: str, *, is_marked: bool) -> bool:
        """Takes a line; returns whether a new traceback or verdict begins with it."""
        plain = ANSI.sub("", line)
        is_bar = self._was_bar or line.endswith("\r")
        self._was_bar = line.endswith("\r")
        self.newest = time.monotonic()
        previous, text = self.line, plain.strip()
        if text and not _TORCH_LOG.match(plain):
            self.line = text
        if plain.startswith(_VERDICT):
            self._begin(Kind.VERDICT, line, is_marked)
            return True
        if _TRACEBACK.match(plain) and self.kind is not Kind.VERDICT:
            if self.kind is not Kind.TRACEBACK or previous not in _CHAINED:
                self._begin(Kind.TRACEBACK, line, is_marked)
                return True
            self.lines.append(line)
            self._has_message = False
        elif _DIAGNOSTIC.search(plain) and self.kind is not Kind.VERDICT:
            self._begin(Kind.DIAGNOSTIC, line, is_marked)
        elif not is_bar and not _TORCH_LOG.match(plain):
            self._go_on(line, plain, is_marked=is_marked)
        return False

    def _begin(self, kind: Kind, line: str, is_marked: bool) -> None:
        self.kind, self.lines, self.since = kind, [line], time.monotonic()
        self.is_marked, self.is_followed, self._has_message = is_marked, False, False

    def _go_on(self, line: str, plain: str, *, is_marked: bool) -> None:
        """Decides whether a line belongs to the newest block. Messages of several lines are indented, or marked."""
        text = plain.strip()
        if self.kind is Kind.TRACEBACK:
            is_inside = not text or plain[0].isspace() or text in _CHAINED or (is_marked and self.is_marked)
            is_message = not is_inside and not self._has_message
            self._has_message |= is_message
            is_part = is_inside or is_message
            if is_part and not self.is_followed:
                self.lines.append(line)
        else:
            is_part = not text or _PART_OF_DIAGNOSTIC.match(plain) is not None
        self.is_followed |= not is_part

    @property
    def message(self) -> str:
        """The last line of the traceback that has text."""
        return next((line.strip() for line in reversed(self.lines) if line.strip()), "")

    @property
    def shown_line(self) -> str:
        """`line` for a message: not too long, and characters that do not print as escapes."""
        cut = self.line if len(self.line) <= LONGEST else self.line[:LONGEST] + "…"
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)
