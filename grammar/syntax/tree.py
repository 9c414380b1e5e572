"""The abstract syntax tree of a `.moe` file, before names and values are resolved.

Every node is frozen and has a span, which equality ignores. brackets.py bounds the nesting, and sums and products are
flat, however long, so recursion over a tree is safe.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moec.grammar.source import Span


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written, with the unit behind it: `32_000`, `1e-5`, `450GB/s`."""

    text: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class String:
    """Text between double quotes; there are no escapes."""

    value: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Name:
    """A bare word: a `let`, or a word of the schema (`bf16`, `true`, `dropless`)."""

    text: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Sequence:
    """`[a, b]`."""

    items: tuple[Expression, ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Range:
    """`first..last` or `first..last step n`; the last one belongs to it."""

    first: Expression
    last: Expression
    step: Expression | None
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a call; positional ones have no name."""

    name: Name | None
    value: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Call:
    """`name(a, b, key = c)`."""

    name: Name
    arguments: tuple[Argument, ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Negative:
    """`-operand`."""

    operand: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """`first op operand op operand …` from left to right; all ops are `+ -`, or all are `* /`."""

    first: Expression
    rest: tuple[tuple[str, Expression], ...]
    span: Span = field(compare=False, repr=False)


Expression = Number | String | Name | Sequence | Range | Call | Negative | Operation


@dataclass(frozen=True, slots=True)
class Use:
    """`use "path"`."""

    path: String
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Let:
    """`let name = value`."""

    name: Name
    value: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name = value`."""

    name: Name
    value: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Block:
    """`kind "label" selector { body }`."""

    kind: Name
    label: String | None
    selector: Expression | None
    body: tuple[Statement, ...]
    span: Span = field(compare=False, repr=False)

    @property
    def head(self) -> Span:
        """From the kind to the selector: what a diagnostic about the whole block points at."""
        return self.kind.span.to((self.selector or self.label or self.kind).span)


@dataclass(frozen=True, slots=True)
class Bad:
    """Text that did not parse and has a diagnostic; `body` where the text was the head of a block."""

    body: tuple[Statement, ...]
    span: Span = field(compare=False, repr=False)


Statement = Use | Let | Assignment | Block | Bad


@dataclass(frozen=True, slots=True)
class File:
    """A whole file."""

    body: tuple[Statement, ...]
    span: Span = field(compare=False, repr=False)
