"""The lines of a Program's text, one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moec.passes.ir.ir_error import IrError, UnreadableLineError, quoted
from moec.passes.ir.limits import MAX_LINE, MAX_TEXT

_STRANGE = re.compile(r"[^\n\x20-\x7e]")


class Lines:
    """Reads a text line by line. `number` is the number, from 1, of the line taken last.

    Raises `IrError` at once for a text that is too long or holds anything but printable ASCII.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_TEXT:
            raise IrError(1, f"the text has more than {MAX_TEXT:_} characters")
        if (strange := _STRANGE.search(text)) is not None:
            line = text.count("\n", 0, strange.start()) + 1
            raise IrError(line, f"only printable ASCII may stand here, not {strange[0]!a}")
        self._text, self._start, self.number = text, 0, 0

    def take(self) -> str:
        """The next line, without its end. Raises `UnreadableLineError` where there is none."""
        if self._start >= len(self._text):
            raise UnreadableLineError("the text ends too early")
        self.number += 1
        end = self._text.find("\n", self._start)
        if end < 0:
            raise UnreadableLineError("the text ends within a line")
        if end - self._start > MAX_LINE:
            raise UnreadableLineError(f"a line has more than {MAX_LINE:_} characters")
        line, self._start = self._text[self._start : end], end + 1
        return line

    def take_match(self, pattern: re.Pattern[str], wanted: str) -> re.Match[str]:
        """The next line, which must match `pattern`."""
        line = self.take()
        match = pattern.fullmatch(line)
        if match is None:
            raise UnreadableLineError(f"{wanted} is wanted, not {quoted(line)}")
        return match

    def take_exactly(self, wanted: str) -> None:
        """Takes the next line, which must be `wanted`."""
        line = self.take()
        if line != wanted:
            raise UnreadableLineError(f"{wanted.strip()!r} is wanted, not {quoted(line)}")

    def next_starts_with(self, prefix: str) -> bool:
        """Whether the next line starts with `prefix`."""
        return self._text.startswith(prefix, self._start)

    def end(self) -> None:
        """Requires that no line is left."""
        if self._start < len(self._text):
            self.number += 1
            raise UnreadableLineError("the text goes on after its closing brace")

    def require_same(self, printed: Iterable[str]) -> None:
        """Requires that the whole text equals the lines `printed`."""
        self._start = self.number = 0
        for line in printed:
            line_read = self.take()
            if line_read != line:
                raise UnreadableLineError(
                    f"{quoted(line_read.strip())} is not as `print_program` prints it, {quoted(line.strip())}"
                )
        self.end()
