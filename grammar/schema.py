"""The schema as the resolver, the printer and the messages need it: read off the pydantic models of spec/.

No word of the language is listed here. A field of a model becomes a `Field` with the kinds of value it takes.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from moec.grammar.diagnostics.model import InternalError
from moec.grammar.spec.base import Node, Reference, Unit


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of what a number may be: `name` says it in words, for `at least 1`."""

    name: str  # "at least", "more than", "at most", "less than"
    limit: float

    def holds(self, value: float) -> bool:
        """Whether `value` keeps it."""
        match self.name:
            case "at least":
                return value >= self.limit
            case "more than":
                return value > self.limit
            case "at most":
                return value <= self.limit
            case _:
                return value < self.limit

    def __str__(self) -> str:
        return f"{self.name} {self.limit:_}"


@dataclass(frozen=True, slots=True)
class NumberKind:
    """A number: `whole` or not, in `unit` ("" for none), within bounds."""

    whole: bool
    unit: str
    bounds: tuple[Bound, ...]


@dataclass(frozen=True, slots=True)
class TextKind:
    """A text in quotes."""


@dataclass(frozen=True, slots=True)
class WordKind:
    """One of some words; `values` says what each stands for."""

    values: dict[str, object]


@dataclass(frozen=True, slots=True)
class CallKind:
    """A call of one of these models, by the word it is written by."""

    classes: dict[str, type[Node]]


@dataclass(frozen=True, slots=True)
class ProductKind:
    """`first * second`, the two fields of `cls`."""

    cls: type[Node]


@dataclass(frozen=True, slots=True)
class ListKind:
    """`[a, b]` of values of any of `items`."""

    items: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class ReferenceKind:
    """The name of a block that is declared elsewhere."""

    block: str


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A block `word { … }` inside this one; `many` where it may come more than once."""

    cls: type[Node]
    many: bool


Kind = NumberKind | TextKind | WordKind | CallKind | ProductKind | ListKind | ReferenceKind | BlockKind


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a model: `name` in Python, `word` in a file."""

    name: str
    word: str
    kinds: tuple[Kind, ...]
    required: bool
    default: object
    description: str

    @property
    def block(self) -> BlockKind | None:
        """The kind of block that gives this field, if a block does."""
        return next((kind for kind in self.kinds if isinstance(kind, BlockKind)), None)


@cache
def fields(cls: type[Node]) -> dict[str, Field]:
    """The fields of `cls` by the words they are written by; a label is not among them."""
    found = {}
    for name, info in cls.model_fields.items():
        if cls.labelled and name == "name":
            continue
        kinds = tuple(_kinds(info.annotation, info.metadata))
        block = next((kind for kind in kinds if isinstance(kind, BlockKind)), None)
        word = block.cls.word if block else info.alias or name
        default = None if info.is_required() else info.get_default()
        found[word] = Field(name, word, kinds, info.is_required(), default, info.description or "")
    return found


def positional(cls: type[Node]) -> list[Field]:
    """The fields that a call of `cls` takes by position."""
    return [field for name in cls.positional for field in fields(cls).values() if field.name == name]


def _kinds(annotation: Any, metadata: list[Any]) -> Iterator[Kind]:
    """One kind for each alternative of a type; the models that are written as calls share one."""
    calls: dict[str, type[Node]] = {}
    for alternative, extra in _alternatives(annotation, tuple(_flat(metadata))):
        reference = next((item for item in extra if isinstance(item, Reference)), None)
        if reference:
            yield ReferenceKind(reference.kind)
        elif isinstance(alternative, type) and issubclass(alternative, Node):
            if alternative.form == "call":
                calls[alternative.word] = alternative
            elif alternative.form == "block":
                yield BlockKind(alternative, many=False)
            else:
                yield ProductKind(alternative)
        else:
            yield _plain_kind(alternative, extra)
    if calls:
        yield CallKind(calls)


def _plain_kind(annotation: Any, metadata: tuple[Any, ...]) -> Kind:
    if get_origin(annotation) is tuple:
        items = tuple(_kinds(get_args(annotation)[0], []))
        if len(items) == 1 and isinstance(items[0], BlockKind):
            return BlockKind(items[0].cls, many=True)
        return ListKind(items)
    if get_origin(annotation) is Literal:
        return WordKind({value: value for value in get_args(annotation)})
    if annotation is bool:
        return WordKind({"true": True, "false": False})
    if annotation is str:
        return TextKind()
    if annotation in (int, float):
        unit = next((item.name for item in metadata if isinstance(item, Unit)), "")
        bounds = tuple(_bounds(metadata))
        return NumberKind(annotation is int, unit, bounds)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return WordKind({str(member.value): member for member in annotation})
    raise InternalError(f"the schema has a type that no value can be written for: {annotation!r}")


def _bounds(metadata: tuple[Any, ...]) -> Iterator[Bound]:
    for item in metadata:
        match item:
            case Ge():
                yield Bound("at least", cast(float, item.ge))
            case Gt():
                yield Bound("more than", cast(float, item.gt))
            case Le():
                yield Bound("at most", cast(float, item.le))
            case Lt():
                yield Bound("less than", cast(float, item.lt))


def _alternatives(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *extra = get_args(annotation)
        yield from _alternatives(base, (*_flat(extra), *metadata))
    elif origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _alternatives(argument, metadata)
    elif annotation is not types.NoneType:
        yield annotation, metadata


def _flat(metadata: list[Any]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item
