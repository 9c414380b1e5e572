"""Numbers as other languages write them: `80 GB`, `8x`, `32,000`, `1%`, `2**6`, `10^-4`.

Each function reads one habit in tokens, as in `notations.py`.
"""

from __future__ import annotations

import re
from decimal import Decimal

from moec.grammar.syntax.notations import Notations
from moec.grammar.syntax.tokens import Token
from moec.grammar.units import UNITS

_TIMES = re.compile(r"[\d_]+[xX]")
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?![\w,.])")
_POWER = re.compile(r"(\d[\d_]{0,15})[ \t]*(\*\*|\^)[ \t]*([+-]?\d{1,3})(?![\w.])")
_DIGITS = re.compile(r"\d{1,9}(?:\.\d{1,9})?")
_SECONDS = re.compile(r"/(?:seconds?|secs?|s)\b")

LARGEST_POWER = 10**15
"""Larger powers are not written out: nobody reads so many digits."""


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
        given = depth <= 0 and [each.kind for each in kept[-2:]] == ["NAME", "EQUAL"]
        number = _GROUPED.match(text, token.start) if given else None
        if token.start < end:
            continue
        if number is not None:
            end, written = number.end(), number[0].replace(",", "_")
            message, edit = "a comma in a number", (token.start, end, written)
            notations.add("MOE0109", token.start, end, message, f"write `{written}`", edit, habit="thousands")
            token = Token("NUMBER", written, token.start, end)
        kept.append(token)
    return kept


def percents(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `1%` as 0.01."""
    kept: list[Token] = []
    for at, token in enumerate(tokens):
        number = kept[-1] if kept and kept[-1].kind == "NUMBER" and kept[-1].end == token.start else None
        divides = any(each.kind in ("NUMBER", "NAME", "LPAR") for each in tokens[at + 1 : at + 2])
        if token.text != "%" or divides or number is None or not _DIGITS.fullmatch(number.text):
            kept.append(token)
            continue
        written = f"{Decimal(number.text) / 100:f}"
        edit = (number.start, token.end, written)
        notations.add(
            "MOE0109", number.start, token.end, "the language has no `%`", f"write `{written}`", edit, habit="percent"
        )
        kept[-1] = Token("NUMBER", written, number.start, token.end)
    return kept


def powers(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `2**6` and `2^6` as 64, `10^-4` as 1e-4, and `3*10^-4` as 3e-4."""
    text = notations.source.text
    kept: list[Token] = []
    end = 0
    for token in tokens:
        if token.start < end:
            continue
        power = _POWER.match(text, token.start) if token.kind == "NUMBER" else None
        written = _power(int(power[1].replace("_", "")), int(power[3])) if power else None
        if power is not None and written is not None:
            start, end = token.start, power.end()
            factor = kept[-2] if [each.kind for each in kept[-2:]] == ["NUMBER", "STAR"] else None
            if kept[-3:-2] and kept[-3].kind == "SLASH":  # `8 / 3 * 10^-4` divides first
                factor = None
            if factor is not None and written.startswith("1e") and _DIGITS.fullmatch(factor.text):
                start, written = factor.start, f"{factor.text}{written[1:]}"
                del kept[-2:]
            message, edit = f"`{power[2]}` is no operator here", (start, end, written)
            notations.add("MOE0109", start, end, message, f"write `{written}`", edit)
            token = Token("NUMBER", written, start, end)
        kept.append(token)
    return kept


def _power(base: int, exponent: int) -> str | None:
    """The number that a base and an exponent give; None if it is no number that a person reads."""
    if base == 10 and exponent < 0:
        return f"1e{exponent}"
    if base > 1000 or not 0 <= exponent <= 50:
        return None
    power = base**exponent
    if power > LARGEST_POWER:
        return None
    return f"{power:_}" if power >= 10_000 else f"{power}"
