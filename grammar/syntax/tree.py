"""The abstract syntax tree of a `.moe` file, before names and values are resolved.

Every node is frozen and has a span, which equality ignores. brackets.py bounds the nesting, and sums and products are
flat, however long, so recursion over a tree is safe.
"""

from __future__ import annotations

from typing import NoReturn, dataclass_transform

from moec.grammar.source import Span


@dataclass_transform(eq_default=True, frozen_default=True)
class Syntax:
    """What all nodes share. `dataclass` would compile these methods for each class at every start."""

    __match_args__: tuple[str, ...]

    def __init_subclass__(cls) -> None:
        cls.__match_args__ = tuple(cls.__annotations__)  # type: ignore[misc]

    def __init__(self, *values: object, **named: object) -> None:
        """Takes a value for each field, by position or by name. Raises `TypeError` for others."""
        fields = self.__match_args__
        values_by_name = {**dict(zip(fields, values, strict=False)), **named}
        if len(values) + len(named) != len(fields) or len(values_by_name) != len(fields):
            raise TypeError(f"{type(self).__name__} takes {', '.join(fields)}")
        self.__dict__.update(values_by_name)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._said() == other._said()

    def __hash__(self) -> int:
        return hash((type(self), *self._said()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._said()))})"

    def _said(self) -> tuple[object, ...]:
        """The values of all fields but the span."""
        return tuple(getattr(self, name) for name in self.__match_args__ if name != "span")


class Number(Syntax):
    """A number as written, with the unit behind it: `32_000`, `1e-5`, `450GB/s`."""

    text: str
    span: Span


class String(Syntax):
    """Text between double quotes; there are no escapes."""

    value: str
    span: Span


class Name(Syntax):
    """A bare word: a `let`, or a word of the schema (`bf16`, `true`, `dropless`)."""

    text: str
    span: Span


class Sequence(Syntax):
    """`[a, b]`."""

    items: tuple[Expression, ...]
    span: Span


class Range(Syntax):
    """`first..last` or `first..last step n`; the last one belongs to it."""

    first: Expression
    last: Expression
    step: Expression | None
    span: Span


class Argument(Syntax):
    """One argument of a call; positional ones have no name."""

    name: Name | None
    value: Expression
    span: Span


class Call(Syntax):
    """`name(a, b, key = c)`."""

    name: Name
    arguments: tuple[Argument, ...]
    span: Span


class Negative(Syntax):
    """`-operand`."""

    operand: Expression
    span: Span


class Operation(Syntax):
    """`first op operand op operand …` from left to right; all ops are `+ -`, or all are `* /`."""

    first: Expression
    rest: tuple[tuple[str, Expression], ...]
    span: Span


Expression = Number | String | Name | Sequence | Range | Call | Negative | Operation


class Use(Syntax):
    """`use "path"`."""

    path: String
    span: Span


class Let(Syntax):
    """`let name = value`."""

    name: Name
    value: Expression
    span: Span


class Assignment(Syntax):
    """`name = value`."""

    name: Name
    value: Expression
    span: Span


class Block(Syntax):
    """`kind "label" selector { body }`."""

    kind: Name
    label: String | None
    selector: Expression | None
    body: tuple[Statement, ...]
    span: Span

    @property
    def head(self) -> Span:
        """From the kind to the selector: what a diagnostic about the whole block points at."""
        return self.kind.span.to((self.selector or self.label or self.kind).span)


class Bad(Syntax):
    """Text that did not parse and has a diagnostic; `body` where the text was the head of a block."""

    body: tuple[Statement, ...]
    span: Span


Statement = Use | Let | Assignment | Block | Bad


class File(Syntax):
    """A whole file."""

    body: tuple[Statement, ...]
    span: Span
