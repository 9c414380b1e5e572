"""The text inside of a block of Markdown: `code`, **bold** and [links](…) as pieces that can be wrapped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

CODE, BOLD = "36", "1"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m|\x1b\]8;;[^\x1b]*\x1b\\")
SPAN = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<bold>.+?)\*\*|\[(?P<link>[^\]]+)\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one style without a space; `glued` to the piece before it, or after a space. `style` is an SGR code."""

    text: str
    style: str = ""
    glued: bool = False
    target: str = ""


def pieces(text: str, style: str = "") -> list[Piece]:
    """The words of a text; `style` is that of words without one of their own."""
    found: list[Piece] = []
    after_space = True
    for inner, own, target in _styled(text, style):
        for number, word in enumerate(inner.split()):
            glued = number == 0 and not after_space and not inner[0].isspace()
            found.append(Piece(word, own, glued, target))
        after_space = inner[-1].isspace()
    return found


def _styled(text: str, style: str) -> Iterator[tuple[str, str, str]]:
    """The parts of a text with their styles and the targets of links; none is empty."""
    at = 0
    for span in SPAN.finditer(text):
        if at < span.start():
            yield text[at : span.start()], style, ""
        yield _of_span(span, style)
        at = span.end()
    if at < len(text):
        yield text[at:], style, ""


def _of_span(span: re.Match[str], style: str) -> tuple[str, str, str]:
    if span["code"] is not None:
        return span["code"], f"{style};{CODE}" if style else CODE, ""
    if span["bold"] is not None:
        return span["bold"].replace("`", ""), BOLD, ""
    return span["link"].replace("`", ""), style or "4", span["target"]


def width_of(line: Sequence[Piece]) -> int:
    """The columns of the pieces in one line."""
    return sum(len(piece.text) + (not piece.glued) for piece in line) - bool(line and not line[0].glued)


def wrapped(words: Sequence[Piece], width: int) -> list[list[Piece]]:
    """Lines of at most `width` columns; a word that is longer stands alone. At least one line."""
    lines: list[list[Piece]] = [[]]
    for group in _groups(words):
        room = width - width_of(lines[-1]) - 1
        if lines[-1] and sum(len(piece.text) for piece in group) > room:
            lines.append([])
        lines[-1] += group
    return lines


def _groups(words: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that stand together without a space."""
    group: list[Piece] = []
    for piece in words:
        if group and not piece.glued:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def without_colors(page: str) -> str:
    """`page` without ANSI codes."""
    return ESCAPES.sub("", page)


def written(line: Sequence[Piece]) -> str:
    """The line with ANSI codes; a link to the web opens on a click in terminals that can."""
    text = ""
    for (style, target), run in groupby(line, key=lambda piece: (piece.style, piece.target)):
        words = list(run)
        shown = "".join(("" if piece.glued or piece is words[0] else " ") + piece.text for piece in words)
        shown = f"\x1b[{style}m{shown}\x1b[0m" if style else shown
        if target.startswith("http"):
            shown = f"\x1b]8;;{target}\x1b\\{shown}\x1b]8;;\x1b\\"
        text += (" " if text and not words[0].glued else "") + shown
    return text
