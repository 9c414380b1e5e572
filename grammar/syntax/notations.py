"""Replaces notations of other languages by moec's: `//` comments, other quotes, `key: value`.

Runs only on files that do not parse. Each notation is diagnosed once, with the edits of all its places, and its tokens
are replaced by moec's: one habit gives one error, and the rest of the file is checked as if it were correct.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Edit
from moec.grammar.source import Source, Span
from moec.grammar.syntax.tokens import Token

CHARACTERS = {"–": "-", "−": "-", "—": "-", "×": "*", "·": "*", "…": ".."}
"""Characters of text processors, and the `.moe` characters to write instead."""

_KINDS = {"-": "MINUS", "*": "STAR", "..": "__ANON_0"}
BLOCKS = frozenset(("model", "layer", "layers", "moe", "train", "parallel", "cluster", "device", "adapt", "level"))
"""Words of blocks."""
_INVISIBLE = "\u00a0\u2007\u202f\u3000\u200b\u200c\u200d\u2060\ufeff"
_MERGE = re.compile(r"<{7}(?!<)")
_JSON = "`moec import hf FOLDER` makes a .moe file of a Hugging Face model; `moec init` writes a file to start from"
_KEEP = "keep one of the two, and take out the lines that begin with `<<<<<<<`, `=======` and `>>>>>>>`"
_YAML = 'a block is written in braces, and its names with `=`: `model "name" { dim = 4096 }`; `moec init` writes a file'


@dataclass(slots=True)
class Notation:
    """One notation: its first place, the number of its places, and the edits of all."""

    code: str
    span: Span
    message: str
    help: str
    edits: list[Edit] = field(default_factory=list)
    count: int = 0

    def diagnostic(self) -> Diagnostic:
        again = f" ({self.count} times in this file, here first)" if self.count > 1 else ""
        return diagnose(self.code, self.span, self.message + again, help=self.help, fix=self.edits)


@dataclass(slots=True)
class Notations:
    """The notations of other languages in one file, in the order of their first places."""

    source: Source
    by_habit: dict[str, Notation] = field(default_factory=dict)

    def add(
        self, code: str, start: int, end: int, message: str, help: str, *edits: tuple[int, int, str], habit: str = ""
    ) -> None:
        """One place of the habit that `help` is about; `edits` have starts, ends and texts."""
        span = Span(self.source, start, end)
        notation = self.by_habit.setdefault(habit or help, Notation(code, span, message, help))
        notation.edits += [Edit(Span(self.source, first, last), text) for first, last, text in edits]
        notation.count += 1

    @property
    def diagnostics(self) -> list[Diagnostic]:
        return [notation.diagnostic() for notation in self.by_habit.values()]


def whole_file(source: Source, tokens: list[Token]) -> Diagnostic | None:
    """The one diagnostic of a file that is JSON or YAML all over, or two files with the marks of a merge."""
    for token in tokens:
        if token.text[:1] == "<" and (mark := _MERGE.match(source.text, token.start)) and _begins_line(source, token):
            span = Span(source, token.start, mark.end())
            return diagnose(
                "MOE0102", span, "a merge is not finished: two versions of these lines are here", help=_KEEP
            )
    kinds = [token.kind for token in tokens if token.kind != "SEPARATOR"][:3]
    if kinds[:2] == ["LBRACE", "STRING"] and len(kinds) == 3:
        span = Span(source, tokens[0].start, tokens[0].end)
        return diagnose("MOE0109", span, "this is JSON, not the language of `.moe` files", help=_JSON)
    for at in range(len(tokens) - 2):
        name, colon, end = tokens[at : at + 3]
        begins = at == 0 or tokens[at - 1].kind == "SEPARATOR"
        if begins and (name.kind, colon.text) == ("NAME", ":") and end.text in ("\n", "\r\n", "*", "&"):
            behind = next((token for token in tokens[at + 3 :] if token.kind != "SEPARATOR"), None)
            if behind is None or behind.kind != "LBRACE":
                span = Span(source, name.start, colon.end)
                return diagnose("MOE0109", span, "this is YAML: indentation makes no block here", help=_YAML)
    return None


def _begins_line(source: Source, token: Token) -> bool:
    return source.text[token.start - 1 : token.start] in ("", "\n")


def without_comments(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Removes `// …`."""
    text = notations.source.text
    starts = [token.start for token in tokens]
    constants = {name.text for word, name in pairwise(tokens) if word.kind == "LET"}
    kept: list[Token] = []
    at, quoted = 0, False
    while at < len(tokens):
        token = tokens[at]
        quoted = not quoted and _has_quote(tokens, at) if token.text == "'" else quoted and token.kind != "SEPARATOR"
        if quoted or token.kind != "SLASH" or text[token.start : token.start + 2] != "//":
            kept.append(token)
            at += 1
            continue
        place = token.start, token.start + 2
        if _divides(tokens, at, constants):
            help = "write `/`, whose result is exact, or begin a comment with `#`"
            notations.add("MOE0109", *place, "`//` neither divides nor begins a comment here", help)
        else:
            help = "a comment begins with `#`"
            notations.add("MOE0109", *place, "`//` begins no comment here", help, (*place, "#"))
        at = bisect_left(starts, _line_end(text, token.start))
    return kept


