"""Units of numbers, and the exact text of a quantity."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

LARGEST_WHOLE = 2**63 - 1
LONGEST_EXPONENT = 9  # its digits
MOST_DIGITS = 400  # of a numerator or denominator: any float has fewer, and arithmetic stays fast
_TOO_LONG: int = 10**MOST_DIGITS
_LARGEST = 2.0**128 - 2.0**120  # of bf16
_SMALLEST = 2.0**-150  # rounds to 0 in float32


class Scale(NamedTuple):
    """A unit as `factor` base units of its dimension. The dimension "" is a plain number."""

    dimension: str
    factor: Decimal


def _bytes() -> dict[str, Scale]:
    decimal = {f"{prefix}B": Decimal(1000) ** power for power, prefix in enumerate(["", "K", "M", "G", "T"])}
    binary = {f"{prefix}iB": Decimal(1024) ** power for power, prefix in enumerate(["K", "M", "G"], 1)}
    sizes = {**decimal, **binary}
    rates = {f"{unit}/s": Scale("bytes/s", factor) for unit, factor in sizes.items()}
    return {unit: Scale("bytes", factor) for unit, factor in sizes.items()} | rates


UNITS: dict[str, Scale] = {
    **_bytes(),
    "us": Scale("s", Decimal("1e-6")),
    "ms": Scale("s", Decimal("1e-3")),
    "s": Scale("s", Decimal(1)),
    "TFLOPS": Scale("FLOP/s", Decimal(10) ** 12),
    "k": Scale("", Decimal(1000)),
    "M": Scale("", Decimal(1_000_000)),
    "Ki": Scale("", Decimal(1024)),
    "Mi": Scale("", Decimal(1024**2)),
}

EXAMPLES = {"bytes": "80GB", "bytes/s": "450GB/s", "s": "2us", "FLOP/s": "989TFLOPS", "": "8"}
NAMES = {
    "bytes": "a size",
    "bytes/s": "a bandwidth",
    "s": "a time",
    "FLOP/s": "an arithmetic rate",
    "": "a plain number",
}


def exact(number: str, unit: str) -> Fraction | None:
    """`number` (digits, a fraction, an exponent) of `unit` in its base unit; None if no float is that large or small.

    `number` has at most `MOST_DIGITS` digits before its exponent.
    """
    exponent = number.lower().partition("e")[2].lstrip("+-").lstrip("0")
    if len(exponent) > LONGEST_EXPONENT:  # Decimal has a largest exponent too
        return None
    value = Decimal(number)
    if not value:
        return Fraction(0)
    if abs(value.adjusted()) > MOST_DIGITS:  # a Fraction holds all its zeros
        return None
    scaled = Fraction(value) * Fraction(UNITS[unit].factor) if unit else Fraction(value)
    return scaled if a_float_holds(scaled) else None


def a_float_holds(value: Fraction) -> bool:
    """Whether the float nearest to `value` is finite, and 0 only if `value` is."""
    try:
        return not value or float(value) != 0.0
    except OverflowError:
        return False


def a_layer_holds(value: float) -> bool:
    """Whether `value` is a number of bf16's range, which float32 includes, and 0 in float32 only if it is 0.

    torch refuses constants of an operator that are out of the range of its tensor's dtype.
    """
    return not value or _SMALLEST < abs(value) <= _LARGEST


def short(value: Fraction) -> bool:
    """Whether numerator and denominator have at most `MOST_DIGITS` digits."""
    return max(abs(value.numerator), value.denominator) < _TOO_LONG


def written(value: float | Fraction, dimension: str) -> str:
    """The shortest way to write `value`, in base units, that reads back as exactly `value`.

    One with a unit that is a power of ten always does: it only moves the decimal point of a float's shortest digits.
    A fraction is a division (`5 / 3`) where no float's shortest digits equal it.
    """
    if isinstance(value, Fraction):
        assert not dimension, "fractions are plain numbers"
        if Fraction(repr(float(value))) != value:
            return f"{value.numerator} / {value.denominator}"
        value = float(value)
    if not dimension:
        return _digits(Decimal(repr(value)))
    options = []
    for unit, scale in UNITS.items():
        if scale.dimension == dimension:
            digits = _digits(Decimal(repr(value)) / scale.factor)
            read = exact(digits, unit)
            if read is not None and float(read) == value:
                options.append(digits + unit)
    return min(options, key=lambda text: (len(text), text))


def _digits(value: Decimal) -> str:
    if value == value.to_integral_value() and abs(value) < 10**15:
        return f"{int(value):_}" if abs(value) >= 10_000 else str(int(value))
    shortest = value.normalize()
    return min(str(shortest).lower(), f"{shortest:e}", key=len)
