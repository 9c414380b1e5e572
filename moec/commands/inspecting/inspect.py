"""`moec inspect FILE`: the values that a file sets and, with `--all`, the defaults, each with its source."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moec.commands.console.documents import InspectedValue
from moec.commands.console.output import emit
from moec.commands.console.terminal import DIM, RESET, colored, columns
from moec.driver import read
from moec.grammar.diagnostics import Diagnostic
from moec.grammar.load import Loaded
from moec.grammar.printer import selector, written_value
from moec.grammar.schema import Field, fields
from moec.grammar.source import Span
from moec.grammar.spec.base import Node

_WIDEST = 60
"""Columns of the values. The source of a wider value stands further right."""


@dataclass(frozen=True, slots=True)
class Line:
    """A value, or the head of a block, and its source."""

    text: str
    level: int
    is_stated: bool = True
    is_repeated: bool = False
    """Whether another line's text has the value already, as for the parts of `4 * swiglu(128)`."""
    span: Span | None = None
    lets: tuple[str, ...] = ()
    equal_spans: tuple[Span, ...] = ()
    """The places of equal layers."""

    @property
    def origin(self) -> str:
        """`a.moe:3, --let n=4`, `a.moe:3, equal at a.moe:9`, or `default`."""
        if not self.is_stated:
            return "default"
        if self.span is None:
            return ""
        equal = [f"equal at {', '.join(str(span) for span in self.equal_spans)}"] if self.equal_spans else []
        return ", ".join([str(self.span), *(f"--let {text}" for text in self.lets), *equal])


def run(file: Path, lets: Mapping[str, str], style: str = "full", *, all: bool = False) -> tuple[Diagnostic, ...]:
    """Prints the values that `file` sets, or all values with `all` or as JSON; returns the warnings.

    Raises `DiagnosticError` for a file with errors.
    """
    loaded = read(file, **lets)
    lines = list(_Inspector(loaded).node(loaded.unwrap(), 0, ""))
    shown = lines if all else [line for line in lines if line.is_stated and not line.is_repeated]
    emit(style, lambda: _layout(shown), lambda: [_document(line) for line in lines])
    return loaded.diagnostics


def _layout(lines: list[Line]) -> Iterator[str]:
    """The lines in two columns, folded to the terminal's width."""
    room = columns(sys.stdout)
    dim, reset = (DIM, RESET) if colored(sys.stdout) else ("", "")
    width = min(max((len(line.text) + 2 * line.level for line in lines), default=0), _WIDEST)
    for line in lines:
        indent = "  " * line.level
        *lines_before, last = textwrap.wrap(
            line.text, room, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False
        )
        yield from lines_before
        if not line.origin:
            yield last
        elif (column := room - len(line.origin) - 4) >= len(last):  # in its column, or in a narrow terminal before it
            yield f"{last.ljust(min(width, column))}  {dim}# {line.origin}{reset}"
        else:
            yield last
            for part in textwrap.wrap(line.origin, max(room - len(indent) - 6, 20), break_on_hyphens=False):
                yield f"{indent}    {dim}# {part}{reset}"


def _document(line: Line) -> InspectedValue:
    span = line.span if line.is_stated else None
    return InspectedValue(
        text="  " * line.level + line.text,
        origin="default" if not line.is_stated else "file" if span else "unknown",
        file=span.source.name if span else None,
        line=span.line if span else None,
        column=span.column if span else None,
        lets=list(line.lets),
        equal_at=[str(other) for other in line.equal_spans],
    )


class _Inspector:
    """Walks a Spec and finds the source of each value, overrides included."""

    def __init__(self, loaded: Loaded) -> None:
        self.overridden = loaded.overridden

    def node(self, node: Node, level: int, path: str, *, is_in_product: bool = False) -> Iterator[Line]:
        """The fields of a block, or of a call under its dotted `path`.

        `is_in_product`: the line of a product has their values already.
        """
        for known in fields(type(node)).values():
            value = getattr(node, known.name)
            name = f"{path}{known.word}"
            if known.block:
                yield from self._blocks(value, level)
                continue
            if value is None:
                yield self._line(f"{name} is not given", level, node, known, is_in_product=is_in_product)
                continue
            is_call = isinstance(value, Node) and value.form == "call"
            text = value.word if isinstance(value, Node) and is_call else written_value(known, value)
            yield self._line(f"{name} = {text}", level, node, known, is_in_product=is_in_product)
            if isinstance(value, Node):
                if value.form == "block":  # the device of a cluster
                    yield from self.node(value, level + 1, "")
                else:
                    yield from self.node(
                        value, level, f"{name}.", is_in_product=is_in_product or value.form == "product"
                    )

    def _blocks(self, value: object, level: int) -> Iterator[Line]:
        blocks = value if isinstance(value, tuple) else () if value is None else (value,)
        numbers_by_block: dict[Node, list[int]] = {}
        for number, block in enumerate(blocks):
            numbers_by_block.setdefault(block, []).append(number)
        for block, numbers in numbers_by_block.items():
            head = [block.word]
            if block.labelled:
                head.append(f'"{block.name}"')  # type: ignore[attr-defined]
            elif block.selects:
                head.append(selector(list(getattr(block, "layers", None) or numbers)))
            places: dict[str, Span] = {}  # by line, the first of each
            for number in numbers:
                if span := blocks[number].span():
                    places.setdefault(str(span), span)
            first, *equal_spans = places.values() or (None,)
            equal = tuple(span for span in equal_spans if span)
            yield Line(f"{' '.join(head)}:", level, is_stated=first is not None, span=first, equal_spans=equal)
            yield from self.node(block, level + 1, "")

    def _line(self, text: str, level: int, node: Node, known: Field, *, is_in_product: bool) -> Line:
        if not node.given(known.name):
            return Line(text, level, is_stated=False)
        span = node.span(known.name)
        lets = [let for let_span, let in self.overridden if span and _contains(let_span, span)]
        value = getattr(node, known.name)
        is_repeated = is_in_product and (known.required or value != known.default)
        return Line(text, level, is_repeated=is_repeated, span=span, lets=tuple(dict.fromkeys(lets)))


def _contains(inner: Span, outer: Span) -> bool:
    return inner.source is outer.source and outer.start <= inner.start and inner.end <= outer.end
