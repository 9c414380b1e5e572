"""Which words of the schema a file uses, and which there are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from moec.grammar.load import load_file
from moec.grammar.schema import Field, WordKind, fields
from moec.grammar.schema_in_words import classes, vocabulary
from moec.grammar.spec import Cluster, Spec
from moec.grammar.spec.base import Node
from moec.grammar.syntax.tree import Assignment, Block, Name, Statement

Use = tuple[str, str, str]
"""A word, a field of it or "", and one of the words that the field takes or ""; `("topk", "score", "sigmoid")`."""

BOOLEANS = {"true", "false"}


def known_uses() -> set[Use]:
    """Every word, field and word of a field that moec compiles."""
    found: set[Use] = set()
    for meanings in vocabulary().values():
        for cls in meanings:
            if not cls.implemented:
                continue
            name = name_of(cls)
            found.add((name, "", ""))
            for known in fields(cls).values():
                found |= {(owner(cls, known), *rest) for rest in _uses_of_field(known)}
    return found


def _uses_of_field(known: Field) -> Iterator[tuple[str, str]]:
    mark = known.not_yet
    if mark is not None and not mark.words:
        return
    yield known.word, ""
    values = [value for kind in known.kinds if isinstance(kind, WordKind) for value in kind.values]
    if BOOLEANS.issuperset(values):
        return
    yield from ((known.word, value) for value in values if mark is None or value not in mark.words)


def name_of(cls: type[Node]) -> str:
    """The word that a node is written by; of a word with two meanings, the second one with the class's name."""
    first = vocabulary()[cls.word][0]
    return cls.word if cls is first else f"{cls.word} ({cls.__name__})"


def owner(cls: type[Node], known: Field) -> str:
    """The name of a class, or of the base that declares the field for several words."""
    declaring = [base for base in cls.__mro__ if known.name in inspect.get_annotations(base)]
    base = declaring[0] if declaring else cls
    return name_of(cls) if base.word else base.__name__.strip("_").lower()


def uses_of(path: Path) -> set[Use]:
    """The uses of one file."""
    loaded = load_file(path)
    assert loaded.tree is not None, path
    return {*_in_nodes(loaded.unwrap()), *_in_clusters(loaded.tree.body)}


def _in_nodes(node: Node) -> Iterator[Use]:
    cls = type(node)
    if cls is Cluster:
        return
    if cls is not Spec:
        yield (name_of(cls), "", "")
    for known in fields(cls).values():
        value = getattr(node, known.name)
        if cls is not Spec and node.given(known.name):
            yield (owner(cls, known), known.word, "")
            if isinstance(value, str):
                yield (owner(cls, known), known.word, str(value))
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Node):
                yield from _in_nodes(inner)


def _in_clusters(body: tuple[Statement, ...], outer: type[Node] | None = None) -> Iterator[Use]:
    """The uses of `cluster` and `device` blocks, of which a Spec keeps only the result."""
    for block in body:
        if not isinstance(block, Block) or not (outer or block.kind.text in ("cluster", "device")):
            continue
        word = block.kind.text
        cls = next(classes(fields(outer)[word].kinds)) if outer else vocabulary()[word][0]
        kind = name_of(cls)
        yield (kind, "", "")
        for item in block.body:
            if isinstance(item, Assignment | Block):
                word = item.name if isinstance(item, Assignment) else item.kind
                yield (kind, word.text, "")
            if isinstance(item, Assignment) and isinstance(item.value, Name):
                yield (kind, item.name.text, item.value.text)
        yield from _in_clusters(block.body, cls)
