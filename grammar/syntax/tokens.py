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

_PLAIN = re.compile(r"[\n\r\x20-\x7e]*")


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


def invisible(source: Source) -> list[Diagnostic]:
    """An error for each quoted text with characters that do not print: a terminal would obey them, or hide them."""
    if _PLAIN.fullmatch(source.text):
        return []
    problems = []
    for match in _SCANNER.finditer(source.text):
        if match.lastgroup != "STRING" or match.group().isprintable():
            continue
        places = [match.start() + at for at, c in enumerate(match.group()) if not c.isprintable()]
        span = Span(source, places[0], places[0] + 1)
        message = f"U+{ord(source.text[places[0]]):04X} does not print, and a text has only characters that do"
        fix = [Edit(Span(source, at, at + 1), " " if source.text[at].isspace() else "") for at in places]
        problems.append(diagnose("MOE0102", span, message, help="leave it out, or write a space for it", fix=fix))
    return problems


def tabs(source: Source) -> list[Diagnostic]:
    """One warning for a file with tabs between its words; tabs in comments are allowed."""
    if "\t" not in source.text:
        return []
    blanks = [blank for blank in _SCANNER.finditer(source.text) if blank.lastgroup == "BLANK"]
    places = [blank.start() + at for blank in blanks for at, c in enumerate(blank.group()) if c == "\t"]
    if not places:
        return []
    fix = [Edit(Span(source, at, at + 1), "  ") for at in places]
    help = "`moec fmt` writes blanks"
    return [diagnose("MOE0012", fix[0].span, "here first", help=help, severity=Severity.WARNING, fix=fix)]
