"""Units that moec does not have: what to write in their place, and whether a tool may write it."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

from moec.grammar.units import MOST_DIGITS, UNITS

_SIZES = {"PB": ("TB", 1000), "EB": ("TB", 1_000_000), "TiB": ("GiB", 1024), "PiB": ("GiB", 1024**2)}

MULTIPLES: dict[str, tuple[str, Decimal | int]] = {
    **_SIZES,
    **{f"{size}/s": (f"{ours}/s", factor) for size, (ours, factor) in _SIZES.items()},
    "ns": ("us", Decimal("1e-3")),
    "sec": ("s", 1),
    "min": ("s", 60),
    "MFLOPS": ("TFLOPS", Decimal("1e-6")),
    "GFLOPS": ("TFLOPS", Decimal("1e-3")),
    "PFLOPS": ("TFLOPS", 1000),
    "EFLOPS": ("TFLOPS", 1_000_000),
    "TF": ("TFLOPS", 1),
    "TFLOP": ("TFLOPS", 1),
    "TFLOP/s": ("TFLOPS", 1),
}
"""Units of the field, each as a multiple of one of moec's."""

PLAIN = {"G": ("M", 1000, "GB"), "T": ("M", 1_000_000, "TB"), "Gi": ("Mi", 1024, "GiB"), "Ti": ("Mi", 1024**2, "")}
"""Multiples of plain numbers, which are sizes elsewhere (`80Gi` in Kubernetes): moec's unit, and that of a size."""

_BITS = re.compile(r"([KMGT]i?|)(b|bit|bits)(ps|/s|/sec|)", re.IGNORECASE)
"""Units that are bits, or bytes if the author confuses the two."""


class Instead(NamedTuple):
    """What is wrong with a number's unit, what to write, and the text that a tool may put in its place."""

    message: str
    help: str
    text: str | None = None


def instead_of(digits: str, unit: str) -> Instead:
    """The way out for `digits` and a `unit` that moec does not have."""
    unknown = f"there is no unit `{unit}`"
    if len(digits) > MOST_DIGITS:
        return Instead(unknown, _listed())
    if unit in MULTIPLES:
        ours, factor = MULTIPLES[unit]
        text = f"{_times(digits, Decimal(factor))}{ours}"
        return Instead(unknown, f"write `{text}`", text)
    if unit == "K":
        return Instead(unknown, f"`{digits}k` is {digits} thousand, and `{digits}Ki` {digits} times 1024")
    if unit in PLAIN:
        ours, factor, size = PLAIN[unit]
        as_size = f", or `{digits}{size}` for a size" if size else ""
        return Instead(unknown, f"write `{_times(digits, Decimal(factor))}{ours}`{as_size}")
    if bits := _BITS.fullmatch(unit):
        return _instead_of_bits(digits, unit, bits)
    if text := _in_other_case(digits, unit):
        return Instead(unknown, f"did you mean `{text}`?", text)
    return Instead(unknown, _listed())


def _instead_of_bits(digits: str, unit: str, match: re.Match[str]) -> Instead:
    """`50GB/s` for `400Gb/s`. In `gb/s` a lower-case b may be a byte too: both are named, and nothing is replaced."""
    prefix, bit, per = match.groups()
    binary = len(prefix) == 2
    known = prefix[:1].upper() + "i" * binary
    size, rate = f"{known}B", "/s" * bool(per)
    if f"{size}{rate}" not in UNITS:
        return Instead(f"there is no unit `{unit}`", _listed())
    as_bytes, as_bits = f"{digits}{size}{rate}", f"{_times(digits, Decimal('0.125'))}{size}{rate}"
    if bit == "B":  # bytes, with a prefix in another case, or with `ps` for `/s`
        return Instead(f"there is no unit `{unit}`", f"did you mean `{as_bytes}`?", as_bytes)
    if bit == "b" and not prefix[:1].isupper():
        if not rate:
            return Instead(f"there is no unit `{unit}`", f"did you mean `{as_bytes}`?", as_bytes if prefix else None)
        help = f"in bytes it is `{as_bytes}`, and in bits `{as_bits}`: write the one that is meant"
        return Instead(f"`{unit}` may count bits or bytes", help)
    if not rate:
        help = f"moec counts bytes, of 8 bits each: write `{as_bits}`; as a bandwidth `{as_bits}/s`"
        return Instead(f"`{unit}` counts bits", help)
    return Instead(f"`{unit}` counts bits", f"moec counts bytes, of 8 bits each: write `{as_bits}`", as_bits)


def _in_other_case(digits: str, unit: str) -> str:
    """`1k` for `1K`: the unit that differs in its case alone; none for `m` and `M`, which differ elsewhere."""
    matching = [known for known in UNITS if known.lower() == unit.lower()]
    return f"{digits}{matching[0]}" if len(matching) == 1 and unit[:1] not in ("m", "M") else ""


def _times(digits: str, factor: Decimal) -> str:
    number = f"{Decimal(digits.replace('_', '')) * factor:f}"
    return number.rstrip("0").rstrip(".") if "." in number else number


def _listed() -> str:
    return f"units: {', '.join(name for name in UNITS if not name.endswith('/s'))}, and `/s` after a size"
