"""Finds the parts of a Spec that nothing compiles yet by their marks in the schema.

Node classes with `implemented = False`, and fields or values marked `NotYet`. To implement a word, remove its mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Label
from moec.grammar.schema import CallKind, Field, Kind, ListKind, WordKind, fields
from moec.grammar.source import Span
from moec.grammar.spec.base import Node


def marked(node: Node, at: Span | None, seen: set[int]) -> Iterator[Diagnostic]:
    """Diagnostics for the marked parts of `node`; does not look inside a marked part."""
    for known in fields(type(node)).values():
        value = getattr(node, known.name)
        if value is None or (not known.required and value == known.default):
            continue
        span = node.span(known.name) or at
        what = _marked(known, value)
        if what:
            mark = known.not_yet
            yield refused(span, what, _way_out(known), numbers=mark is not None and mark.numbers)
            continue
        for inner in value if isinstance(value, tuple) else (value,):
            if not isinstance(inner, Node):
                continue
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            if type(inner).implemented:
                yield from marked(inner, span, seen)
            else:
                yield refused(inner.span() or span, f"`{inner.word}`", _listed(known), numbers=False)


def _marked(known: Field, value: object) -> str:
    """The diagnostics of a field whose values nothing compiles yet."""
    mark = known.not_yet
    if mark is None or (mark.neutral is not None and value == mark.neutral):
        return ""
    if not mark.words:
        return f"`{known.word}`"
    return f"`{known.word} = {value}`" if value in mark.words else ""


def _way_out(known: Field) -> str:
    mark = known.not_yet
    if mark is None or not mark.words:
        return ""
    return mark.help or _listed(known)


def _listed(known: Field) -> str:
    """The words that can stand in this field and do compile."""
    words = sorted(_words(known.kinds) - set(known.not_yet.words if known.not_yet else ()))
    return f"today: {', '.join(words)}" if words else ""


def _words(kinds: tuple[Kind, ...]) -> set[str]:
    words: set[str] = set()
    for kind in kinds:
        match kind:
            case CallKind():
                words |= {word for word, cls in kind.classes.items() if cls.implemented}
            case WordKind():
                words |= set(kind.values)
            case ListKind():
                words |= _words(kind.items)
    return words


NUMBERS = "that changes the numbers that the model computes"
SPEED = "that changes only speed and memory, not the results"


def elsewhere(span: Span | None, what: str, help: str) -> Diagnostic:
    """The diagnostic of something that compiles in another kind of file, which `help` names."""
    return diagnose("MOE0202", span, f"moec cannot compile {what} yet", help=help)


def refused(
    span: Span | None, what: str, help: str, *, numbers: bool | None = True, labels: Sequence[Label] = ()
) -> Diagnostic:
    """The diagnostic of something that is known, and that nothing compiles yet.

    `numbers`: whether the model computes other numbers without the word, or only differs in speed and memory; None if
    nothing changes.
    """
    effect = "that changes nothing else" if numbers is None else NUMBERS if numbers else SPEED
    text = f"{help}; {effect}" if help else f"leave it out: {effect}"
    return diagnose("MOE0202", span, f"moec cannot compile {what} yet", labels=labels, help=text)
