"""Values: from an expression and the kinds that a field takes to the Spec's value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moec.grammar.resolve.numbers import is_arithmetic, number
from moec.grammar.resolve.parts import Part, Stated, build, report_twice
from moec.grammar.resolve.scope import BROKEN, Broken, Scope, Written
from moec.grammar.schema import (
    CallKind,
    Field,
    Kind,
    ListKind,
    NumberKind,
    ProductKind,
    RangeKind,
    ReferenceKind,
    TextKind,
    WordKind,
    fields,
    positional,
)
from moec.grammar.spec.base import Node, at_least
from moec.grammar.spec.parallel import LayerRange
from moec.grammar.syntax.tree import Argument, Call, Expression, Name, Operation, Range, String
from moec.grammar.syntax.tree import Sequence as ListValue


def resolve(scope: Scope, kinds: Sequence[Kind], expression: Expression, known: Field | None = None) -> object:
    """The value of `expression` as any of `kinds`, in the field `known`; BROKEN after a diagnostic."""
    written = scope.follow(expression)
    value = written.value
    if isinstance(value, Broken):
        return BROKEN
    for kind in kinds:
        match kind:
            case NumberKind() if is_arithmetic(scope, value):
                return number(scope, written, kind, known)
            case RangeKind() if is_arithmetic(scope, value):
                return _layers(scope, written, written)
            case RangeKind() if isinstance(value, Range) and value.step is None:
                return _layers(scope, scope.follow(value.first), scope.follow(value.last))
            case TextKind() if isinstance(value, String):
                return value.value
            case ReferenceKind() if isinstance(value, String):
                return value.value
            case ReferenceKind() if isinstance(value, Name):
                return value.text
            case WordKind() if isinstance(value, Name) and value.text in kind.values:
                return kind.values[value.text]
            case CallKind() if isinstance(value, Name | Call) and _word(value) in kind.classes:
                return _call(scope, kind.classes[_word(value)], written)
            case ProductKind() if isinstance(value, Operation) and not is_arithmetic(scope, value):
                return _product(scope, kind.cls, written, value)
            case ListKind() if isinstance(value, ListValue):
                items = [resolve(scope, kind.items, item) for item in value.items]
                return BROKEN if any(isinstance(item, Broken) for item in items) else tuple(items)
    from moec.grammar.resolve.misfit import diagnose_misfit  # good files do without it

    return diagnose_misfit(scope, known or Field("", "", tuple(kinds), True, None, ""), written, value)


def _layers(scope: Scope, first: Written, last: Written) -> LayerRange | Broken:
    kind = NumberKind(whole=True, unit="", bounds=(at_least(0),))
    low, high = number(scope, first, kind), number(scope, last, kind)
    return BROKEN if isinstance(low, Broken) or isinstance(high, Broken) else LayerRange(int(low), int(high))


def _word(value: Name | Call) -> str:
    return value.text if isinstance(value, Name) else value.name.text


def _call(scope: Scope, cls: type[Node], written: Written) -> Node | Broken:
    """A Node from `word(…)`, or from `word` alone."""
    value = written.value
    part = Part(cls, written.span)
    if isinstance(value, Call):
        part = _arguments(scope, cls, value, written)
    return build(scope, part)


def _arguments(scope: Scope, cls: type[Node], call: Call, written: Written) -> Part:
    by_position = positional(cls)
    stated: dict[str, Stated] = {}
    incomplete = False
    for index, argument in enumerate(call.arguments):
        known = _parameter(scope, cls, call, index, argument, by_position)
        if known is None:
            if argument.name is None or not (
                meant := _unknown(scope, cls, argument.name, argument.value, call, stated)
            ):
                incomplete = True
            else:
                stated.setdefault(meant[0], Stated(meant[1], argument.value.span, argument.name.span))
            continue
        place = argument.name.span if argument.name else argument.value.span
        if known.word in stated:
            report_twice(scope, known.word, place, stated[known.word].name)
            continue
        value = resolve(scope, known.kinds, argument.value, known)
        stated[known.word] = Stated(value, argument.value.span, place)
    return Part(cls, written.span, stated=stated, incomplete=incomplete)


def _parameter(
    scope: Scope, cls: type[Node], call: Call, index: int, argument: Argument, by_position: list[Field]
) -> Field | None:
    """The field of an argument; None after a diagnostic, or for an unknown name."""
    known = fields(cls)
    if argument.name is None:
        if any(earlier.name for earlier in call.arguments[:index]):
            scope.error("MOE0210", argument.span, "an argument without a name comes before those with one")
            return None
        if index < len(by_position):
            return by_position[index]
        if index > len(by_position):
            return None  # the first one too many is diagnosed
        takes = f"`{cls.word}` takes {len(by_position) or 'no'} argument{'s' * (len(by_position) != 1)} without a name"
        names = ", ".join(f"`{word} = …`" for word in known)
        scope.error("MOE0210", argument.span, takes, help=f"by name it takes {names}" if names else "")
        return None
    return known.get(argument.name.text)


def _unknown(
    scope: Scope, cls: type[Node], name: Name, value: Expression, call: Call, stated: Mapping[str, Stated]
) -> tuple[str, object] | None:
    """Diagnose a name that `cls` does not have; returns what was probably meant."""
    from moec.grammar.resolve.unknown import betas, unknown_name  # good files do without it

    if betas(scope, name, value, fields(cls)):
        return None
    beside = {argument.name.text: argument.name.span for argument in call.arguments if argument.name}
    beside |= {word: argument.name for word, argument in stated.items()}
    return unknown_name(scope, cls, name, value, beside)


def _product(scope: Scope, cls: type[Node], written: Written, product: Operation) -> Node | Broken:
    """`count * body`."""
    count, body = fields(cls).values()
    *factors, last = [product.first, *(operand for _, operand in product.rest)]
    if any(operator != "*" for operator, _ in product.rest):
        return scope.error("MOE0206", written, f"expected `{count.word} * {body.word}`")
    first: Expression = factors[0]
    if len(factors) > 1:
        inner = first.span.to(factors[-1].span)
        first = Operation(first, product.rest[:-1], inner)  # `2 * n * swiglu(64)`
    counted = resolve(scope, count.kinds, first, count)
    described = resolve(scope, body.kinds, last, body)
    stated = {
        count.word: Stated(counted, first.span, first.span),
        body.word: Stated(described, last.span, last.span),
    }
    return build(scope, Part(cls, written.span, stated=stated))
