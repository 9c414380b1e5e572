"""The schema in words: the fields of blocks and calls, for `moec explain`, hovers and docs/language.md."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

from moec.grammar.diagnostics.codes import CODES
from moec.grammar.printer import written_value
from moec.grammar.schema import (
    BlockKind,
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
    fields,
    positional,
)
from moec.grammar.spec import ClusterText, Device, Spec
from moec.grammar.spec.base import Node
from moec.grammar.units import EXAMPLES


def vocabulary() -> dict[str, list[type[Node]]]:
    """Every block and call of the language by its word; a word can have two meanings."""
    by_word: dict[str, list[type[Node]]] = {}
    todo: list[type[Node]] = [Spec, ClusterText, Device]
    seen: set[type[Node]] = set(todo)
    for cls in todo:
        if cls is not Spec and not (cls.word == ClusterText.word and cls is not ClusterText):
            by_word.setdefault(cls.word, []).append(cls)
        for known in fields(cls).values():
            for inner in classes(known.kinds):
                if inner not in seen:
                    seen.add(inner)
                    todo.append(inner)
    return by_word


def classes(kinds: tuple[Kind, ...]) -> Iterator[type[Node]]:
    """The blocks and calls that can stand in a field."""
    for kind in kinds:
        match kind:
            case CallKind():
                yield from kind.classes.values()
            case BlockKind() | ProductKind():
                yield kind.cls
            case ListKind():
                yield from classes(kind.items)


def places(word: str) -> list[tuple[type[Node], Field]]:
    """The blocks and calls that have a field of this name."""
    every = [cls for classes_of in vocabulary().values() for cls in classes_of]
    return [(cls, fields(cls)[word]) for cls in every if word in fields(cls)]


def choices(word: str) -> list[tuple[type[Node], Field]]:
    """The fields of which `word` is one of the values."""
    every = [
        (cls, known) for classes_of in vocabulary().values() for cls in classes_of for known in fields(cls).values()
    ]
    return [
        (cls, known) for cls, known in every if any(isinstance(k, WordKind) and word in k.values for k in known.kinds)
    ]


def describe(cls: type[Node]) -> str:
    """The section of a block or call: meaning, source, syntax, and a table of its fields."""
    lines = [cleandoc(cls.__doc__ or "")]
    if cls.source:
        lines.append(f"Source: {cls.source}.")
    if not cls.implemented:
        lines.append("It is checked, and not compiled yet.")
    lines.append(f"```moe\n{usage(cls)}\n```")
    rows = [row(known) for known in fields(cls).values()]
    if rows:
        head = ["name", "takes", "default", "meaning"]
        lines.append("\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * 4, *rows)))
    return "\n\n".join(lines)


def usage(cls: type[Node]) -> str:
    """`topk(k, score = softmax, …)`, `moe { … }` or `count * body`."""
    if cls.form == "product":
        return " * ".join(fields(cls))
    if cls.form == "block":
        label = ' "name"' if cls.labelled else ""
        return f"{cls.word}{label}{' 0..31' if cls.selects else ''} {{ … }}"
    by_position = {known.word for known in positional(cls)}
    shown = [known.word if known.word in by_position else f"{known.word} = {default(known)}" for known in _ordered(cls)]
    return f"{cls.word}({', '.join(shown)})" if shown else cls.word


def row(known: Field) -> list[str]:
    """One line of a table."""
    meaning = known.description.replace("|", "\\|")
    if known.not_yet and known.not_yet.words:
        meaning += f" (not compiled yet: {', '.join(f'`{word}`' for word in known.not_yet.words)})"
    elif known.not_yet:
        above = "" if known.not_yet.neutral is None else f"above {known.not_yet.neutral} "
        meaning += f" ({above}not compiled yet)"
    takes = " or ".join(_takes(kind) for kind in known.kinds)
    shown = "required" if known.required else f"`{text}`" if (text := default(known)) != "…" else ""
    return [f"`{known.word}`", takes.replace("|", "\\|"), shown, meaning]


def default(known: Field) -> str:
    """The default as it would be written, or `…` where there is none."""
    if known.required or known.default is None or known.block:
        return "…"
    return written_value(known, known.default)


def _ordered(cls: type[Node]) -> list[Field]:
    first = positional(cls)
    return [*first, *(known for known in fields(cls).values() if known not in first)]


def _takes(kind: Kind) -> str:
    match kind:
        case NumberKind():
            bounds = " and ".join(str(bound) for bound in kind.bounds)
            unit = f", as `{EXAMPLES[kind.unit]}`" if kind.unit else ""
            return f"{'whole number' if kind.whole else 'number'}{' ' + bounds if bounds else ''}{unit}"
        case TextKind():
            return '"text"'
        case RangeKind():
            return "range of layers, as `0..3`"
        case WordKind():
            return ", ".join(f"`{word}`" for word in kind.values)
        case CallKind():
            return ", ".join(f"`{word}`" for word in kind.classes)
        case ProductKind():
            return "`" + " * ".join(fields(kind.cls)) + "`"
        case ListKind():
            return f"[list of {' or '.join(_takes(item) for item in kind.items)}]"
        case ReferenceKind():
            return f"name of a `{kind.block}`"
        case BlockKind():
            return f"block{'s' * kind.many} `{kind.cls.word}`"


def markdown() -> str:
    """Every word and every code: the generated half of docs/language.md."""
    every = [cls for classes_of in vocabulary().values() for cls in classes_of]
    titles = {"block": "Blocks", "product": "Products", "call": "Calls"}
    parts: list[str] = []
    for form, title in titles.items():
        parts.append(f"## {title}")
        for cls in sorted((cls for cls in every if cls.form == form), key=lambda cls: (cls.word, cls.__name__)):
            parts.append(f"### `{cls.word}`\n\n{describe(cls)}")
    codes = "\n".join(f"| {code} | {title} |" for code, title in CODES.items())
    parts.append(f"## Diagnostics\n\nEach has a page: `moec explain CODE`.\n\n| code | title |\n| --- | --- |\n{codes}")
    return "\n\n".join(parts) + "\n"
