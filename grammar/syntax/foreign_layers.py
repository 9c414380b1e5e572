"""Layers as other languages choose them: `layers 2:`, `layers -1`, `layers 0-3`, `layers 0, 1`, `layers *`."""

from __future__ import annotations

import re

from moec.grammar.syntax.notations import Notations
from moec.grammar.syntax.tokens import Token, lex

SELECTOR_ENDS = frozenset(("SEPARATOR", "LBRACE", "RBRACE", "EQUAL"))
"""Tokens that end the selector of `layers`."""
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(\d+)?)?")
_RANGE = re.compile(r"(-?\d+)?\.\.\.?(-?\d+)?(?:(?:\.\.|:|step|by)(\d+))?")
_FROM_END = re.compile(r"-(\d+)")
_DASH = re.compile(r"(\d+)-(\d+)")
_COMMAS = re.compile(r"\d+(,\d+)+")

_FROM_ZERO = "layers are counted from 0: the last is `depth` minus 1"

Reading = tuple[str, str, str]
"""What a selector is here (empty if that is not known), what is wrong with it, and a help."""


def layer_selectors(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads what stands behind `layers`; the model's `depth` counts from the end, if it is a number."""
    depth = _depth(tokens)
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        token, at = tokens[at], at + 1
        kept.append(token)
        if token.text != "layers" or not (len(kept) == 1 or kept[-2].kind in ("SEPARATOR", "LBRACE")):
            continue
        end = next((i for i in range(at, len(tokens)) if tokens[i].kind in SELECTOR_ENDS), len(tokens))
        if end == at:
            continue
        selector = tokens[at:end]
        reading = _read(_joined(selector), depth)
        if reading is None:
            continue
        text, message, help = reading
        start, stop = selector[0].start, selector[-1].end
        blank = " " if start == token.end else ""
        edits = [(start, stop, f"{blank}{text}")] if text else []
        if message == _ALL:
            edits = [(token.end, stop, "")]
        notations.add("MOE0109", start, stop, message, help or f"write `layers {text}`", *edits)
        parsed = lex(text or re.sub(r"\D*(\d*).*", r"\1", "".join(each.text for each in selector), flags=re.DOTALL))
        kept += [each._replace(start=start, end=stop) for each in parsed]
        at = end
    return kept


def _joined(selector: list[Token]) -> str:
    """The selector without blanks and digits' `_`; two numbers stay two."""
    text = ""
    for token in selector:
        apart = token.kind == "NUMBER" and text[-1:].isdigit()
        text += " " * apart + token.text.replace("_", "")
    return text


_ALL = "a block of all layers names none"


def _read(text: str, depth: int | None) -> Reading | None:
    """The selector that `text`, without blanks, is meant as; None if it is one of this language, or nothing known."""
    if text.startswith("[") and text.endswith("]") and ":" in text:  # `layers[0:2]` of Python
        text = text[1:-1]
    if text in ("all", "*", '"*"', ":"):
        return ("", _ALL, "write `layers { … }`: without numbers it is all layers") if text != ":" else None
    if match := _FROM_END.fullmatch(text):
        last = _number(text, depth)
        help = _FROM_ZERO if last is None else f"layers are counted from 0: with `depth = {depth}` write `{last}`"
        return _written(last), "layers are not counted from the end", help
    if (match := _DASH.fullmatch(text)) and int(match[1]) < int(match[2]):
        return f"{match[1]}..{match[2]}", "a range is written with `..`", ""
    if _COMMAS.fullmatch(text):
        return f"[{text.replace(',', ', ')}]", "several layers are a list", ""
    if re.fullmatch(r"\d+:", text):
        alone, to_end = text[:-1], "LAST" if depth is None else str(depth - 1)
        return "", "is this layer alone, or all from it on?", f"write `layers {alone}`, or `layers {alone}..{to_end}`"
    if match := _SLICE.fullmatch(text):
        return _range(match, depth, "a range is not a slice", exclusive=True)
    match = _RANGE.fullmatch(text)
    if match is None or re.fullmatch(r"\d+\.\.\d+(step\d+)?", text):
        return None
    negative = any(end is not None and end.startswith("-") for end in match.groups()[:2])
    if negative:
        return _range(match, depth, "layers are not counted from the end")
    complete = match[1] is not None and match[2] is not None
    return _range(match, depth, "a range has two dots, then its step" if complete else "a range has both ends")


def _range(match: re.Match[str], depth: int | None, message: str, *, exclusive: bool = False) -> Reading:
    """`first..last step n`; `exclusive`: the end is the layer behind the last, as in a slice."""
    first, end, step = match.groups()
    low = _number(first or "0", depth)
    high = _number(end, depth) if end is not None else depth - 1 if depth is not None else None
    if exclusive and end is not None and high is not None:
        high -= 1
    if low is None or high is None or high < low:
        known = "" if low is None else f": `{low}..N`, with N = `depth` - 1"
        return "", message, f"a range has both ends{known}, and includes its last layer"
    text = f"{low}..{high}" + f" step {step}" * bool(step and step != "1")
    return text, message, f"a range includes its last layer: write `{text}`"


def _number(text: str, depth: int | None) -> int | None:
    """The layer's number; None where it is counted from an end that is not known."""
    number = int(text)
    if number >= 0:
        return number
    return depth + number if depth is not None and depth + number >= 0 else None


def _written(number: int | None) -> str:
    return "" if number is None else str(number)


def _depth(tokens: list[Token]) -> int | None:
    """The number of `depth = 32`; None where it is computed, or where a `let` has the name."""
    found = None
    for at, token in enumerate(tokens):
        if token.text != "depth" or [each.kind for each in tokens[at + 1 : at + 2]] != ["EQUAL"]:
            continue
        number, behind = tokens[at + 2 : at + 3], tokens[at + 3 : at + 4]
        if found is not None or (at and tokens[at - 1].kind not in ("SEPARATOR", "LBRACE")):
            return None
        if not number or not number[0].text.replace("_", "").isdecimal():
            return None
        if behind and behind[0].kind not in ("SEPARATOR", "RBRACE", "COMMA"):
            return None
        found = int(number[0].text.replace("_", ""))
    return found
