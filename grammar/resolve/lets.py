"""`let` constants and their overrides, in the order read.

A `let` may only use earlier `let`s, so there are no cycles, one pass computes all values, and long chains need no
recursion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moec.grammar.diagnostics.diagnostic import Label
from moec.grammar.resolve.numbers import compute, is_arithmetic
from moec.grammar.resolve.scope import BROKEN, Broken, Constant, Scope
from moec.grammar.source import Source, Span
from moec.grammar.suggest import advice
from moec.grammar.syntax.brackets import MAX_NESTING
from moec.grammar.syntax.parser import parse_value
from moec.grammar.syntax.tree import (
    Call,
    Expression,
    Let,
    Name,
    Negative,
    Operation,
    Range,
)
from moec.grammar.syntax.tree import (
    Sequence as ListValue,
)

MAX_SIZE = 10_000
"""Most parts of one value after its `let` names are replaced: nested lists could otherwise grow without bound."""


def declare_lets(scope: Scope, lets: Sequence[Let], overrides: Mapping[str, str | int | float]) -> None:
    """Put `lets` into scope, with `overrides` (from `--let name=value`) in the place of their values."""
    first: dict[str, Let] = {}
    for let in lets:
        first.setdefault(let.name.text, let)
    replaced = dict(_overrides(scope, overrides, first))
    for let in lets:
        name = let.name.text
        if first[name] is not let:
            label = Label(span=first[name].name.span, message="first declared here")
            scope.error("MOE0204", let.name.span, f"`{name}` is a constant already", label)
            continue
        value = replaced.get(name, let.value)
        if isinstance(value, Broken):
            scope.lets[name] = Constant(BROKEN, Label(span=let.value.span, message=""))
            continue
        message = f"`{name}` is set here" if name in replaced else f"`{name}` is declared here"
        constant = _constant(scope, value, first, Label(span=value.span, message=message))
        own = (value.span.source.text,) if name in replaced else ()
        used = (part.text for _, part in _parts(value) if isinstance(part, Name) and part.text in scope.lets)
        texts = tuple(dict.fromkeys((*own, *(text for part in used for text in scope.lets[part].overrides))))
        scope.lets[name] = constant._replace(overrides=texts) if texts else constant


def _overrides(
    scope: Scope, overrides: Mapping[str, str | int | float], lets: Mapping[str, Let]
) -> Iterator[tuple[str, Expression | Broken]]:
    for name, override in overrides.items():
        text = str(override).lower() if isinstance(override, bool) else str(override)
        if name not in lets:
            line = f"{name}={text}"
            span = Span(Source("--let", line), 0, len(name))
            help = advice(name, lets) or "the file declares none"
            scope.error("MOE0213", span, "no file that was read declares it", help=help)
            continue
        value, diagnostics = parse_value(name, text)
        scope.diagnostics += diagnostics
        yield name, value or BROKEN


def _constant(scope: Scope, value: Expression, first: Mapping[str, Let], place: Label) -> Constant:
    """The constant of a `let` with this value; `BROKEN` after an error. `first`: the first `let` of each name."""
    nesting = _nesting(scope, value, first)
    if nesting is None:
        return Constant(BROKEN, place)
    depth, size = nesting
    if depth > 2 * MAX_NESTING or size > MAX_SIZE:
        message = f"more than {MAX_SIZE:_} parts, or more than {2 * MAX_NESTING} inside one another"
        scope.error("MOE0403", place.span, message)
        return Constant(BROKEN, place)
    if isinstance(value, Name) and value.text in scope.lets:
        origin = scope.lets[value.text]
        if isinstance(origin.value, Broken) or origin.number:
            return Constant(origin.value, place, origin.number)
    if not is_arithmetic(scope, value):
        return Constant(value, place, None, depth, size)
    number = compute(scope, value)
    if isinstance(number, Broken):
        return Constant(BROKEN, place)
    return Constant(value, place, number)


def _nesting(scope: Scope, value: Expression, first: Mapping[str, Let]) -> tuple[int, int] | None:
    """The depth of `value` and the number of its parts after its `let` names are replaced.

    None after an error: a name that a later `let` declares.
    """
    depth, size = 1, 1
    for level, part in _parts(value):
        if not isinstance(part, Name) or part.text not in first:
            depth, size = max(depth, level), size + 1
            continue
        constant = scope.lets.get(part.text)
        if constant is None:
            label = Label(span=first[part.text].name.span, message="declared here")
            scope.error("MOE0214", part.span, f"`{part.text}` is not known yet", label)
            return None
        if constant.number is None:  # a number is computed already
            depth, size = max(depth, level + constant.depth), size + constant.size
    return depth, size


def _parts(value: Expression, level: int = 1) -> Iterator[tuple[int, Expression]]:
    """Every expression in `value` with its nesting depth, which the parser bounds."""
    yield level, value
    parts: tuple[Expression, ...] = ()
    match value:
        case Call():
            parts = tuple(argument.value for argument in value.arguments)
        case ListValue():
            parts = value.items
        case Operation():
            parts = (value.first, *(operand for _, operand in value.rest))
        case Negative():
            parts = (value.operand,)
        case Range():
            parts = tuple(part for part in (value.first, value.last, value.step) if part is not None)
    for part in parts:
        yield from _parts(part, level + 1)
