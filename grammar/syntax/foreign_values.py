"""Values as other languages write them: `torch.bfloat16`, `80 GB`, `betas = (0.9, 0.95)`, `2**6`, `${LR}`.

Each function reads one habit in tokens, as in `notations.py`.
"""

from __future__ import annotations

import re
from itertools import pairwise

from moec.grammar.alias_table import WORDS
from moec.grammar.syntax.notations import Notations
from moec.grammar.syntax.tokens import Token
from moec.grammar.units import UNITS

_TIMES = re.compile(r"[\d_]+[xX]")

LARGEST_POWER = 10**15
"""A power that is written out has at most so many digits that a person reads them."""


def torch_names(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `torch.bfloat16` as `bf16`."""
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        token, at = tokens[at], at + 1
        behind = tokens[at : at + 2]
        if token.text == "torch" and [each.kind for each in behind] == ["UNKNOWN", "NAME"]:
            start, end = token.start, behind[1].end
            text = notations.source.text[start:end]
            if text in WORDS and WORDS[text] != "fp16":  # which is not compiled yet: advising it would mislead
                message, help = f"`{text}` is PyTorch's name", f"write `{WORDS[text]}`"
                notations.add("MOE0109", start, end, message, help, (start, end, WORDS[text]))
                token, at = Token("NAME", WORDS[text], start, end), at + 2
        kept.append(token)
    return kept


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
            rate = text[token.start : token.end + 2]
            end = token.end + 2 if rate in UNITS and behind and behind.kind == "SLASH" else token.end
            joined = number.text + text[token.start : end]
            help = f"a unit comes right after its number: `{joined}`"
            notations.add(
                "MOE0101",
                token.start,
                end,
                "a space before the unit",
                help,
                (number.end, token.start, ""),
                habit="units",
            )
            kept[-1] = Token("NUMBER", joined, number.start, end)
            at += 2 if end != token.end else 0
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


def powers(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `2**6` as 64."""
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        part = tokens[at : at + 4]
        number = _power(part)
        if number is None:
            kept.append(tokens[at])
            at += 1
            continue
        start, end = part[0].start, part[3].end
        edit = (start, end, number)
        notations.add("MOE0109", part[1].start, part[2].end, "`**` is no operator here", f"write `{number}`", edit)
        kept.append(Token("NUMBER", number, start, end))
        at += 4
    return kept


def _power(part: list[Token]) -> str | None:
    """The number that `base ** exponent` is; None for anything else."""
    if [token.kind for token in part] != ["NUMBER", "STAR", "STAR", "NUMBER"] or part[1].end != part[2].start:
        return None
    base, exponent = part[0].text.replace("_", ""), part[3].text.replace("_", "")
    if not (base.isdecimal() and exponent.isdecimal()) or int(base) > 1000 or int(exponent) > 50:
        return None
    power = int(base) ** int(exponent)
    return f"{power:_}" if power <= LARGEST_POWER else None


def variables(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `${LR}` and `$LR`, which a shell would fill in, as the constant `LR`; replaces them where there is one."""
    constants = {name.text for word, name in pairwise(tokens) if word.kind == "LET"}
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        dollar, *behind = tokens[at : at + 4]
        kinds = [token.kind for token in behind]
        braced = kinds == ["LBRACE", "NAME", "RBRACE"]
        if dollar.text != "$" or not (braced or kinds[:1] == ["NAME"]):
            kept.append(dollar)
            at += 1
            continue
        name, last = (behind[1], behind[2]) if braced else (behind[0], behind[0])
        message = "no variables of a shell are filled in here"
        help = (
            f"write `let {name.text} = …` at the top of the file, and `{name.text}` here; "
            f"`moec compile --let {name.text}=…` gives it another value"
        )
        edits = [(dollar.start, last.end, name.text)] if name.text in constants else []
        notations.add("MOE0109", dollar.start, last.end, message, help, *edits, habit="variables")
        kept.append(name)
        at += 4 if braced else 2
    return kept
