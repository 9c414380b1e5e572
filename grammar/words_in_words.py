"""The page of one word of the language for `moec explain`: its meaning, and every block and call that takes it."""

from __future__ import annotations

from moec.grammar.schema import Field, WordKind, fields
from moec.grammar.schema_in_words import choices, describe, places, row, vocabulary
from moec.grammar.spec.base import Node


def words() -> set[str]:
    """Every word: blocks, calls, their fields, and the words that are values."""
    known = vocabulary()
    every = [cls for classes in known.values() for cls in classes]
    names = {field for cls in every for field in fields(cls)}
    return {*known, *names, *(value for cls in every for field in fields(cls).values() for value in _values(field))}


def _values(field: Field) -> list[str]:
    return [value for kind in field.kinds if isinstance(kind, WordKind) for value in kind.values]


def page(word: str, inside: str = "") -> str:
    """Markdown on a word; empty if it is none. `inside`: only as a field of the block or call of this name.

    A dtype comes before a field of its name: `dtype = bf16` before `bf16` of a `peak`.
    """
    sections = [] if inside else [f"# `{cls.word}`\n\n{describe(cls)}\n" for cls in vocabulary().get(word, ())]
    values = choices(word) if not inside and word not in vocabulary() else []
    uses = [(cls, field) for cls, field in places(word) if not field.block and inside in ("", cls.word)]
    if uses:
        sections.append(_field_section(word, uses))
    if values:
        dtype = any(field.word == "dtype" for _, field in values)
        sections.insert(0 if dtype else len(sections), _value_section(word, values))
    return "\n".join(sections) or (page(word) if inside else "")


def _field_section(word: str, uses: list[tuple[type[Node], Field]]) -> str:
    """A field's values: one text if all its blocks and calls agree, else a table."""
    rows = [(f"`{cls.word}`", *row(field)[1:]) for cls, field in uses]
    head = f"# `{word}` in {_listed([cell for cell, *_ in rows])}\n\n"
    if len({tuple(cells) for _, *cells in rows}) == 1:
        _, takes, default, meaning = rows[0]
        by_default = "required" if default == "required" else f"default {default}" if default else "may be left out"
        return f"{head}{_sentence(meaning)}\n\nTakes: {takes}; {by_default}.\n"
    lines = [("in", "takes", "default", "meaning"), ("---",) * 4, *_merged(rows)]
    return head + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _merged(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The rows, after merging those that differ in their block or call alone."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for where, *cells in rows:
        merged.setdefault(tuple(cells), []).append(where)
    return [(", ".join(dict.fromkeys(where)), *cells) for cells, where in merged.items()]


def _value_section(word: str, uses: list[tuple[type[Node], Field]]) -> str:
    parts: dict[tuple[str, str], list[str]] = {}
    for cls, field in uses:
        parts.setdefault((field.word, row(field)[3]), []).append(f"`{cls.word}`")
    return "\n".join(
        f"# `{field} = {word}` in {_listed(where)}\n\n{_sentence(meaning)}\n"
        for (field, meaning), where in parts.items()
    )


def _listed(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _sentence(text: str) -> str:
    """`text` with a capital first letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."
