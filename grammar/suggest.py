"""Finds the nearest of the names or numbers that are allowed in one place: did you mean …?"""

from __future__ import annotations

import re
from collections.abc import Iterable

MOST_LISTED = 24

MOST_COMPARED = 600
"""Most names compared with a misspelt name. Only generated files have more names, and thousands of mistakes."""


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed name with the least edit distance to `word`, if that is a plausible slip; ties by alphabet."""
    allowed = set(allowed)
    if len(allowed) > MOST_COMPARED:
        return None
    limit = max(1, (len(word) + 1) // 3) if len(word) > 1 else 0
    candidates = [(distance(word.lower(), name.lower(), limit), name) for name in allowed]
    best = min(candidates, default=(limit + 1, ""))
    return best[1] if best[0] <= limit else None


def meant(word: str, allowed: Iterable[str]) -> str | None:
    """The one name of which `word` is a slip of the keyboard, so that a tool may put it there by itself."""
    if word in (known := set(allowed)) or len(known) > MOST_COMPARED:
        return None
    candidates = [name for name in known if is_slip(word, name)]
    return candidates[0] if len(candidates) == 1 else None


SHORT, LONG = 5, 8
"""Words up to `SHORT` letters are near to other words of the field. Words from `LONG` letters on may have two slips."""


def is_slip(word: str, name: str) -> bool:
    """Whether `word` can only be `name` misspelt: never another word of the field, such as `sgdm` or `h20`.

    Both have the same numbers and the same parts between `_`, except that a `_` may be missing. Letters may be swapped,
    doubled, missing, or wrong in the middle. Another word differs in its first or last letter (`adamp`), or has one
    letter more (`ubatch`, `adams`).
    """
    one, other = word.lower(), name.lower()
    if re.findall(r"\d+", one) != re.findall(r"\d+", other):
        return False
    if one.replace("_", "") == other.replace("_", ""):
        return True
    if one.count("_") != other.count("_"):
        return False
    if any(a != b and not _misspelt(a, b) for a, b in zip(one.split("_"), other.split("_"), strict=True)):
        return False
    limit = 2 if len(other) >= LONG else 1
    return distance(one, other, limit) <= limit


def _misspelt(part: str, right: str) -> bool:
    """Whether letters of `right` are swapped, doubled, left out, or wrong between the first and the last.

    In short words another letter is another word (`mqa`, `silu`), and so is one fewer at the end, but for an `s`.
    """
    if len(right) < 3:
        return False
    if sorted(part) == sorted(right) or part == right + right[-1] or part + "s" == right:
        return True
    if part[:1] != right[:1]:
        return False
    if part[-1:] == right[-1:]:
        return len(part) != len(right) or len(right) > SHORT
    return right.startswith(part) and len(right) > SHORT


def distance(one: str, other: str, limit: int) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours between two words; `limit` + 1 if more."""
    if abs(len(one) - len(other)) > limit or len(set(one) ^ set(other)) > 2 * limit:
        return limit + 1  # an edit brings in at most one letter and takes out at most one
    before: list[int] = []
    previous = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        current = [i]
        for j, b in enumerate(other, 1):
            cost = min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            current.append(cost)
        before, previous = previous, current
    return previous[-1]


def advice(word: str, allowed: Iterable[str]) -> str:
    """A help text: the nearest name, and all of them."""
    known = set(allowed)
    if not known:
        return ""
    if len(known) > MOST_COMPARED:
        return f"{len(known)} names are known here"
    names = sorted(known)
    best = nearest(word, names)
    listed = ", ".join(names[:MOST_LISTED]) + (", …" if len(names) > MOST_LISTED else "")
    return f"did you mean `{best}`? allowed here: {listed}" if best else f"allowed here: {listed}"


def divisor_near(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`, the larger of two; the search is bounded."""
    candidates: Iterable[int] = range(max(1, wanted - 10_000), min(number, wanted + 10_000) + 1)
    return min((n for n in candidates if number % n == 0), key=lambda n: (abs(n - wanted), -n), default=1)
