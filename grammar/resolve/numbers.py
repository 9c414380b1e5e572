"""Numbers: literals with units, and arithmetic over them and over `let` names.

Arithmetic is exact: `0.1 * 3` is `0.3`, and `5 / 3 * 3` is `5`. A field that is a float takes the float nearest to the
result, a field that is a fraction takes the result itself.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TypeGuard

from moec.grammar.foreign_units import instead_of
from moec.grammar.resolve.scope import BROKEN, Broken, Quantity, Scope, Written
from moec.grammar.schema import Field, NumberKind
from moec.grammar.syntax.tree import Call, Expression, Name, Negative, Number, Operation
from moec.grammar.units import (
    EXAMPLES,
    LARGEST_WHOLE,
    MOST_DIGITS,
    NAMES,
    UNITS,
    a_float_holds,
    a_layer_holds,
    exact,
    short,
)

_LITERAL = re.compile(r"([0-9_]+(?:\.[0-9_]+)?(?:[eE][+-]?[0-9]+)?)(.*)")


FEW = 8
"""The most values of a whole number that a help lists."""


def is_arithmetic(scope: Scope, value: Expression) -> bool:
    """Whether `compute` evaluates `value`; a product that ends in a call (`8 * swiglu(64)`) is no number."""
    if not isinstance(value, Operation):
        return isinstance(value, Number | Negative)
    operator, last = value.rest[-1]
    return operator != "*" or not isinstance(scope.follow(last).value, Call | Name)


def number(
    scope: Scope, written: Written, kind: NumberKind, known: Field | None = None
) -> int | float | Fraction | Broken:
    """`written` as the number that a field of `kind` wants, in its base unit."""
    if isinstance(written.value, Broken):
        return BROKEN
    quantity = written.constant.number if written.constant else None
    if quantity is None:
        computed = compute(scope, written.value)
        if isinstance(computed, Broken):
            return BROKEN
        quantity = computed
    if quantity.dimension != kind.unit:
        expected = f"expected {NAMES[kind.unit]} such as `{EXAMPLES[kind.unit]}`"
        return scope.error("MOE0208", written, f"{expected}, found {NAMES[quantity.dimension]}")
    value = quantity.value
    if kind.whole and (pointed := _pointed(written.value)):
        return scope.error("MOE0206", written, "a whole number has no point", help=pointed)
    if kind.whole and value.denominator != 1:
        return scope.error("MOE0206", written, f"expected a whole number, found {float(value):g}", help=_choices(kind))
    taken = int(value) if kind.whole else value if kind.exact else float(value)
    for bound in kind.bounds:
        if not bound.holds(taken):
            # -1 stands for the rest in other systems.
            help = _choices(kind) or (
                f"leave `{known.word}` out, and moec fills it in" if value == -1 and _has_default(known) else ""
            )
            return scope.error(bound.code, written, f"must be {bound}, and is {_shown(value)}", help=help)
    if (kind.whole or kind.exact) and max(abs(value.numerator), value.denominator) > LARGEST_WHOLE:
        return scope.error("MOE0107", written, "more than 64 bits hold")
    if isinstance(taken, float) and not a_layer_holds(taken):
        return scope.error("MOE0107", written, "beyond what layers compute with: 1e-45 to 3.38e38")
    return taken


def _has_default(known: Field | None) -> TypeGuard[Field]:
    return known is not None and not known.required and bool(known.name)


def _choices(kind: NumberKind) -> str:
    """`write 0, 1, 2 or 3`, for whole numbers with few values."""
    limits = {bound.name: bound.limit for bound in kind.bounds}
    if not kind.whole or limits.keys() != {"at least", "at most"} or limits["at most"] - limits["at least"] > FEW:
        return ""
    *others, last = range(limits["at least"], limits["at most"] + 1)
    return f"write {', '.join(map(str, others))} or {last}"


def _shown(value: Fraction) -> int | float:
    whole = value.denominator == 1 and abs(value) <= LARGEST_WHOLE
    return int(value) if whole else float(value)


def compute(scope: Scope, value: Expression) -> Quantity | Broken:
    """The value of an arithmetic expression."""
    match value:
        case Number():
            return _literal(scope, value)
        case Negative():
            operand = compute(scope, value.operand)
            return operand if isinstance(operand, Broken) else Quantity(-operand.value, operand.dimension)
        case Operation():
            return _operation(scope, value)
        case Name():
            return _named(scope, value)
        case _:
            return scope.error("MOE0206", value.span, "expected a number")


def _pointed(value: Expression | Broken) -> str:
    """Help for a number such as `32.000`, whose point may stand between thousands; empty for any other value."""
    text = value.text if isinstance(value, Number) else ""
    head, _, tail = text.partition(".")
    digits = tail.replace("_", "")
    if not digits.isdecimal() or len(digits) % 3 or head.startswith("0"):
        return ""
    return f"a point begins a fraction: write `{head}_{tail}`" + ("" if digits.strip("0") else f", or `{head}`")


def _named(scope: Scope, name: Name) -> Quantity | Broken:
    written = scope.follow(name)
    if isinstance(written.value, Broken):
        return BROKEN
    if written.constant is None:
        from moec.grammar.resolve.no_number import diagnose_no_number  # good files do without it

        return diagnose_no_number(scope, name.span, name.text, None)
    if written.constant.number is None:
        return scope.error("MOE0206", written, "expected a number")
    return written.constant.number


def _literal(scope: Scope, literal: Number) -> Quantity | Broken:
    match = _LITERAL.fullmatch(literal.text)
    assert match, "the lexer's numbers have this form"
    digits, unit = match.groups()
    if len(digits) > 1 and digits[0] == "0" and digits[1] in "0123456789_":
        plain = digits.lstrip("0_") or "0"
        help = f"write `{plain}`, or what is missing between the two"
        return scope.error("MOE0108", literal.span, "is something missing after the `0`?", help=help)
    if unit and unit not in UNITS:
        other = instead_of(digits, unit)
        return scope.error("MOE0209", literal.span, other.message, help=other.help, instead=other.text)
    plain = digits.replace("_", "")
    value = exact(plain, unit) if len(plain) <= MOST_DIGITS else None
    if value is None:
        if len(plain) > MOST_DIGITS:
            return scope.error("MOE0107", literal.span, f"more than {MOST_DIGITS} digits")
        return scope.error("MOE0107", literal.span, "beyond what a float holds")
    return Quantity(value, UNITS[unit].dimension if unit else "")


def _operation(scope: Scope, operation: Operation) -> Quantity | Broken:
    result = compute(scope, operation.first)
    for operator, operand in operation.rest:
        other = compute(scope, operand)  # every operand, so that every error is reported
        if isinstance(result, Broken) or isinstance(other, Broken):
            result = BROKEN
            continue
        combined = _combine(operator, result, other)
        if isinstance(combined, str):
            result = scope.error("MOE0215", operation.first.span.to(operand.span), combined)
        else:
            result = combined
    return result


def _combine(operator: str, one: Quantity, other: Quantity) -> Quantity | str:
    """The result, or the reason for having none."""
    a, b = one.value, other.value
    if operator in "+-":
        if one.dimension != other.dimension:
            return f"{NAMES[one.dimension]} and {NAMES[other.dimension]} cannot be added or subtracted"
        return _bounded(a + b if operator == "+" else a - b, one.dimension)
    if operator == "*":
        if one.dimension and other.dimension:
            return f"the product of {NAMES[one.dimension]} and {NAMES[other.dimension]} has no unit here"
        return _bounded(a * b, one.dimension or other.dimension)
    if b == 0:
        return "division by zero"
    if other.dimension and one.dimension != other.dimension:
        return f"{NAMES[one.dimension]} cannot be divided by {NAMES[other.dimension]}"
    return _bounded(a / b, "" if other.dimension else one.dimension)


def _bounded(value: Fraction, dimension: str) -> Quantity | str:
    """`value`, or the reason to reject it: out of the range of floats, or too many digits (repeated squares)."""
    if not a_float_holds(value):
        return "the result is out of range"
    if not short(value):
        return f"the exact result has more than {MOST_DIGITS} digits"
    return Quantity(value, dimension)
