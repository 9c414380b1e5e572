"""Diagnoses a value that no kind takes: what is expected, and the value as moec writes it, if that is certain.

Imported where there is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from moec.grammar.foreign.lookup import near
from moec.grammar.resolve.expected import expected, supported, words
from moec.grammar.resolve.no_number import NONE, diagnose_no_number
from moec.grammar.resolve.numbers import compute, is_arithmetic
from moec.grammar.resolve.rewriting import rewritten, text_of
from moec.grammar.resolve.scope import BROKEN, Broken, Scope, Written
from moec.grammar.resolve.unknown_words import diagnose_unknown_word
from moec.grammar.schema import CallKind, Field, Kind, ListKind, NumberKind, ProductKind, fields, positional
from moec.grammar.spec.base import Node
from moec.grammar.spec.experts import Activated
from moec.grammar.syntax.tree import Call, Expression, Name, Negative, Number, Operation, Range, String
from moec.grammar.syntax.tree import Sequence as ListValue

NARROW = 32
"""No feed-forward is narrower: a smaller number is meant as the number of experts."""


def diagnose_misfit(scope: Scope, known: Field, written: Written, value: Expression) -> Broken:
    """Diagnose a value that no kind of `known` takes."""
    kinds = known.kinds
    if scope.trial:
        return scope.error("MOE0206", written, "")
    rewriting = None if written.lets else rewritten(scope, known, value)
    if isinstance(value, Name | Call) and words(kinds):
        return diagnose_unknown_word(scope, known, written, value, rewriting)
    if rewriting is None and isinstance(value, Name) and any(isinstance(kind, NumberKind) for kind in kinds):
        return diagnose_no_number(scope, written, value.text, known)
    if isinstance(value, Operation) and any(isinstance(kind, NumberKind) for kind in kinds):
        compute(scope, value)  # which reports why it is no number
        return BROKEN
    instead, help = rewriting or (None, (isinstance(value, String) and near(value.value)) or _help(known, value))
    shown = _kind_of(value)
    if isinstance(value, Operation) and not is_arithmetic(scope, value):
        shown, help = f"`{text_of(value)}`", help or _one_wide(kinds, value)
    elif isinstance(value, Operation) and any(isinstance(part, Call | ListValue) for part in operands(value)):
        shown = f"`{text_of(value)}`"
    wanted = expected(supported(known))
    return scope.error("MOE0206", written, f"expected {wanted}, found {shown}", help=help, instead=instead)


def operands(value: Operation) -> list[Expression]:
    return [value.first, *(operand for _, operand in value.rest)]


def _help(known: Field, value: Expression) -> str:
    """A help with a value of this field, which has the number of the file."""
    kinds = known.kinds
    if known.not_yet and not known.not_yet.words:
        return f"moec cannot compile `{known.word}` yet: leave it out"
    if isinstance(value, Name) and value.text.lower() in NONE and known.word and not known.required:
        return f"for none, leave `{known.word}` out"
    number = text_of(value) if isinstance(value, Number) else ""
    classes = [cls for kind in kinds if isinstance(kind, CallKind) for cls in kind.classes.values()]
    product = next((kind for kind in kinds if isinstance(kind, ProductKind)), None)
    if number and product is not None:
        if times := re.fullmatch(r"(\d+)[xX](\d+)", number):
            return f"a product has a `*`: write `{times[1]} * swiglu({times[2]})`"
        return f"write the experts' kind and width after their number: `{number} * swiglu(WIDTH)`"
    taking = [cls for cls in classes if positional(cls)]
    if number in ("0", "1") and "true" in words(kinds):
        return f"write `{'true' if number == '1' else 'false'}`"
    if number in ("0", "0.0") and known.word and not known.required:
        return f"for none, leave `{known.word}` out"
    if number.isdecimal() and int(number) < NARROW and taking and issubclass(taking[0], Activated):
        write = f"write `{known.word} = {taking[0].word}"
        if number == "1":
            return f"{write}(WIDTH)`"
        return f"{write}({number} * WIDTH)`: {number} feed-forwards of one width are one of {number} times that width"
    if number and classes:
        return _as_argument(known, classes, taking, number)
    if isinstance(value, String) and value.value.lower() in words(kinds):
        return f"without quotes: `{value.value.lower()}(…)`"
    if any(isinstance(kind, ListKind) for kind in kinds) and not isinstance(value, ListValue):
        return "a list is written in brackets, even with one element: `[…]`"
    if isinstance(value, ListValue) and not any(isinstance(kind, ListKind) for kind in kinds):
        return "write one value here, not a list"
    return ""


def _as_argument(known: Field, classes: Sequence[type[Node]], taking: Sequence[type[Node]], number: str) -> str:
    """Help for a number where a call stands: the first call that takes it by position, or by the name of a number."""
    if taking:
        call = f"{taking[0].word}({number})"
    else:
        numbers = (f.word for f in fields(classes[0]).values() if any(isinstance(k, NumberKind) for k in f.kinds))
        name = next(numbers, None)
        if name is None:
            return ""
        call = f"{classes[0].word}({name} = {number})"
    in_list = any(isinstance(kind, ListKind) for kind in known.kinds)
    write = f"write `{known.word} = {call}`" if known.word and not in_list else f"write `{call}`"
    return write + (_normalized(call) or (", or another of these calls" if len(classes) > 1 else ""))


def _normalized(call: str) -> str:
    """A further call beside `topk(2)`, whose weights add up to 1 as in Mixtral and GShard."""
    more = call.removesuffix(")") + ", normalize = true)"
    is_of_several = call.startswith("topk(") and call != "topk(1)"
    return f", or `{more}` if a token's weights add to 1, as in Mixtral and GShard" if is_of_several else ""


def _one_wide(kinds: Sequence[Kind], product: Operation) -> str:
    """Help for `2 * swiglu(4)` where one feed-forward is expected: their sum equals one of their total width."""
    count, last = product.first, product.rest[-1][1]
    classes = {word: cls for kind in kinds if isinstance(kind, CallKind) for word, cls in kind.classes.items()}
    if not isinstance(last, Call) or not issubclass(classes.get(last.name.text, Node), Activated):
        return ""
    total = "the sum of several is one of their total width"
    match (count, *(argument.value for argument in last.arguments[:1])):
        case (Number() | Name() as number, Number() | Name() as width) if len(product.rest) == 1:
            return f"{total}: `{last.name.text}({number.text} * {width.text})`"
        case _:
            return total


def _kind_of(value: Expression) -> str:
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
