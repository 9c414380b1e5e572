"""Values: from an expression and the kinds that a field takes to the Spec's value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moec.grammar.resolve.numbers import compute, is_arithmetic, number
from moec.grammar.resolve.parts import Given, Part, build, report_twice
from moec.grammar.resolve.scope import BROKEN, Broken, Scope, Written
from moec.grammar.schema import (
    CallKind,
    Field,
    Kind,
    ListKind,
    NumberKind,
    ProductKind,
    ReferenceKind,
    TextKind,
    WordKind,
    fields,
    positional,
)
from moec.grammar.spec.base import Node
from moec.grammar.spec.experts import Activated
from moec.grammar.suggest import advice, nearest
from moec.grammar.syntax.tree import Argument, Call, Expression, Name, Negative, Number, Operation, Range, String
from moec.grammar.syntax.tree import Sequence as ListValue
from moec.grammar.units import EXAMPLES


def resolve(scope: Scope, kinds: Sequence[Kind], expression: Expression) -> object:
    """The value of `expression` as any of `kinds`; BROKEN after a diagnostic."""
    written = scope.follow(expression)
    value = written.value
    if isinstance(value, Broken):
        return BROKEN
    for kind in kinds:
        match kind:
            case NumberKind() if is_arithmetic(scope, value):
                return number(scope, written, kind)
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
    return _misfit(scope, kinds, written, value)


def unknown(
    scope: Scope, name: Name | Written, word: str, allowed: Iterable[str], block: type[Node] | None = None
) -> str | None:
    """Diagnose a word that is not allowed here; returns the word that was probably meant.

    A word of a call inside of `block`, where it stands, has that call as its help.
    """
    allowed = sorted(allowed)
    target = name.span if isinstance(name, Name) else name
    meant = nearest(word, allowed)
    instead = meant if isinstance(name, Name) else None
    owner = None if meant or block is None else _owner(block, word)
    help = f"it belongs into {owner}" if owner else advice(word, allowed)
    scope.error("MOE0201", target, f"`{word}` is not known here", help=help, instead=instead)
    return meant


def _owner(block: type[Node], word: str) -> str | None:
    """The calls that have `word`, as in `` `attention`: `mha(…)` ``, of this block or of the blocks in it."""
    for known in fields(block).values():
        classes = [cls for kind in known.kinds if isinstance(kind, CallKind) for cls in kind.classes.values()]
        if owners := [f"`{cls.word}(…)`" for cls in classes if word in fields(cls)]:
            return f"`{known.word}`: {' or '.join(owners)}"
        if known.block and (found := _owner(known.block.cls, word)):
            return found
    return None


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
    given: dict[str, Given] = {}
    incomplete = False
    for index, argument in enumerate(call.arguments):
        known = _parameter(scope, cls, call, index, argument, by_position)
        if known is None:
            incomplete = True
            continue
        place = argument.name.span if argument.name else argument.value.span
        if known.word in given:
            report_twice(scope, known.word, place, given[known.word].name)
            continue
        value = resolve(scope, known.kinds, argument.value)
        given[known.word] = Given(value, argument.value.span, place)
    return Part(cls, written.span, given=given, incomplete=incomplete)


def _parameter(
    scope: Scope, cls: type[Node], call: Call, index: int, argument: Argument, by_position: list[Field]
) -> Field | None:
    """The field that an argument is for, or None after a diagnostic."""
    known = fields(cls)
    if argument.name is None:
        if any(earlier.name for earlier in call.arguments[:index]):
            scope.error("MOE0210", argument.span, "an argument without a name stands before those with one")
            return None
        if index < len(by_position):
            return by_position[index]
        takes = f"`{cls.word}` takes {len(by_position) or 'no'} argument{'s' * (len(by_position) != 1)} without a name"
        names = ", ".join(f"`{word} = …`" for word in known)
        scope.error("MOE0210", argument.span, takes, help=f"by name it takes {names}" if names else "")
        return None
    if argument.name.text not in known:
        unknown(scope, argument.name, argument.name.text, known)
        return None
    return known[argument.name.text]


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
    counted = resolve(scope, count.kinds, first)
    described = resolve(scope, body.kinds, last)
    given = {
        count.word: Given(counted, first.span, first.span),
        body.word: Given(described, last.span, last.span),
    }
    return build(scope, Part(cls, written.span, given=given))


def _misfit(scope: Scope, kinds: Sequence[Kind], written: Written, value: Expression) -> Broken:
    """Diagnose a value that no kind takes."""
    words = _words(kinds)
    if isinstance(value, Name | Call) and words:
        word = _word(value)
        if isinstance(value, Call) and word in _plain_words(kinds):
            return scope.error("MOE0206", written, f"`{word}` takes no arguments", help=f"write `{word}`")
        at = written if written.lets else (value.name if isinstance(value, Call) else value)
        unknown(scope, at, word, words | (set(scope.lets) if isinstance(value, Name) else set()))
        return BROKEN
    if isinstance(value, Name) and any(isinstance(kind, NumberKind) for kind in kinds):
        help, instead = advice(value.text, scope.lets), nearest(value.text, scope.lets)
        return scope.error("MOE0201", written, "no `let` of this name", help=help, instead=instead)
    if isinstance(value, Operation) and any(isinstance(kind, NumberKind) for kind in kinds):
        compute(scope, value)  # which reports why it is no number
        return BROKEN
    expected = " or ".join(_described(kind) for kind in kinds)
    help, instead = "", None
    if isinstance(value, String) and value.value in words:
        help, instead = f"without quotes: `{value.value}`", value.value
    elif any(isinstance(kind, ListKind) for kind in kinds):
        help = "a list stands in brackets, also if it has one element: `[…]`"
    found = _found(value)
    if isinstance(value, Operation) and not is_arithmetic(scope, value):
        found, help = "a product", help or _one_wide(kinds, value)
    return scope.error("MOE0206", written, f"expected {expected}, found {found}", help=help, instead=instead)


def _one_wide(kinds: Sequence[Kind], product: Operation) -> str:
    """Help for `2 * swiglu(4)` where one feed-forward stands: their sum is one of their total width."""
    count, last = product.first, product.rest[-1][1]
    classes = {word: cls for kind in kinds if isinstance(kind, CallKind) for word, cls in kind.classes.items()}
    if not isinstance(last, Call) or not issubclass(classes.get(last.name.text, Node), Activated):
        return ""
    words = "the sum of several is one of their total width"
    match (count, *(argument.value for argument in last.arguments[:1])):
        case (Number() | Name() as number, Number() | Name() as width) if len(product.rest) == 1:
            return f"{words}: `{last.name.text}({number.text} * {width.text})`"
        case _:
            return words


def _words(kinds: Iterable[Kind]) -> set[str]:
    calls = {word for kind in kinds if isinstance(kind, CallKind) for word in kind.classes}
    return calls | _plain_words(kinds)


def _plain_words(kinds: Iterable[Kind]) -> set[str]:
    return {word for kind in kinds if isinstance(kind, WordKind) for word in kind.values}


def _described(kind: Kind) -> str:
    match kind:
        case NumberKind():
            name = "a whole number" if kind.whole else "a number"
            return f"{name} such as `{EXAMPLES[kind.unit]}`" if kind.unit else name
        case TextKind():
            return 'a "text"'
        case WordKind():
            return " or ".join(f"`{word}`" for word in kind.values)
        case CallKind():
            return " or ".join(f"`{word}`" for word in kind.classes)
        case ProductKind():
            return " * ".join(f"`{word}`" for word in fields(kind.cls))
        case ListKind():
            return f"a list of {' or '.join(_described(item) for item in kind.items)}"
        case ReferenceKind():
            return f"the name of a {kind.block}"
        case _:
            return "a block"


def _found(value: Expression) -> str:
    match value:
        case Number() | Negative() | Operation():
            return "a number"
        case String():
            return "a text"
        case ListValue():
            return "a list"
        case Range():
            return "a range"
        case Call():
            return f"`{value.name.text}(…)`"
        case Name():
            return f"`{value.text}`"
