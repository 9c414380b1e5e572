"""The values and places of the fields of one block or call, before they become a Node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from moec.grammar.diagnostics.diagnostic import Label
from moec.grammar.resolve.scope import BROKEN, Broken, Scope
from moec.grammar.schema import Field, fields
from moec.grammar.source import Span
from moec.grammar.spec.base import Node
from moec.grammar.syntax.tree import Expression, String


class Stated(NamedTuple):
    """The value of one field. `name` is where the field is named, for "first given here"."""

    value: object
    span: Span
    name: Span


class Part(NamedTuple):
    """The values that one block or call of `cls` gives, by the fields' words.

    `selected` are the layers that a `layers` block with a selector is for. `incomplete`: a part of it did not parse, so
    that missing fields are not reported.
    """

    cls: type[Node]
    span: Span
    label: String | None = None
    selector: Expression | None = None
    selected: tuple[int, ...] | None = None
    stated: Mapping[str, Stated] = {}
    blocks: Mapping[str, list[Part]] = {}
    incomplete: bool = False

    def where(self, word: str) -> Span | None:
        """The place of `word`, a name or a block."""
        if word in self.stated:
            return self.stated[word].name
        return self.blocks[word][-1].span if self.blocks.get(word) else None


def merged(earlier: Part, later: Part) -> Part:
    """`later` over `earlier`: a name is replaced, a single block is merged into, labelled blocks meet by label."""
    stated = {word: value for word, value in earlier.stated.items() if not _replaced(later, word)}
    blocks = {word: parts for word, parts in earlier.blocks.items() if not _replaced(later, word)}
    for word, parts in later.blocks.items():
        blocks[word] = _merged_blocks(blocks.get(word, []), parts)
    return later._replace(
        stated={**stated, **later.stated}, blocks=blocks, incomplete=earlier.incomplete or later.incomplete
    )


def build(scope: Scope, part: Part, missing: Callable[[Scope, Part, list[Field]], None] | None = None) -> Node | Broken:
    """The Node for `part`; BROKEN if any of its values is BROKEN or a required field is missing."""
    values: dict[str, object] = {}
    spans = {"": part.span}
    absent: list[Field] = []
    if part.cls.labelled:
        assert part.label, "a block without its label was diagnosed before"
        values["name"], spans["name"] = part.label.value, part.label.span
    if part.selected is not None:
        values["layers"] = part.selected
    for word, known in fields(part.cls).items():
        block = known.block
        if word in part.stated:
            values[known.name], spans[known.name] = part.stated[word].value, part.stated[word].span
        elif block and part.blocks.get(word):
            nodes = [build(scope, inner) for inner in part.blocks[word]]
            broken = any(isinstance(node, Broken) for node in nodes)
            values[known.name] = BROKEN if broken else tuple(nodes) if block.many else nodes[0]
            spans[known.name] = part.blocks[word][0].span
        elif known.required:
            absent.append(known)
    lacking = [known for known in absent if known.word not in scope.moved]
    if lacking and not part.incomplete:
        (missing or report_missing)(scope, part, lacking)
    if absent or part.incomplete or any(isinstance(value, Broken) for value in values.values()):
        return BROKEN
    return part.cls.checked(values, spans)


def report_missing(scope: Scope, part: Part, absent: Iterable[Field]) -> None:
    """One diagnostic for all missing fields of `part`."""
    absent = list(absent)
    names = " and ".join(f"`{known.word}`" for known in absent)
    help = "; ".join(f"{known.word}: {known.description}" for known in absent if known.description)
    scope.error("MOE0203", part.span, f"`{part.cls.word}` needs {names}", help=help)


def report_twice(scope: Scope, word: str, again: Span, first: Span) -> None:
    """Reports a `word` that one block or call gives twice."""
    label = Label(span=first, message="first given here")
    scope.error("MOE0204", again, f"`{word}` is given already", label, help="keep one of them")


def _replaced(later: Part, word: str) -> bool:
    """Whether `later` gives another field of the slot that `word` is in."""
    return any(
        word in slot and any(other != word and later.where(other) for other in slot) for slot in later.cls.exclusive
    )


def _merged_blocks(earlier: list[Part], later: list[Part]) -> list[Part]:
    result = list(earlier)
    for part in later:
        name = part.label.value if part.label else None
        for index, old in enumerate(result):
            if (old.label.value if old.label else None) == name:
                result[index] = merged(old, part)
                break
        else:
            result.append(part)
    return result
