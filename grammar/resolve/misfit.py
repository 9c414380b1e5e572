"""A value that no kind takes: what was expected, and the same value as it is written here, where that is plain.

Imported where there is an error. A correction is tried before it is offered: it must give a value without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from moec.grammar.aliases import near, synonym
from moec.grammar.marks import marked
from moec.grammar.resolve.numbers import compute, is_arithmetic
from moec.grammar.resolve.scope import BROKEN, Broken, Scope, Written
from moec.grammar.resolve.values import resolve
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
    positional,
)
from moec.grammar.spec.base import Node
from moec.grammar.spec.experts import Activated
from moec.grammar.suggest import advice, meant, nearest
from moec.grammar.syntax.parser import parse_value
from moec.grammar.syntax.tree import Call, Expression, Name, Negative, Number, Operation, Range, String
from moec.grammar.syntax.tree import Sequence as ListValue
from moec.grammar.units import EXAMPLES

_TIMES = re.compile(r"([0-9_.]+)[xX]")
_NONE = frozenset(("none", "null", "nil", "false"))


def fits(scope: Scope, known: Field, expression: Expression) -> object:
    """The value of `expression` in the field `known`; BROKEN if it has an error, or cannot be compiled yet."""
    trial = Scope(lets=scope.lets, trial=True)
    value = resolve(trial, known.kinds, expression, known)
    mark = known.not_yet
    if trial.diagnostics or (mark and ((not mark.words and not mark.lists) or value in mark.words)):
        return BROKEN
    for node in value if isinstance(value, tuple) else (value,):
        if isinstance(node, Node) and (not node.implemented or any(marked(node, None, set()))):
            return BROKEN
    return value


def mended(scope: Scope, known: Field, expression: Expression) -> tuple[object, bool]:
    """The value of `expression` in the field `known`, and whether it stands there as it is or with fixes of its own.

    Mistakes inside of it are diagnosed if each has a fix: else it is not sure that this is its field.
    """
    value = fits(scope, known, expression)
    if not isinstance(value, Broken):
        return value, True
    inner = Scope(lets=scope.lets)
    resolve(inner, known.kinds, expression, known)
    sure = bool(inner.diagnostics) and all(found.fix for found in inner.diagnostics)
    if sure:
        scope.diagnostics += inner.diagnostics
        scope.moved |= inner.moved
    return BROKEN, sure


def corrected(scope: Scope, known: Field, value: Expression) -> tuple[str, str] | None:
    """The text that says in the field `known` what `value` says elsewhere, and why; None where that is not plain."""
    for text, help in _corrections(known.kinds, value):
        expression, diagnostics = parse_value(known.word, text)
        if expression is not None and not diagnostics and not isinstance(fits(scope, known, expression), Broken):
            return text, help
    return None


def _corrections(kinds: Sequence[Kind], value: Expression) -> Iterator[tuple[str, str]]:
    """Texts to try, the most literal first."""
    text = _text(value)
    if isinstance(value, String):
        plain = value.value.strip()
        yield plain, f"without quotes: `{plain}`"
        yield plain.lower(), f"here it is written `{plain.lower()}`"
        text, value = plain, Name(plain, value.span)
    if isinstance(value, Name) and (found := synonym(value.text)):
        yield found, f"here it is written `{found}`"
    if isinstance(value, ListValue) and len(value.items) == 1:
        yield _text(value.items[0]), f"one value, without brackets: `{_text(value.items[0])}`"
    if any(isinstance(kind, ListKind) for kind in kinds) and not isinstance(value, ListValue):
        if isinstance(value, Operation) and all(sign == "+" for sign, _ in value.rest):
            items = ", ".join(_text(each) for each in (value.first, *(each for _, each in value.rest)))
            yield f"[{items}]", f"several are a list: `[{items}]`"
        yield f"[{text}]", f"a list is written in brackets, even with one element: `[{text}]`"
    if isinstance(value, Operation) and len(value.rest) == 1 and value.rest[0][0] == "*":
        first = (
            value.first.items[0] if isinstance(value.first, ListValue) and len(value.first.items) == 1 else value.first
        )
        swapped = f"{_text(value.rest[0][1])} * {_text(first)}"
        yield swapped, f"the number comes first: `{swapped}`"
    yield from _calls(kinds, value, text)


def _calls(kinds: Sequence[Kind], value: Expression, text: str) -> Iterator[tuple[str, str]]:
    """`factor(1.25)` for 1.25, and `rope()` for true, where only one call can be meant.

    A whole number in place of a factor or rate is none: `capacity = 64` may be meant as 64 places.
    """
    classes = {word: cls for kind in kinds if isinstance(kind, CallKind) for word, cls in kind.classes.items()}
    if isinstance(value, Number | Negative):
        if times := _TIMES.fullmatch(text):
            text = times[1]
            yield text, f"write `{text}`"
        taking = [word for word, cls in classes.items() if positional(cls)]
        if len(taking) == 1 and not (text.isdecimal() and _takes_fraction(classes[taking[0]])):
            yield f"{taking[0]}({text})", f"write `{taking[0]}({text})`"
    if (
        isinstance(value, Name)
        and text.lower() in ("true", "yes", "on")
        and len(classes) == 1
        and _plain_words(kinds) <= {"none"}
    ):
        (word,) = classes
        yield f"{word}()", f"write `{word}()`, or leave it out for none"


def _takes_fraction(cls: type[Node]) -> bool:
    """Whether the first argument by position is a number that need not be whole."""
    return any(isinstance(kind, NumberKind) and not kind.whole for kind in positional(cls)[0].kinds)


def misfit(scope: Scope, known: Field, written: Written, value: Expression) -> Broken:
    """Diagnose a value that no kind of `known` takes."""
    kinds = known.kinds
    if scope.trial:
        return scope.error("MOE0206", written, "")
    words = _words(kinds)
    correction = None if written.lets else corrected(scope, known, value)
    if isinstance(value, Name | Call) and words:
        return _unknown_word(scope, known, written, value, correction)
    if correction is None and isinstance(value, Name) and any(isinstance(kind, NumberKind) for kind in kinds):
        help, instead = advice(value.text, scope.lets), meant(value.text, scope.lets)
        if not scope.lets:
            help = f"write {_described(kinds[0])}"
        return scope.error("MOE0201", written, "no `let` of this name", help=help, instead=instead)
    if isinstance(value, Operation) and any(isinstance(kind, NumberKind) for kind in kinds):
        compute(scope, value)  # which reports why it is no number
        return BROKEN
    expected = _expected(kinds)
    instead, help = correction or (None, (isinstance(value, String) and near(value.value)) or _help(known, value))
    found = _found(value)
    if isinstance(value, Operation) and not is_arithmetic(scope, value):
        found, help = "a sum" if value.rest[0][0] == "+" else "a product", help or _one_wide(kinds, value)
    elif isinstance(value, Operation) and isinstance(value.first, Call):
        found = "a sum" if value.rest[0][0] == "+" else "a product"
    return scope.error("MOE0206", written, f"expected {expected}, found {found}", help=help, instead=instead)


def _unknown_word(
    scope: Scope, known: Field, written: Written, value: Name | Call, correction: tuple[str, str] | None
) -> Broken:
    """A word where words stand, but not this one."""
    kinds = known.kinds
    word = value.text if isinstance(value, Name) else value.name.text
    if isinstance(value, Call) and word in _plain_words(kinds):
        return scope.error("MOE0206", written, f"`{word}` takes no arguments", help=f"write `{word}`")
    allowed = sorted(_words(kinds) | (set(scope.lets) if isinstance(value, Name) else set()))
    message = f"`{word}` is not known here"
    if help := near(word):
        return scope.error("MOE0201", value.span if isinstance(value, Name) else value.name.span, message, help=help)
    if correction is not None:
        text, help = correction
        scope.error("MOE0201", value.span, message, help=help, instead=text)
        return BROKEN
    if word.lower() in _NONE and not known.required:
        return scope.error("MOE0201", written, message, help=f"for none, leave `{known.word}` out")
    same = synonym(word) or word.lower()
    mark = known.not_yet
    if mark and same in mark.words and same in allowed:
        help = f"here it is called `{same}`, which moec cannot compile yet: {mark.help or 'leave it out'}"
        return scope.error("MOE0201", written, message, help=help)
    if isinstance(value, Call) and same in allowed and not written.lets:  # only the word is wrong, or arguments too
        name = Name(same, value.name.span)
        scope.error("MOE0201", name.span, message, help=f"here it is called `{same}`", instead=same)
        resolve(scope, kinds, Call(name, value.arguments, value.span), known)
        return BROKEN
    place = written.span if written.lets else (value.name.span if isinstance(value, Call) else value.span)
    near_by, slip = nearest(word, allowed), meant(word, allowed)
    instead = slip if slip is not None and not written.lets and _can_stand(scope, known, value, slip) else None
    target = written if written.lets else place
    help = advice(
        word, allowed if near_by is not None else (_words(kinds) - set(mark.words if mark else ()) or allowed)
    )
    if isinstance(value, Call) and instead is None and any(isinstance(kind, NumberKind) for kind in kinds):
        help = f"write {_expected(kinds)}"  # `zero = stage(2)`: a number is allowed beside the words
    return scope.error("MOE0201", target, message, help=help, instead=instead)


def _can_stand(scope: Scope, known: Field, value: Name | Call, word: str) -> bool:
    """Whether `value` stands here once its word is replaced by `word`."""
    name = Name(word, value.span if isinstance(value, Name) else value.name.span)
    tried = name if isinstance(value, Name) else Call(name, value.arguments, value.span)
    return mended(scope, known, tried)[1]


def _expected(kinds: Sequence[Kind]) -> str:
    """What stands here, in few words: of many calls the first ones."""
    one = [_described(kind) for kind in kinds if not isinstance(kind, ListKind)]
    lists = [kind for kind in kinds if isinstance(kind, ListKind)]
    items = [_described(item) for kind in lists for item in kind.items]
    return " or ".join([*one, *(["a list of these"] if lists and set(items) <= set(one) else map(_described, lists))])


def _help(known: Field, value: Expression) -> str:
    """How a value of this field is written, with the number that was given."""
    kinds = known.kinds
    number = _text(value) if isinstance(value, Number) else ""
    classes = [cls for kind in kinds if isinstance(kind, CallKind) for cls in kind.classes.values()]
    product = next((kind for kind in kinds if isinstance(kind, ProductKind)), None)
    if number and product is not None:
        return f"write the experts' kind and width after their number: `{number} * swiglu(14_336)`"
    taking = [cls for cls in classes if positional(cls)]
    if number and taking:
        return f"write `{taking[0].word}({number})`" + (", or another of these words" if len(classes) > 1 else "")
    if any(isinstance(kind, ListKind) for kind in kinds) and not isinstance(value, ListValue):
        return "a list is written in brackets, even with one element: `[…]`"
    if isinstance(value, ListValue) and not any(isinstance(kind, ListKind) for kind in kinds):
        return "write one value here, not a list"
    return ""


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


def _text(value: Expression) -> str:
    """The text of a value in its file."""
    return value.span.source.text[value.span.start : value.span.end]


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
            return _any_of(list(kind.values))
        case CallKind():
            return _any_of(list(kind.classes))
        case ProductKind():
            return "a product such as `8 * swiglu(14_336)`"
        case ListKind():
            return f"a list of {' or '.join(_described(item) for item in kind.items)}"
        case ReferenceKind():
            return f"the name of a {kind.block}"
        case _:
            return "a block"


MOST_WORDS = 6
"""Up to so many words stand in a message; the help or `moec explain` has all."""


def _any_of(words: list[str]) -> str:
    shown = [f"`{word}`" for word in words[:MOST_WORDS]]
    return " or ".join(shown) if len(words) <= MOST_WORDS else f"{', '.join(shown)}, …"


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
