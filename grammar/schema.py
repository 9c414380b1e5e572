"""The schema as the resolver, the printer and the messages need it: derived from the annotations in spec/.

No word of the language is listed here. A field of a node becomes a `Field` with the kinds of value it takes.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from enum import Enum
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from moec.grammar.diagnostics.diagnostic import InternalError
from moec.grammar.spec.base import Bound, Doc, Node, NotYet, Reference, Unit, Word, field_types
from moec.grammar.spec.parallel import LayerRange


class NumberKind(NamedTuple):
    """A number: `whole` or not, in `unit` ("" for none), within bounds; `exact`: as a fraction, not a float."""

    whole: bool
    unit: str
    bounds: tuple[Bound, ...]
    exact: bool = False


class TextKind:
    """A text in quotes."""


class RangeKind:
    """`first..last`, or one number: a range of layers."""


class WordKind(NamedTuple):
    """One of several words; `values` maps each to its Python value."""

    values: dict[str, object]


class CallKind(NamedTuple):
    """A call of one of these models, by the word it is written by."""

    classes: dict[str, type[Node]]


class ProductKind(NamedTuple):
    """`first * second`, the two fields of `cls`."""

    cls: type[Node]


class ListKind(NamedTuple):
    """`[a, b]` of values of any of `items`."""

    items: tuple[Kind, ...]


class ReferenceKind(NamedTuple):
    """The name of a block that is declared elsewhere."""

    block: str


class BlockKind(NamedTuple):
    """A block `word { … }` inside this one; `many` if it may occur more than once."""

    cls: type[Node]
    many: bool


Kind = NumberKind | TextKind | RangeKind | WordKind | CallKind | ProductKind | ListKind | ReferenceKind | BlockKind


class Field(NamedTuple):
    """One field of a node: `name` in Python, `word` in a file. `not_yet`: the values that moec cannot compile yet."""

    name: str
    word: str
    kinds: tuple[Kind, ...]
    required: bool
    default: object
    description: str
    not_yet: NotYet | None = None

    @property
    def block(self) -> BlockKind | None:
        """The kind of block that gives this field, if a block does."""
        return next((kind for kind in self.kinds if isinstance(kind, BlockKind)), None)


_FIELDS: dict[type[Node], dict[str, Field]] = {}


def fields(cls: type[Node]) -> dict[str, Field]:
    """The fields of `cls` by the words they are written by; a label and a selector are not among them."""
    if cls not in _FIELDS:
        _FIELDS[cls] = _read(cls)
    return _FIELDS[cls]


def _read(cls: type[Node]) -> dict[str, Field]:
    known = {}
    for name, annotation in field_types(cls).items():
        if (cls.labelled and name == "name") or (cls.selects and name == "layers"):
            continue
        said = annotation.__metadata__ if get_origin(annotation) is Annotated else ()
        kinds = tuple(_kinds(annotation))
        block = next((kind for kind in kinds if isinstance(kind, BlockKind)), None)
        words = [item.text for item in said if isinstance(item, Word)]
        word = block.cls.word if block else words[0] if words else name
        known[word] = Field(
            name,
            word,
            kinds,
            required=not hasattr(cls, name),
            default=getattr(cls, name, None),
            description=next((item.text for item in said if isinstance(item, Doc)), ""),
            not_yet=next((item for item in said if isinstance(item, NotYet)), None),
        )
    return known


def positional(cls: type[Node]) -> list[Field]:
    """The fields that a call of `cls` takes by position."""
    return [field for name in cls.positional for field in fields(cls).values() if field.name == name]


def _kinds(annotation: Any) -> Iterator[Kind]:
    """One kind for each alternative of a type; the nodes that are written as calls share one."""
    calls: dict[str, type[Node]] = {}
    for alternative, said in _alternatives(annotation, ()):
        reference = next((item for item in said if isinstance(item, Reference)), None)
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
            yield _plain_kind(alternative, said)
    if calls:
        yield CallKind(calls)


def _plain_kind(annotation: Any, said: tuple[Any, ...]) -> Kind:
    if annotation is LayerRange:
        return RangeKind()
    if get_origin(annotation) is tuple:
        items = tuple(_kinds(get_args(annotation)[0]))
        if len(items) == 1 and isinstance(items[0], BlockKind):
            return BlockKind(items[0].cls, many=True)
        return ListKind(items)
    if get_origin(annotation) is Literal:
        return WordKind({value: value for value in get_args(annotation)})
    if annotation is bool:
        return WordKind({"true": True, "false": False})
    if annotation is str:
        return TextKind()
    if annotation in (int, float, Fraction):
        unit = next((item.name for item in said if isinstance(item, Unit)), "")
        bounds = tuple(item for item in said if isinstance(item, Bound))
        return NumberKind(annotation is int, unit, bounds, exact=annotation is Fraction)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return WordKind({str(member.value): member for member in annotation})
    raise InternalError(f"the schema has a type that no value can be written for: {annotation!r}")


def _alternatives(annotation: Any, said: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(annotation.__origin__, (*annotation.__metadata__, *said))
    elif origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _alternatives(argument, said)
    elif annotation is not types.NoneType:
        yield annotation, said
