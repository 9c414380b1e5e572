"""Reads the attributes of an op: `{axis = tp, weights = [0.01, 0.001]}`."""

from __future__ import annotations

import json
import math
import re

from moec.passes.ir.ir_error import UnreadableLineError, at_most, quoted
from moec.passes.ir.limits import MAX_DIGITS, MAX_NESTING, MAX_OPERANDS, MAX_QUOTED
from moec.passes.ir.value import Attribute

STRING = r'"(?:[^"\\]|\\.)*+"'
_NAMED = re.compile(r"([a-z_]++) = ")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*+")
_NUMBER = re.compile(r"-?[0-9][0-9.e+-]*+")
_INTEGER = re.compile(rf"-?[0-9]{{1,{MAX_DIGITS}}}")
_FLOAT = re.compile(r"-?[0-9]{1,17}(?:\.[0-9]{1,25})?(?:e[+-][0-9]{1,3})?")
_STRING = re.compile(STRING)


def read_attributes(text: str, start: int) -> tuple[dict[str, Attribute], int]:
    """The attributes in the braces that open at `start`, and the index after them. Raises `UnreadableLineError`."""
    attributes: dict[str, Attribute] = {}
    at = start + 1
    while True:
        named = _NAMED.match(text, at)
        if named is None:
            raise UnreadableLineError(f"an attribute is wanted at {_shown(text, at)}")
        if named[1] in attributes:
            raise UnreadableLineError(f"the attribute {named[1]!r} stands twice")
        attributes[named[1]], at = _value(text, named.end(), 0)
        if text.startswith("}", at):
            return attributes, at + 1
        at = _comma(text, at, "}")


def _value(text: str, at: int, depth: int) -> tuple[Attribute, int]:
    if text.startswith("[", at):
        return _list(text, at, depth + 1)
    if (match := _WORD.match(text, at)) is not None:
        return {"true": True, "false": False}.get(match[0], match[0]), match.end()
    if (match := _NUMBER.match(text, at)) is not None:
        return _number(match[0]), match.end()
    if (match := _STRING.match(text, at)) is not None:
        return unquoted(match[0]), match.end()
    raise UnreadableLineError(f"a value is wanted at {_shown(text, at)}")


def _list(text: str, at: int, depth: int) -> tuple[tuple[Attribute, ...], int]:
    if depth > MAX_NESTING:
        raise UnreadableLineError(f"more than {MAX_NESTING} lists stand inside one another")
    items: list[Attribute] = []
    at += 1
    while not text.startswith("]", at):
        if items:
            at = _comma(text, at, "]")
        item, at = _value(text, at, depth)
        items.append(item)
        at_most(len(items), MAX_OPERANDS, "items in a list")
    return tuple(items), at + 1


def _comma(text: str, at: int, closing: str) -> int:
    if not text.startswith(", ", at):
        raise UnreadableLineError(f"a comma or {closing!r} is wanted at {_shown(text, at)}")
    return at + 2


def _number(text: str) -> int | float:
    if _INTEGER.fullmatch(text):
        return int(text)
    return finite(text)


def finite(text: str) -> float:
    """The float that `text` prints. Raises `UnreadableLineError` for other text and for infinite values."""
    if not _FLOAT.fullmatch(text):
        raise UnreadableLineError(f"{quoted(text)} is no number that a Program may hold")
    number = float(text)
    if not math.isfinite(number):
        raise UnreadableLineError(f"{quoted(text)} is too large for a float")
    return number


def short_string(text: str) -> str:
    """The name of a Program or a file that `text` prints. Raises `UnreadableLineError`."""
    at_most(len(text), MAX_QUOTED, "characters in a name")
    return unquoted(text)


def unquoted(text: str) -> str:
    """The string that `text`, which matches `STRING`, prints. Raises `UnreadableLineError` unless it is printable."""
    try:
        string = json.loads(text)
    except ValueError as error:
        raise UnreadableLineError(f"{quoted(text)} is no string") from error
    assert isinstance(string, str)
    if not string.isprintable():
        raise UnreadableLineError(f"{quoted(text)} holds characters that do not print")
    return string


def _shown(text: str, at: int) -> str:
    return quoted(text[at : at + 20])
