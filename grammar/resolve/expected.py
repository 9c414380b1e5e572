"""The values that a field takes, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
)
from moec.grammar.units import EXAMPLES


def expected(kinds: Sequence[Kind]) -> str:
    """The expected values in few words; of many calls the first ones."""
    one = [described(kind) for kind in kinds if not isinstance(kind, ListKind)]
    lists = [kind for kind in kinds if isinstance(kind, ListKind)]
    items = [described(item) for kind in lists for item in kind.items]
    return " or ".join([*one, *(["a list of these"] if lists and set(items) <= set(one) else map(described, lists))])


def supported(known: Field) -> list[Kind]:
    """The kinds of a field without those that cannot be compiled yet."""
    mark = known.not_yet
    if mark is None or not mark.words:
        return list(known.kinds)
    kinds_left: list[Kind] = []
    for kind in known.kinds:
        if isinstance(kind, WordKind):
            kept = {word: value for word, value in kind.values.items() if word not in mark.words}
            kinds_left += [WordKind(kept)] if kept else []
        else:
            kinds_left.append(kind)
    return kinds_left


def words(kinds: Iterable[Kind]) -> set[str]:
    calls = {word for kind in kinds if isinstance(kind, CallKind) for word in kind.classes}
    return calls | plain_words(kinds)


def plain_words(kinds: Iterable[Kind]) -> set[str]:
    return {word for kind in kinds if isinstance(kind, WordKind) for word in kind.values}


def described(kind: Kind) -> str:
    match kind:
        case NumberKind():
            name = "a whole number" if kind.whole else "a number"
            return f"{name} such as `{EXAMPLES[kind.unit]}`" if kind.unit else name
        case TextKind():
            return 'a "text"'
        case RangeKind():
            return "a range of layers such as `0..3`"
        case WordKind():
            return _any_of(list(kind.values))
        case CallKind():
            return _any_of(list(kind.classes))
        case ProductKind():
            return "a product such as `8 * swiglu(14_336)`"
        case ListKind():
            return f"a list of {' or '.join(described(item) for item in kind.items)}"
        case ReferenceKind():
            return f"the name of a {kind.block}"
        case _:
            return "a block"


MOST_WORDS = 6
"""The most words in a message; the help or `moec explain` has all."""


def _any_of(several: list[str]) -> str:
    shown = [f"`{word}`" for word in several[:MOST_WORDS]]
    return " or ".join(shown) if len(several) <= MOST_WORDS else f"{', '.join(shown)}, …"
