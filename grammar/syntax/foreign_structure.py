"""Brackets, commas and braces as other languages have them."""

from __future__ import annotations

import re

from moec.grammar.diagnostics.diagnostic import Edit
from moec.grammar.source import Span
from moec.grammar.syntax.foreign_quotes import NAMES_IN_QUOTES
from moec.grammar.syntax.notations import Notations
from moec.grammar.syntax.tokens import Token

CLOSERS = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}
VALUE_ENDS = frozenset(("NAME", "NUMBER", "STRING", "RPAR", "RSQB", "RBRACE"))
"""Tokens that a value can end with."""
_BOUNDS = frozenset(("EQUAL", "SEPARATOR", "LBRACE", "RBRACE"))
_TEXTS = {"LPAR": "(", "RPAR": ")", "LSQB": "[", "RSQB": "]", "LBRACE": "{", "RBRACE": "}"}


class Structure:
    """One walk over the tokens, with the stack of open brackets as they are meant."""

    def __init__(self, notations: Notations) -> None:
        self.notations = notations
        self.source = notations.source
        self.kept: list[Token] = []
        self.more_closed = False
        """Whether the text has more closing than opening braces."""
        self.open: list[tuple[int, str]] = []
        """For each open bracket its index in `kept`, and the kind that it was written as."""

    def read(self, tokens: list[Token]) -> list[Token]:
        kinds = [token.kind for token in tokens]
        self.more_closed = kinds.count("RBRACE") > kinds.count("LBRACE")
        for at, token in enumerate(tokens):
            behind = tokens[at + 1] if at + 1 < len(tokens) else None
            if token.kind in CLOSERS:
                self.open.append((len(self.kept), token.kind))
                self.kept.append(token)
            elif token.kind in CLOSERS.values():
                self._closes(token)
            elif token.kind == "COMMA":
                self._comma(token, behind)
            elif token.kind == "SEPARATOR" and token.text != ";" and self._in_block():
                self._line_ends(token, tokens, at)
            else:
                self._separated(token, behind)
                self.kept.append(token)
        return self.kept

    def _in_block(self) -> bool:
        return not self.open or self.kept[self.open[-1][0]].kind == "LBRACE"

    def _kind(self, back: int) -> str:
        return self.kept[-back].kind if len(self.kept) >= back else ""

    def _closes(self, token: Token) -> None:
        if not self.open:
            self.kept.append(token)
            return
        index, written_kind = self.open[-1]
        kind = self.kept[index].kind
        if token.kind == CLOSERS[written_kind] != CLOSERS[kind]:  # the other bracket of one that was replaced
            token = token._replace(kind=CLOSERS[kind], text=_TEXTS[CLOSERS[kind]])
        elif token.kind != CLOSERS[kind] and "RBRACE" not in (token.kind, CLOSERS[kind]):
            if self._line(self.kept[index]) != self._line(token):
                self.kept.append(token)
                return
            right = _TEXTS[CLOSERS[kind]]
            message = f"`{_TEXTS[kind]}` is closed by `{right}`"
            edit = (token.start, token.end, right)
            self.notations.add("MOE0105", token.start, token.end, message, f"write `{right}`", edit)
            token = token._replace(kind=CLOSERS[kind], text=right)
        elif token.kind == "RBRACE":
            while self.open and self.kept[self.open[-1][0]].kind != "LBRACE":
                self.open.pop()
        if self.open:
            self.open.pop()
        self.kept.append(token)

    def _comma(self, token: Token, behind: Token | None) -> None:
        """Between statements a comma is none; within a group's parentheses it makes a list."""
        if not self._in_block():
            index, written_kind = self.open[-1]
            if self.kept[index].kind == written_kind == "LPAR" and (index == 0 or self.kept[index - 1].kind != "NAME"):
                self.kept[index] = self.kept[index]._replace(kind="LSQB", text="[")
                self._note_list(index)
            self.kept.append(token)
            return
        if self._kind(1) not in VALUE_ENDS:
            self.kept.append(token)
            return
        ends = behind is None or behind.kind in ("SEPARATOR", "RBRACE")
        edit = (token.start, token.end, "" if ends else ";")
        help = "a statement ends with its line, or with `;`"
        message = "there is no comma between statements"
        quoted = self.notations.by_habit.get(NAMES_IN_QUOTES)
        if quoted is None:
            self.notations.add("MOE0109", token.start, token.end, message, help, edit)
        else:  # of lines of JSON: one error for both
            quoted.edits.append(Edit(Span(self.source, edit[0], edit[1]), edit[2]))
        if not ends:
            self.kept.append(token._replace(kind="SEPARATOR", text=";"))

    def _note_list(self, index: int) -> None:
        opener = self.kept[index]
        closer = self.source.text.find(")", opener.end)
        inner = self.source.text[opener.end : closer] if closer >= 0 else ""
        plain = bool(inner) and "(" not in inner and "\n" not in inner
        edits = [(opener.start, opener.end, "["), (closer, closer + 1, "]")] if plain else []
        message = "several values in parentheses"
        help = f"a list is written in brackets: `[{inner if plain else '…'}]`"
        self.notations.add("MOE0109", opener.start, opener.end, message, help, *edits)

    def _separated(self, token: Token, behind: Token | None) -> None:
        """Adds what is missing in a line: the `;` between two statements, or the comma between two arguments."""
        if self._kind(1) not in VALUE_ENDS or self._line(self.kept[-1]) != self._line(token):
            return
        if self._in_block():
            if token.kind == "NAME" and behind is not None and behind.kind == "EQUAL":
                self._add_semicolon(token)
            return
        if token.kind not in ("NAME", "NUMBER", "STRING"):
            return
        before = self.kept[-1]
        message, help = f"a comma is missing before `{token.text}`", "arguments have commas between them"
        edits = [(before.end, before.end, ",")]
        if re.fullmatch(r"\d{1,3} \d{3}", f"{before.text} {token.text}"):
            help, edits = f"write `{before.text}_{token.text}` for one number, or a comma between two", []
        self.notations.add("MOE0101", token.start, token.end, message, help, *edits)
        self.kept.append(Token("COMMA", ",", before.end, before.end))

    def _add_semicolon(self, token: Token) -> None:
        """Ends the statement in front of `token`, unless it has no `=`: then it may be a misspelt `let`."""
        bounds = (earlier.kind for earlier in reversed(self.kept) if earlier.kind in _BOUNDS)
        if next(bounds, "") != "EQUAL":
            return
        end = self.kept[-1].end
        message = f"`;` is missing before `{token.text}`"
        help = "a statement ends with its line, or with `;`"
        self.notations.add("MOE0101", token.start, token.end, message, help, (end, end, ";"), habit="statements")
        self.kept.append(Token("SEPARATOR", ";", end, end))

    def _line_ends(self, token: Token, tokens: list[Token], at: int) -> None:
        """Reads a block's head without its brace: `moe` alone in a line, with more indented lines behind it."""
        size = 2 if self._kind(1) == "STRING" else 1
        begins = self._kind(size + 1) in ("", "SEPARATOR", "LBRACE", "RBRACE")
        behind = next((tokens[i] for i in range(at + 1, len(tokens)) if tokens[i].kind != "SEPARATOR"), None)
        if not begins or self._kind(size) != "NAME" or behind is None:
            self.kept.append(token)
            return
        head = self.kept[-1]
        if behind.kind == "LBRACE":
            edit = (head.end, behind.start, " ")
            help = "write the brace in the line of its word: `moe {`"
            self.notations.add(
                "MOE0109", behind.start, behind.end, "the brace of a block in a line of its own", help, edit
            )
        elif self._indent(behind) > self._indent(head):
            help = "write `{` after it" + ("" if self.more_closed else ", and `}` after its last line")
            message = "the `{` of this block is missing" + ("" if self.more_closed else ", and its `}`")
            self.notations.add("MOE0109", head.start, head.end, message, help, (head.end, head.end, " {"))
            self.open.append((len(self.kept), "LBRACE"))
            self.kept.append(Token("LBRACE", "{", head.end, head.end))
        else:
            self.kept.append(token)

    def _line(self, token: Token) -> int:
        return self.source.position(token.start)[0]

    def _indent(self, token: Token) -> int:
        line = self.source.line(self._line(token))
        return len(line) - len(line.lstrip())
