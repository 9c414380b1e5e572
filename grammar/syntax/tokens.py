"""Text to tokens. The lexer never fails: an unexpected character is a token too, from which the parser recovers."""

from __future__ import annotations

import re
from typing import NamedTuple

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Edit, Severity
from moec.grammar.source import Source, Span
from moec.grammar.syntax.tables import IGNORED, KEYWORDS, PATTERN

# Characters that begin no token still become tokens, so that the parser can recover. An unclosed text ends before a
# bracket, because a bracket after a label is meant as a bracket.
_SCANNER = re.compile(PATTERN + r'|(?P<UNCLOSED>"(?:[^"\r\n{}()\[\];#]*[^"\r\n{}()\[\];# ])?)|(?P<UNKNOWN>[^\n])')


class Token(NamedTuple):
    """`text[start:end]`, a terminal of the grammar, or UNCLOSED (a string), UNKNOWN (a character), or ERROR."""

    kind: str
    text: str
    start: int
    end: int


def lex(text: str, *, comments: bool = False) -> list[Token]:
    """Every token of `text`, without blanks, and without comments unless they are asked for. Never fails."""
    tokens = []
    for match in _SCANNER.finditer(text):
        kind = match.lastgroup or ""
        if kind in IGNORED and not (comments and kind == "COMMENT"):
            continue
        word = match.group()
        if kind in ("NAME", "SYMBOL"):
            kind = KEYWORDS.get(word, kind)
        tokens.append(Token(kind, word, match.start(), match.end()))
    return tokens


def tabs(source: Source) -> list[Diagnostic]:
    """One warning for a file with tabs between its words; tabs in comments and quoted text are allowed."""
    if "\t" not in source.text:
        return []
    blanks = [found for found in _SCANNER.finditer(source.text) if found.lastgroup == "BLANK"]
    places = [found.start() + at for found in blanks for at, c in enumerate(found.group()) if c == "\t"]
    if not places:
        return []
    fix = [Edit(Span(source, at, at + 1), "  ") for at in places]
    help = "`moec fmt` writes blanks"
    return [diagnose("MOE0012", fix[0].span, "here first", help=help, severity=Severity.WARNING, fix=fix)]
