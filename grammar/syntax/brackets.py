"""Arranges tokens for the grammar: brackets matched, newlines kept only where they separate statements.

Newlines inside ( ) and [ ] do not count and a closing brace ends a statement, so whether a newline is a token
depends on the brackets around it. They are matched first, here; the parser then only ever sees balanced ones,
and one forgotten bracket costs one diagnostic instead of the rest of the file.
"""

from __future__ import annotations

from typing import NamedTuple

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Edit, Label
from moec.grammar.source import Source, Span
from moec.grammar.syntax.tokens import Token, lex

MAX_NESTING = 64
"""Most nested brackets: all code after the parser recurses on them. People write four or five."""

_CLOSERS = {"LBRACE": "RBRACE", "LPAR": "RPAR", "LSQB": "RSQB"}


class Arranged(NamedTuple):
    """Tokens with balanced brackets. `suspects` are the offsets of tokens that a diagnostic already concerns."""

    tokens: list[Token]
    diagnostics: list[Diagnostic]
    suspects: set[int]
    too_deep: bool


def arrange(source: Source, tokens: list[Token] | None = None) -> Arranged:
    """The tokens of `source`, or those given, as the grammar wants them, ending in `$END`."""
    tokens = lex(source.text) if tokens is None else tokens
    brackets = _Brackets(source, tokens)
    brackets.match()
    if brackets.unbalanced and not brackets.too_deep:
        hinted = _Brackets(source, tokens, hinted=True)
        hinted.match()
        if len(hinted.diagnostics) <= len(brackets.diagnostics):
            brackets = hinted
    end = len(source.text)
    kept = _significant(tokens[: brackets.end], brackets)
    kept += [Token("RBRACE", "}", end, end), Token("SEPARATOR", "", end, end)] * brackets.missing
    kept.append(Token("$END", "", end, end))
    return Arranged(kept, brackets.diagnostics, brackets.suspects, brackets.too_deep)


class _Brackets:
    """Matches brackets: a brace inside a parenthesis means that the parenthesis was not closed.

    If braces do not match, indentation shows which one is wrong: with `hinted`, a line that is not indented further
    than the line of an open brace is outside of it.
    """

    def __init__(self, source: Source, tokens: list[Token], *, hinted: bool = False) -> None:
        self.source = source
        self.tokens = tokens
        self.hinted = hinted
        self.end = len(tokens)
        self.missing = 0  # braces to add at the end
        self.unbalanced = False
        self.added: dict[int, int] = {}  # index of a token to the number of braces to add before it
        self.stack: list[tuple[int, Token]] = []
        self.diagnostics: list[Diagnostic] = []
        self.suspects: set[int] = set()
        self.enclosed: dict[int, int] = {}  # index of a ( or [ to the index of what closes it
        self.dropped: set[int] = set()
        self.too_deep = False

    def match(self) -> None:
        """Match them all."""
        first_of_line = True
        for index, token in enumerate(self.tokens):
            if self.hinted and first_of_line and token.kind != "SEPARATOR" and not self._heed(index, token):
                continue
            begins, first_of_line = first_of_line, token.kind == "SEPARATOR" and token.text != ";"
            if token.kind in _CLOSERS:
                self.open(index, token)
                if len(self.stack) > MAX_NESTING:
                    self.refuse(token)
                    self.end = index
                    break
            elif token.kind in _CLOSERS.values() and (begins or not self._crowded(index, token)):
                self.close(index, token)
        self.missing = self.finish()

    def _heed(self, index: int, token: Token) -> bool:
        """Close the braces that the first token of a line is outside of; False if the line closes one too many."""
        here = self._indent(token)
        while self.stack and self.stack[-1][1].kind == "LBRACE":
            opener = self.stack[-1][1]
            outer = self._indent(opener)
            if here > outer or (here == outer and token.kind == "RBRACE"):
                break
            self.stack.pop()
            self.added[index] = self.added.get(index, 0) + 1
            at = self._after(index)
            fix = [Edit(Span(self.source, at, at), f"{' ' * outer}}}\n")]
            label = Label(span=Span(self.source, at, at), message="going by the indentation, it is missing here")
            message = "there is no `}` for it"
            help = "write it in a line of its own"
            self.diagnostics.append(
                diagnose("MOE0104", self._span(opener), message, labels=[label], help=help, fix=fix)
            )
        stray = token.kind == "RBRACE" and self.stack and here > self._indent(self.stack[-1][1])
        if stray and self.stack[-1][1].kind == "LBRACE":
            self._stray(index, token)
            return False
        return True

    def _crowded(self, index: int, token: Token) -> bool:
        """Whether a brace behind another closing one closes what another line opened: then it is the one too many."""
        behind = index > 0 and self.tokens[index - 1].kind == "RBRACE"
        if not self.hinted or token.kind != "RBRACE" or not self.stack or not behind:
            return False
        opener = self.stack[-1][1]
        stray = self.source.position(opener.start)[0] != self.source.position(token.start)[0]
        if stray:
            self._stray(index, token)
        return stray

    def _after(self, index: int) -> int:
        """The start of the line after the last word before token `index`."""
        while index > 0 and self.tokens[index - 1].kind == "SEPARATOR":
            index -= 1
        end = self.tokens[index - 1].end if index else 0
        line, _ = self.source.position(end)
        return self.source.line_starts[min(line, len(self.source.line_starts) - 1)]

    def _indent(self, token: Token) -> int:
        """Blanks before the line on which `token` stands."""
        line = self.source.line(self.source.position(token.start)[0])
        return len(line) - len(line.lstrip())

    def open(self, index: int, token: Token) -> None:
        if token.kind == "LBRACE":
            self._close_parentheses()
        self.stack.append((index, token))

    def close(self, index: int, token: Token) -> None:
        if token.kind == "RBRACE":
            self._close_parentheses()
        opener = self._opener(token.kind)
        if opener is None:
            self._stray(index, token)
            return
        while len(self.stack) > opener + 1:
            self._unclosed(*self.stack.pop())
        start, _ = self.stack.pop()
        if token.kind != "RBRACE":
            self.enclosed[start] = index

    def _stray(self, index: int, token: Token) -> None:
        self.dropped.add(index)
        self.suspects.add(token.start)
        self.unbalanced = self.unbalanced or token.kind == "RBRACE"
        span, message = self._span(token), f"no open bracket for `{token.text}`"
        self.diagnostics.append(diagnose("MOE0105", span, message, fix=[Edit(span, "")]))

    def refuse(self, token: Token) -> None:
        self.too_deep = True
        message = f"bracket number {MAX_NESTING + 1} inside one another"
        self.diagnostics.append(diagnose("MOE0106", self._span(token), message, help="name the inner parts with `let`"))

    def finish(self) -> int:
        """Diagnose open brackets; returns the number of braces to add."""
        self._close_parentheses()
        braces = len(self.stack)
        self.unbalanced = self.unbalanced or braces > 0
        for _, token in self.stack:
            if not self.too_deep:
                self._diagnose_unclosed(token)
        return braces

    def _opener(self, closer: str) -> int | None:
        """The index in the stack of the bracket that `closer` closes; never one outside of an open brace."""
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
        for _ in range(brackets.added.get(index, 0)):
            kept += [Token("RBRACE", "}", token.start, token.start), Token("SEPARATOR", "", token.start, token.start)]
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
