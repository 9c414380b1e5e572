"""Text to tokens, arranged as the grammar wants them.

Newlines inside ( ) and [ ] do not count and a closing brace ends a statement, so whether a newline is a token
depends on the brackets around it. They are matched first, here; the parser then only ever sees balanced ones,
and one forgotten bracket costs one diagnostic instead of the rest of the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.model import Diagnostic, Edit, Severity
from moec.grammar.source import Source, Span
from moec.grammar.syntax.tables import IGNORED, KEYWORDS, PATTERN

MAX_NESTING = 64
"""Brackets within brackets. A person writes four or five; everything behind the parser recurses on them."""

# What no token can begin with still becomes a token, so that the parser recovers from it as from any other. A text
# that is not closed ends before a bracket: the one after a label is meant as a bracket.
_SCANNER = re.compile(PATTERN + r'|(?P<UNCLOSED>"(?:[^"\r\n{}()\[\];#]*[^"\r\n{}()\[\];# ])?)|(?P<UNKNOWN>[^\n])')
_CLOSERS = {"LBRACE": "RBRACE", "LPAR": "RPAR", "LSQB": "RSQB"}


class Token(NamedTuple):
    """`text[start:end]`, a terminal of the grammar, or UNCLOSED (a string), UNKNOWN (a character), or ERROR."""

    kind: str
    text: str
    start: int
    end: int


@dataclass(slots=True)
class Arranged:
    """Tokens with balanced brackets. `suspects` are the offsets of tokens that a diagnostic already concerns."""

    tokens: list[Token]
    diagnostics: list[Diagnostic] = field(default_factory=list)
    suspects: set[int] = field(default_factory=set)
    too_deep: bool = False


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
    """One warning for a file with tabs between its words; in a comment or a text they do no harm."""
    if "\t" not in source.text:
        return []
    blanks = [found for found in _SCANNER.finditer(source.text) if found.lastgroup == "BLANK"]
    places = [found.start() + at for found in blanks for at, c in enumerate(found.group()) if c == "\t"]
    if not places:
        return []
    fix = [Edit(Span(source, at, at + 1), "  ") for at in places]
    help = "`moec fmt` writes blanks"
    return [diagnose("MOE0012", fix[0].span, "here first", help=help, severity=Severity.WARNING, fix=fix)]


def arrange(source: Source) -> Arranged:
    """The tokens of `source` as the grammar wants them, ending in `$END`."""
    tokens = lex(source.text)
    brackets = _Brackets(source)
    for index, token in enumerate(tokens):
        if token.kind in _CLOSERS:
            brackets.open(index, token)
            if len(brackets.stack) > MAX_NESTING:
                brackets.refuse(token)
                del tokens[index:]
                break
        elif token.kind in _CLOSERS.values():
            brackets.close(index, token)
    missing = brackets.finish()
    arranged = Arranged(_significant(tokens, brackets), brackets.diagnostics, brackets.suspects, brackets.too_deep)
    end = len(source.text)
    for _ in range(missing):
        arranged.tokens += [Token("RBRACE", "}", end, end), Token("SEPARATOR", "", end, end)]
    arranged.tokens.append(Token("$END", "", end, end))
    return arranged


class _Brackets:
    """Matches brackets: a brace inside a parenthesis means that the parenthesis was not closed."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.stack: list[tuple[int, Token]] = []
        self.diagnostics: list[Diagnostic] = []
        self.suspects: set[int] = set()
        self.enclosed: dict[int, int] = {}  # index of a ( or [ to the index of what closes it
        self.dropped: set[int] = set()
        self.too_deep = False

    def open(self, index: int, token: Token) -> None:
        if token.kind == "LBRACE":
            self._close_parentheses()
        self.stack.append((index, token))

    def close(self, index: int, token: Token) -> None:
        if token.kind == "RBRACE":
            self._close_parentheses()
        opener = self._opener(token.kind)
        if opener is None:
            self.dropped.add(index)
            self.suspects.add(token.start)
            span = self._span(token)
            self.diagnostics.append(
                diagnose("MOE0105", span, f"no open bracket for `{token.text}`", fix=[Edit(span, "")])
            )
            return
        while len(self.stack) > opener + 1:
            self._unclosed(*self.stack.pop())
        start, _ = self.stack.pop()
        if token.kind != "RBRACE":
            self.enclosed[start] = index

    def refuse(self, token: Token) -> None:
        self.too_deep = True
        message = f"bracket number {MAX_NESTING + 1} inside one another"
        self.diagnostics.append(diagnose("MOE0106", self._span(token), message, help="name the inner parts with `let`"))

    def finish(self) -> int:
        """Diagnose what is still open; gives the number of braces to add."""
        self._close_parentheses()
        braces = len(self.stack)
        for _, token in self.stack:
            if not self.too_deep:
                self._diagnose_unclosed(token)
        return braces

    def _opener(self, closer: str) -> int | None:
        """Where in the stack the bracket is that `closer` closes; a brace is never passed over."""
        for at in range(len(self.stack) - 1, -1, -1):
            kind = self.stack[at][1].kind
            if _CLOSERS[kind] == closer:
                return at
            if kind == "LBRACE":
                return None
        return None

    def _close_parentheses(self) -> None:
        while self.stack and self.stack[-1][1].kind != "LBRACE":
            self._unclosed(*self.stack.pop())

    def _unclosed(self, index: int, token: Token) -> None:
        self.dropped.add(index)
        self.suspects.add(token.start)
        if not self.too_deep:
            self._diagnose_unclosed(token)

    def _diagnose_unclosed(self, token: Token) -> None:
        closer = {"{": "}", "(": ")", "[": "]"}[token.text]
        self.diagnostics.append(diagnose("MOE0104", self._span(token), f"there is no `{closer}` for it"))

    def _span(self, token: Token) -> Span:
        return Span(self.source, token.start, token.end)


def _significant(tokens: list[Token], brackets: _Brackets) -> list[Token]:
    """Without the newlines in parentheses and repeated separators; with one behind every closing brace."""
    kept: list[Token] = []
    until = -1  # index of the bracket that closes the outermost open parenthesis
    for index, token in enumerate(tokens):
        if index in brackets.dropped:
            continue
        if index > until:
            until = brackets.enclosed.get(index, until)
        if token.kind == "SEPARATOR":
            inside = index < until and token.text != ";"
            if inside or not kept or kept[-1].kind in ("SEPARATOR", "LBRACE"):
                continue
        kept.append(token)
        if token.kind == "RBRACE":
            kept.append(Token("SEPARATOR", "", token.end, token.end))
    return kept
