"""The nearest of the names or numbers that are allowed at one place: did you mean …?"""

from __future__ import annotations

import re
from collections.abc import Iterable

MOST_LISTED = 24

MOST_COMPARED = 400
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
    """The nearest name if only a slip can lie between it and `word`, so that a tool may put it there by itself.

    Numbers are the same in both (`h20` is no `h200`), and so is a letter of each part between `_` (`cv_loss` is no
    `z_loss`).
    """
    best = nearest(word, allowed)
    if best is None or re.findall(r"\d+", word) != re.findall(r"\d+", best):
        return None
    ours, theirs = (name.lower().strip("_").split("_") for name in (best, word))
    if len(ours) == len(theirs) and any(not set(one) & set(other) for one, other in zip(ours, theirs, strict=True)):
        return None
    return best


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
