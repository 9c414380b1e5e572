"""Numbers as other languages write them: `80 GB`, `8x`, `32,000`, `betas = (0.9, 0.95)`.

Each function reads one habit in tokens, as in `notations.py`.
"""

from __future__ import annotations

import re

from moec.grammar.syntax.notations import Notations
from moec.grammar.syntax.tokens import Token
from moec.grammar.units import UNITS

_TIMES = re.compile(r"[\d_]+[xX]")
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?![\w,.])")
_SECONDS = re.compile(r"/(?:seconds?|secs?|s)\b")


def units(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Joins a number and the unit behind it: `80 GB`, `10 GB/s`, and reads `8 x` and `8x` as `8 *`."""
    text = notations.source.text
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        behind = tokens[at + 1] if at + 1 < len(tokens) else None
        if token.kind == "NUMBER" and _TIMES.fullmatch(token.text) and behind and behind.kind == "NAME":
            cut = token.end - 1
            notations.add("MOE0109", cut, token.end, "`x` multiplies nothing here", "write `*`", (cut, token.end, " *"))
            kept += [token._replace(text=token.text[:-1], end=cut), Token("STAR", "*", cut, token.end)]
            at += 1
            continue
        number = kept[-1] if kept and kept[-1].kind == "NUMBER" and not kept[-1].text[-1].isalpha() else None
        if number is None or token.kind != "NAME" or token.start == number.end or (behind and behind.kind == "EQUAL"):
            kept.append(token)
        elif token.text in UNITS:
            per = _SECONDS.match(text, token.end) if f"{token.text}/s" in UNITS else None
            end = per.end() if per else token.end
            joined = f"{number.text}{token.text}{'/s' if per else ''}"
            help = f"a unit comes right after its number: `{joined}`"
            notations.add(
                "MOE0101",
                token.start,
                end,
                "a space before the unit",
                help,
                (number.end, end, joined[len(number.text) :]),
                habit="units",
            )
            kept[-1] = Token("NUMBER", joined, number.start, end)
            while at + 1 < len(tokens) and tokens[at + 1].start < end:
                at += 1
        elif token.text in ("x", "X") and behind and behind.kind == "NAME":
            notations.add(
                "MOE0109",
                token.start,
                token.end,
                "`x` multiplies nothing here",
                "write `*`",
                (token.start, token.end, "*"),
            )
            kept.append(token._replace(kind="STAR", text="*"))
        else:
            kept.append(token)
        at += 1
    return kept


def thousands(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `vocab = 32,000` as 32_000; elsewhere than behind a name the comma stands between two values."""
    text = notations.source.text
    kept: list[Token] = []
    depth = end = 0
    for token in tokens:
        depth = 0 if token.kind in ("LBRACE", "RBRACE") else depth + (token.text in "([") - (token.text in ")]")
        is_value = depth <= 0 and [token.kind for token in kept[-2:]] == ["NAME", "EQUAL"]
        number = _GROUPED.match(text, token.start) if is_value else None
        if token.start < end:
            continue
        if number is not None:
            end, written = number.end(), number[0].replace(",", "_")
            message, edit = "a comma in a number", (token.start, end, written)
            notations.add("MOE0109", token.start, end, message, f"write `{written}`", edit, habit="thousands")
            token = Token("NUMBER", written, token.start, end)
        kept.append(token)
    return kept


def betas(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `betas = (0.9, 0.95)`, each of which has a name here."""
    pattern = ["NAME", "EQUAL", "LPAR", "NUMBER", "COMMA", "NUMBER", "RPAR"]
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        part = tokens[at : at + len(pattern)]
        if tokens[at].text != "betas" or [token.kind for token in part] != pattern:
            kept.append(tokens[at])
            at += 1
            continue
        name, equal, _, first, comma, second, last = part
        written = f"beta1 = {first.text}, beta2 = {second.text}"
        edit = (name.start, last.end, written)
        notations.add("MOE0109", name.start, last.end, "two values in parentheses", f"write `{written}`", edit)
        kept += [name._replace(text="beta1"), equal, first, comma]
        kept += [name._replace(text="beta2"), equal, second]
        at += len(pattern)
    return kept
