"""Numbers as people read them: powers of ten, bytes, counts of things."""

from __future__ import annotations


def si(number: float, billion: str = "B") -> str:
    """Three digits and a power of ten: `1.57 M`; `billion` is "G" for units such as FLOP."""
    for scale, unit in ((1e12, " T"), (1e9, f" {billion}"), (1e6, " M"), (1e3, " k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def count(number: int, what: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def amount_of_bytes(number: float) -> str:
    """Three digits and a power of ten: `1.57 MB`."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.3g} B"