def _has_quote(tokens: list[Token], at: int) -> bool:
    """Whether a second `'` stands behind the one at `at`, in its line."""
    behind = (token for token in tokens[at + 1 :] if token.text == "'" or token.kind == "SEPARATOR")
    return next((token.text for token in behind), "") == "'"


def begins(tokens: list[Token], at: int) -> bool:
    """Whether a statement may begin at a token."""
    return at == 0 or tokens[at - 1].kind in ("SEPARATOR", "LBRACE", "RBRACE")


_OPERANDS = frozenset(("NUMBER", "NAME", "RPAR"))


def _divides(tokens: list[Token], at: int, constants: set[str]) -> bool:
    """Whether the two slashes at `at` may be a division: on both sides is a number, or a name of a `let`."""
    before, behind = tokens[at - 1 : at], tokens[at + 2 : at + 4]
    if not before or before[0].kind not in _OPERANDS or not behind:
        return False
    if behind[0].kind == "NAME":  # `128 // heads` alone in its line may be either
        near = tokens[at].start - before[0].end <= 1
        alone = len(behind) == 1 or behind[1].kind in ("SEPARATOR", "RBRACE")
        return (near and alone) or behind[0].text in constants
    return behind[0].kind in ("NUMBER", "LPAR") and [token.kind for token in behind[1:]] != ["NAME"]


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    end = end if end >= 0 else len(text)
    return end - 1 if text[end - 1 : end] == "\r" else end


def plain_characters(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Replaces the characters of text processors, and takes invisible ones out."""
    kept: list[Token] = []
    for token in tokens:
        if token.kind == "UNKNOWN" and token.text in _INVISIBLE:
            help = "write a space, or nothing"
            message = f"U+{ord(token.text):04X} cannot be seen, and has no meaning in a .moe file"
            notations.add("MOE0102", token.start, token.end, message, help, (token.start, token.end, " "))
            continue
        if token.kind == "UNKNOWN" and token.text in CHARACTERS:
            plain = CHARACTERS[token.text]
            message = f"U+{ord(token.text):04X} has no meaning in a .moe file"
            notations.add(
                "MOE0102", token.start, token.end, message, f"write `{plain}`", (token.start, token.end, plain)
            )
            token = token._replace(kind=_KINDS[plain], text=plain)
        kept.append(token)
    return kept


def equals(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `key: value`, `key := value`, `key == value` and `block = {`."""
    tokens = list(tokens)
    kept: list[Token] = []
    for at, token in enumerate(tokens):
        behind = tokens[at + 1] if at + 1 < len(tokens) else None
        place = token.start, token.end
        selects = bool(kept) and kept[-1].text == "layers" and behind is not None and behind.kind != "LBRACE"
        if token.text == ":" and token.kind == "UNKNOWN" and not selects and not (kept and kept[-1].kind == "NUMBER"):
            message = "`:` has no meaning in a .moe file"
            if behind is not None and (behind.kind == "EQUAL" or (behind.kind == "LBRACE" and _is_block(kept))):
                notations.add("MOE0102", *place, message, "leave the `:` out", (*place, ""))
                continue
            blank = " " if notations.source.text[token.start - 1 : token.start] not in (" ", "") else ""
            notations.add("MOE0102", *place, message, "write `=`", (*place, f"{blank}="))
            token = token._replace(kind="EQUAL", text="=")
        elif token.kind == "EQUAL" and kept and kept[-1].kind == "EQUAL" and kept[-1].end == token.start:
            notations.add(
                "MOE0109",
                kept[-1].start,
                token.end,
                "`==` compares in other languages",
                "write `=`",
                (*place, ""),
                habit="==",
            )
            continue
        elif token.kind == "EQUAL" and behind is not None and behind.kind == "LBRACE" and _is_block(kept):
            help = "a block has no `=`: `moe { … }`"
            notations.add("MOE0109", *place, "`=` before a brace", help, (token.start, behind.start, ""))
            continue
        kept.append(token)
    return kept


def values_in_braces(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reports `gate = {type: topk, k: 2}` without a fix: which call is meant is not known."""
    kept: list[Token] = []
    end = 0
    for at, token in enumerate(tokens):
        is_value = len(kept) > 1 and (kept[-1].kind == "EQUAL" or kept[-1].text == ":") and not _is_block(kept[:-1])
        if at < end:
            continue
        if token.kind == "LBRACE" and is_value and (end := _behind_brace(tokens, at)):
            help = "a value with settings is a call, `topk(2)`; several values stand in `[ ]`, and one without braces"
            notations.add("MOE0109", token.start, token.end, "a value in braces", help)
            kept[-2:] = [Token("ERROR", "", kept[-2].start, tokens[end - 1].end)]
        else:
            kept.append(token)
    return kept


def _behind_brace(tokens: list[Token], at: int) -> int:
    """The index behind the brace that closes the one at `at`; 0 if none does."""
    depth = 0
    for index in range(at, len(tokens)):
        depth += (tokens[index].kind == "LBRACE") - (tokens[index].kind == "RBRACE")
        if not depth:
            return index + 1
    return 0


def _is_block(head: list[Token]) -> bool:
    """Whether the word or label at the end of `head` is that of a block."""
    return bool(head) and (head[-1].text in BLOCKS or head[-1].kind in ("STRING", "NUMBER"))
