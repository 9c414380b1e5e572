"""Renders diagnostics for people: source lines with marks under them, as in rustc."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple
from unicodedata import category, east_asian_width

from moec.grammar.diagnostics.diagnostic import Diagnostic, Severity, place_of
from moec.grammar.diagnostics.visible import printable
from moec.grammar.source import Source, Span

WIDEST = 160
"""Columns shown of a source line where no width is given; of a longer line, the columns around the mark."""

NARROWEST, BROADEST = 40, 200
"""The least and most columns that a rendering is fitted to."""

_LEAST_BESIDE = 24
"""The columns that a message needs behind its mark; with fewer it stands under the mark."""

_RED, _YELLOW, _BLUE, _CYAN, _BOLD, _PLAIN = (
    "\x1b[1;31m",
    "\x1b[1;33m",
    "\x1b[1;34m",
    "\x1b[1;36m",
    "\x1b[1m",
    "\x1b[0m",
)


_HELP = "help: "
_Painter = Callable[[str, str], str]


class _Mark(NamedTuple):
    """A mark and message under a part of one line."""

    span: Span
    message: str
    primary: bool


def full(diagnostic: Diagnostic, color: bool = False, width: int | None = None) -> str:
    """`diagnostic` with the source lines that it points at, ending in a newline.

    With a `width`, from 40 to 200 columns, source lines are cut around their marks, and messages and help are wrapped.
    """
    width = None if width is None else min(max(width, NARROWEST), BROADEST)
    paint = _paint if color else _leave
    loud = _RED if diagnostic.severity is Severity.ERROR else _YELLOW
    title = paint(f"{diagnostic.severity}[{diagnostic.code}]", loud) + paint(f": {diagnostic.title}", _BOLD)
    lines = [title]
    if diagnostic.span is None and diagnostic.message:
        lines += [f"  {part}" for part in _wrapped(printable(diagnostic.message), width and width - 2)]
    marks = [_Mark(label.span, printable(label.message), primary=False) for label in diagnostic.labels]
    if diagnostic.span:
        marks.insert(0, _Mark(diagnostic.span, printable(diagnostic.message), primary=True))
    margin = max((len(str(mark.span.line)) for mark in marks), default=1)
    for number, source in enumerate(dict.fromkeys(mark.span.source.name for mark in marks)):
        here = [mark for mark in marks if mark.span.source.name == source]
        arrow = paint("-->" if number == 0 else ":::", _BLUE)
        lines.append(f"{' ' * margin}{arrow} {place_of(here[0].span)}")
        lines += _snippet(here, margin, loud, paint, width)
    if diagnostic.help:
        first, *rest = _wrapped(printable(diagnostic.help), width and width - len(_HELP))
        lines += [f"{paint('help', _CYAN)}: {first}", *(f"{' ' * len(_HELP)}{part}" for part in rest)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _wrapped(text: str, width: int | None) -> list[str]:
    """`text` in lines of at most `width` columns; as it is without one."""
    if width is None or _width(text) <= width:
        return [text]
    from textwrap import wrap  # good files do without it

    return [line for part in text.splitlines() for line in wrap(part, width, break_on_hyphens=False)] or [text]


def _snippet(marks: list[_Mark], margin: int, loud: str, paint: _Painter, width: int | None) -> Iterable[str]:
    """The lines of one file, in order, each followed by its marks."""
    source = marks[0].span.source
    if not source.text:
        for at, part in enumerate(_wrapped(marks[0].message, width and width - margin - 3) if marks[0].message else ()):
            yield f"{' ' * margin} {paint(' ' if at else '=', _BLUE)} {part}"
        return
    bar = paint("|", _BLUE)
    yield f"{' ' * margin} {bar}"
    previous = 0
    for line in sorted({mark.span.line for mark in marks}):
        if previous and line > previous + 1:
            yield f"{' ' * margin}{paint('⋮', _BLUE)}"
        previous = line
        here = sorted((mark for mark in marks if mark.span.line == line), key=lambda mark: -mark.span.column)
        room = WIDEST if width is None else width - margin - 3
        while here:  # a mark beside the part that is shown gets a part of its own
            loudest = next((mark for mark in here if mark.primary), here[-1])
            shown = _Line(source, line, loudest.span, room)
            yield f"{paint(str(line).rjust(margin), _BLUE)} {bar} {shown.text}"
            beside = [mark for mark in here if mark is not loudest and not shown.has(mark.span)]
            for mark in here:
                if mark in beside:
                    continue
                start, length = shown.extent(mark.span)
                sign, style = ("^", loud) if mark.primary else ("-", _BLUE)
                for part in _marked(start, sign * length, mark.message, None if width is None else room):
                    yield f"{' ' * margin} {bar} {part[: len(part) - len(part.lstrip())]}{paint(part.lstrip(), style)}"
            here = beside
    yield f"{' ' * margin} {bar}"


def _marked(start: int, sign: str, message: str, room: int | None) -> list[str]:
    """The mark with its message behind it, or under it where too few columns are left."""
    beside = f"{' ' * start}{sign} {message}"
    if room is None or _width(beside) <= room or not message:
        return [beside]
    left = room - start - len(sign) - 1
    if left >= _LEAST_BESIDE:
        indent = start + len(sign) + 1
        first, *rest = _wrapped(message, left)
        return [f"{' ' * start}{sign} {first}", *(f"{' ' * indent}{part}" for part in rest)]
    indent = min(start, max(0, room - 2 * _LEAST_BESIDE))
    return [f"{' ' * start}{sign}", *(f"{' ' * indent}{part}" for part in _wrapped(message, room - indent))]


class _Line:
    """One source line for a terminal, without control characters, so that its width is known.

    Of a line wider than `room`, a part that has the start of `span`, with `…` where it was cut.
    """

    def __init__(self, source: Source, number: int, span: Span, room: int) -> None:
        text = source.line(number)
        self.first = source.line_starts[number - 1]
        at = min(max(span.start - self.first, 0), len(text))
        self.skipped = 0
        if len(text) > room or _width("".join(map(_shown, text))) > room:
            end = min(max(span.end - self.first, at + 1), len(text), at + room // 2)
            self.skipped = 0 if self._fits(text[:end], room - 1) else self._begin(text, at, room // 2)
        self.before = "…" if self.skipped else ""
        self.pieces: list[str] = []
        left = room - len(self.before)
        for index in range(self.skipped, len(text)):
            piece = _shown(text[index])
            left -= _width(piece)
            if left < (1 if index + 1 < len(text) else 0):
                break
            self.pieces.append(piece)
        self.is_cut = self.skipped + len(self.pieces) < len(text)
        self.text = self.before + "".join(self.pieces) + ("…" if self.is_cut else "")

    @staticmethod
    def _fits(text: str, room: int) -> bool:
        return len(text) <= room and _width("".join(map(_shown, text))) <= room

    @staticmethod
    def _begin(text: str, at: int, room: int) -> int:
        """The index from which the characters before `at` fill `room` columns."""
        while at > 0 and (room := room - _width(_shown(text[at - 1]))) >= 0:
            at -= 1
        return at

    def has(self, span: Span) -> bool:
        """Whether the start of `span` is shown."""
        start = span.start - self.first - self.skipped
        return start >= 0 and (not self.is_cut or start < len(self.pieces))

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
