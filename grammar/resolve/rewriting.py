"""Tries expressions as values of a field, and rewrites foreign ones as moec writes them.

Imported where there is an error. A text is tried before it is offered: it must give a value without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from moec.grammar.checking.marks import marked
from moec.grammar.foreign.lookup import defaults_elsewhere, synonym
from moec.grammar.resolve.expected import plain_words
from moec.grammar.resolve.scope import BROKEN, Broken, Scope
from moec.grammar.resolve.values import resolve
from moec.grammar.schema import CallKind, Field, Kind, ListKind, NumberKind, positional
from moec.grammar.spec.base import Node
from moec.grammar.syntax.parser import parse_value
from moec.grammar.syntax.tree import Expression, Name, Negative, Number, Operation, String
from moec.grammar.syntax.tree import Sequence as ListValue

_TIMES = re.compile(r"([0-9_.]+)[xX]")


def value_in(scope: Scope, known: Field, expression: Expression) -> object:
    """The value of `expression` in the field `known`; BROKEN if it has an error, or cannot be compiled yet."""
    trial = Scope(lets=scope.lets, trial=True)
    value = resolve(trial, known.kinds, expression, known)
    mark = known.not_yet
    if trial.diagnostics or (mark and (not mark.words or value in mark.words)):
        return BROKEN
    for node in value if isinstance(value, tuple) else (value,):
        if isinstance(node, Node) and (not node.implemented or any(marked(node, None, set()))):
            return BROKEN
    return value


def value_or_fixable(scope: Scope, known: Field, expression: Expression) -> tuple[object, bool]:
    """The value of `expression` in the field `known`, and whether it fits there, as it is or after fixes.

    Mistakes inside of it are diagnosed if all have fixes; otherwise it may be meant for another field.
    """
    value = value_in(scope, known, expression)
    if not isinstance(value, Broken):
        return value, True
    inner = Scope(lets=scope.lets)
    resolve(inner, known.kinds, expression, known)
    is_certain = bool(inner.diagnostics) and all(diagnostic.fix for diagnostic in inner.diagnostics)
    if is_certain:
        scope.diagnostics += inner.diagnostics
        scope.moved |= inner.moved
    return BROKEN, is_certain


def rewritten(scope: Scope, known: Field, value: Expression) -> tuple[str, str] | None:
    """The text that is equal to `value` in the field `known`, and a help; None if that is not certain."""
    for text, help in _rewritings(known.kinds, value):
        if has_value(scope, known, text):
            return text, help
    return None


def has_value(scope: Scope, known: Field, text: str) -> bool:
    """Whether `text` is a value in the field `known`."""
    expression, diagnostics = parse_value(known.word, text)
    return expression is not None and not diagnostics and not isinstance(value_in(scope, known, expression), Broken)


def _rewritings(kinds: Sequence[Kind], value: Expression) -> Iterator[tuple[str, str]]:
    """Texts to try, the most literal first."""
    text = text_of(value)
    if isinstance(value, String):
        plain = value.value.strip()
        yield plain, f"without quotes: `{plain}`"
        if not defaults_elsewhere(synonym(plain) or plain.lower()):
            yield plain.lower(), f"here it is written `{plain.lower()}`"
        text, value = plain, Name(plain, value.span)
    if isinstance(value, Name | Number) and (same := synonym(text)) and not defaults_elsewhere(same):
        yield same, f"here it is written `{same}`"
    if isinstance(value, ListValue) and len(value.items) == 1:
        yield text_of(value.items[0]), f"one value, without brackets: `{text_of(value.items[0])}`"
    if any(isinstance(kind, ListKind) for kind in kinds) and not isinstance(value, ListValue):
        if isinstance(value, Operation) and all(sign == "+" for sign, _ in value.rest):
            items = ", ".join(text_of(summand) for summand in (value.first, *(summand for _, summand in value.rest)))
            yield f"[{items}]", f"several are a list: `[{items}]`"
        yield f"[{text}]", f"a list is written in brackets, even with one element: `[{text}]`"
    if isinstance(value, Operation) and len(value.rest) == 1 and value.rest[0][0] == "*":
        first = (
            value.first.items[0] if isinstance(value.first, ListValue) and len(value.first.items) == 1 else value.first
        )
        last = value.rest[0][1]
        if isinstance(last, ListValue) and len(last.items) == 1:
            yield (
                f"{text_of(value.first)} * {text_of(last.items[0])}",
                f"one value, without brackets: `{text_of(value.first)} * {text_of(last.items[0])}`",
            )
        swapped = f"{text_of(value.rest[0][1])} * {text_of(first)}"
        yield swapped, f"the number comes first: `{swapped}`"
    yield from _calls(kinds, value, text)


def _calls(kinds: Sequence[Kind], value: Expression, text: str) -> Iterator[tuple[str, str]]:
    """`factor(1.25)` for 1.25, and `rope()` for true, where only one call can be meant.

    A whole number in place of a factor or rate is ambiguous: `capacity = 64` may be meant as 64 places.
    """
    classes = {word: cls for kind in kinds if isinstance(kind, CallKind) for word, cls in kind.classes.items()}
    if isinstance(value, Number | Negative):
        if times := _TIMES.fullmatch(text):
            text = times[1]
            yield text, f"write `{text}`"
        taking = [word for word, cls in classes.items() if positional(cls)]
        if len(taking) == 1 and not (text.isdecimal() and _takes_fraction(classes[taking[0]])):
            yield f"{taking[0]}({text})", f"write `{taking[0]}({text})`"
    says_yes = isinstance(value, Name) and text.lower() in ("true", "yes", "on")
    if says_yes and len(classes) == 1 and plain_words(kinds) <= {"none"}:
        (word,) = classes
        yield f"{word}()", f"a call, not a switch: write `{word}()`; for none, leave the name out"


def _takes_fraction(cls: type[Node]) -> bool:
    """Whether the first argument by position is a number that need not be whole."""
    return any(isinstance(kind, NumberKind) and not kind.whole for kind in positional(cls)[0].kinds)


def text_of(value: Expression) -> str:
    """The text of a value in its file."""
    return value.span.source.text[value.span.start : value.span.end]
