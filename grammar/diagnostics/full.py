"""Renders diagnostics for people: source lines with marks under them, as in rustc."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from unicodedata import category, east_asian_width

from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity
from moec.grammar.source import Source, Span

WIDEST = 160
"""Columns shown of a source line; of a longer line, the columns around the mark."""

_RED, _YELLOW, _BLUE, _CYAN, _BOLD, _PLAIN = (
    "\x1b[1;31m",
    "\x1b[1;33m",
    "\x1b[1;34m",
    "\x1b[1;36m",
    "\x1b[1m",
    "\x1b[0m",
)


_Painter = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class _Mark:
    """A mark and message under a part of one line."""

    span: Span
    message: str
    primary: bool


def full(diagnostic: Diagnostic, color: bool = False) -> str:
    """`diagnostic` with the source lines that it points at, ending in a newline."""
    paint = _paint if color else _leave
    loud = _RED if diagnostic.severity is Severity.ERROR else _YELLOW
    title = paint(f"{diagnostic.severity}[{diagnostic.code}]", loud) + paint(f": {diagnostic.title}", _BOLD)
    lines = [title]
    if diagnostic.span is None and diagnostic.message:
        lines.append(f"  {diagnostic.message}")
    marks = [_Mark(label.span, label.message, primary=False) for label in diagnostic.labels]
    if diagnostic.span:
        marks.insert(0, _Mark(diagnostic.span, diagnostic.message, primary=True))
    margin = max((len(str(mark.span.line)) for mark in marks), default=1)
    for number, source in enumerate(dict.fromkeys(mark.span.source.name for mark in marks)):
        here = [mark for mark in marks if mark.span.source.name == source]
        place = f"{source}:{here[0].span.line}:{here[0].span.column}"
        lines.append(f"{' ' * margin}{paint('-->' if number == 0 else ':::', _BLUE)} {place}")
        lines += _snippet(here, margin, loud, paint)
    if diagnostic.help:
        lines.append(f"{paint('help', _CYAN)}: {diagnostic.help}")
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _snippet(marks: list[_Mark], margin: int, loud: str, paint: _Painter) -> Iterable[str]:
    """The lines of one file, in order, each followed by its marks."""
    source = marks[0].span.source
    if not source.text:
        if marks[0].message:
            yield f"{' ' * margin} {paint('=', _BLUE)} {marks[0].message}"
        return
    bar = paint("|", _BLUE)
    yield f"{' ' * margin} {bar}"
    previous = 0
    for line in sorted({mark.span.line for mark in marks}):
        if previous and line > previous + 1:
            yield f"{' ' * margin}{paint('⋮', _BLUE)}"
        previous = line
        here = sorted((mark for mark in marks if mark.span.line == line), key=lambda mark: -mark.span.column)
        shown = _Line(source, line, min(mark.span.column for mark in here))
        yield f"{paint(str(line).rjust(margin), _BLUE)} {bar} {shown.text}"
        for mark in here:
            start, length = shown.extent(mark.span)
            sign = paint(("^" if mark.primary else "-") * length + f" {mark.message}", loud if mark.primary else _BLUE)
            yield f"{' ' * margin} {bar} {' ' * start}{sign}"
    yield f"{' ' * margin} {bar}"


class _Line:
    """One source line for a terminal, without control characters, so that its width is known."""

    def __init__(self, source: Source, number: int, column: int) -> None:
        text = source.line(number)
        self.first = source.line_starts[number - 1]
        self.skipped = max(0, column - 1 - WIDEST // 2) if len(text) > WIDEST else 0
        cut = text[self.skipped : self.skipped + WIDEST]
        self.before = "…" if self.skipped else ""
        self.pieces = [_shown(character) for character in cut]
        self.text = self.before + "".join(self.pieces) + ("…" if len(text) > self.skipped + WIDEST else "")

    def extent(self, span: Span) -> tuple[int, int]:
        """The first screen column of `span`, and its number of columns in this line (at least one)."""
        start = min(max(span.start - self.first - self.skipped, 0), len(self.pieces))
        end = min(max(span.end - self.first - self.skipped, start), len(self.pieces))
        begins = len(self.before) + _width("".join(self.pieces[:start]))
        return begins, max(1, _width("".join(self.pieces[start:end])))


def _shown(character: str) -> str:
    if character == "\t":
        return "    "
    return "\N{REPLACEMENT CHARACTER}" if category(character)[0] == "C" else character


def _width(text: str) -> int:
    return sum(2 if east_asian_width(c) in "WF" else 0 if category(c) in ("Mn", "Me") else 1 for c in text)


def _paint(text: str, style: str) -> str:
    return f"{style}{text}{_PLAIN}"


def _leave(text: str, style: str) -> str:
    return text
