"""Quotes as other languages have them: `'text'`, `"key": value`, and a path without any."""

from __future__ import annotations

from itertools import pairwise

from moec.grammar.syntax.notations import Notations, begins
from moec.grammar.syntax.tokens import Token

_QUOTES = "'\"`´‘’‚“”„«»"
NAMES_IN_QUOTES = "names in quotes"


def quoted(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Replaces other quotes around a text in one line, and quotes around the name of a statement."""
    text = notations.source.text
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        closing = _closing_quote(tokens, at)
        if closing is not None:
            end = tokens[closing]
            inner = text[token.end : end.start]
            message = f"U+{ord(token.text):04X} has no meaning in a .moe file"
            edits = (token.start, token.end, '"'), (end.start, end.end, '"')
            notations.add("MOE0102", token.start, token.end, message, 'write double quotes, `"`, around a text', *edits)
            token, at = Token("STRING", f'"{inner}"', token.start, end.end), closing
        kept.append(token)
        at += 1
    return _bare_names(notations, kept)


def _bare_names(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `"key": value` and `"key" = value`."""
    kept = list(tokens)
    for at, (token, behind) in enumerate(pairwise(tokens)):
        name = token.text[1:-1]
        if at and tokens[at - 1].kind == "NAME" and begins(tokens, at - 1):
            continue  # the label of a block: `model "m": {`
        if token.kind != "STRING" or not (behind.kind == "EQUAL" or behind.text == ":") or not name.isidentifier():
            continue
        edits = [(token.start, token.end, name)]
        if behind.text == ":":
            edits.append((behind.start, behind.end, " ="))
            kept[at + 1] = behind._replace(kind="EQUAL", text="=")
        message = "the name of a value is written without quotes"
        help = "write `name = value`, each in a line"
        notations.add("MOE0109", token.start, behind.end, message, help, *edits, habit=NAMES_IN_QUOTES)
        kept[at] = token._replace(kind="NAME", text=name)
    return kept


def paths(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `use clusters/dgx_h100` without its quotes."""
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        kept.append(tokens[at])
        at += 1
        if kept[-1].kind != "USE":
            continue
        end = at
        while end < len(tokens) and tokens[end].kind in ("NAME", "SLASH", "NUMBER", "UNKNOWN"):
            end += 1
        if end > at:
            start, stop = tokens[at].start, tokens[end - 1].end
            text = f'"{notations.source.text[start:stop].removesuffix(".moe")}"'
            notations.add("MOE0109", start, stop, "a path is written in quotes", f"write `{text}`", (start, stop, text))
            kept.append(Token("STRING", text, start, stop))
            at = end
    return kept


def _closing_quote(tokens: list[Token], at: int) -> int | None:
    """The index of the token that closes the quote at `at`, in the same line."""
    if tokens[at].kind != "UNKNOWN" or tokens[at].text not in _QUOTES:
        return None
    for index in range(at + 1, len(tokens)):
        token = tokens[index]
        if token.kind in ("STRING", "UNCLOSED") or token.text == "\n" or token.text == "\r\n":
            return None
        if token.kind == "UNKNOWN" and token.text in _QUOTES:
            return index
    return None
