"""`moec inspect`: the resolved Spec, every value with its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from moec.commands.documents import InspectedLine
from moec.commands.output import emit
from moec.driver import read
from moec.grammar.diagnostics import Diagnostic
from moec.grammar.load import Loaded
from moec.grammar.printer import selector, written_value
from moec.grammar.schema import fields
from moec.grammar.source import Span
from moec.grammar.spec.base import Node

Line = tuple[str, str]
"""A value and its source."""


def run(file: Path, lets: Mapping[str, str], style: str = "full") -> tuple[Diagnostic, ...]:
    """Prints the Spec of `file`; returns the warnings. Raises `DiagnosticError` for a file with errors."""
    loaded = read(file, **lets)
    spec = loaded.unwrap()
    lines = list(_Inspector(loaded).node(spec, 0, ""))
    width = min(max(len(line) for line, _ in lines), 72)
    emit(
        style,
        lambda: (f"{line.ljust(width)}  # {origin}" if origin else line for line, origin in lines),
        lambda: [InspectedLine(text=line, origin=origin) for line, origin in lines],
    )
    return loaded.diagnostics


class _Inspector:
    """Walks a Spec and finds the source of each value, overrides included."""

    def __init__(self, loaded: Loaded) -> None:
        self.overridden = loaded.overridden

    def node(self, node: Node, level: int, path: str) -> Iterator[Line]:
        """The fields of a block, or of a call under its dotted `path`."""
        indent = "  " * level
        for known in fields(type(node)).values():
            value = getattr(node, known.name)
            name = f"{path}{known.word}"
            if known.block:
                yield from self._blocks(value, level)
            elif value is None:
                yield f"{indent}{name} is not given", "default"
            elif isinstance(value, Node) and value.form == "call":
                yield f"{indent}{name} = {value.word}", self._origin(node, known.name)
                yield from self.node(value, level, f"{name}.")
            elif isinstance(value, Node) and value.form == "block":  # the device of a cluster
                yield f"{indent}{name} = {written_value(known, value)}", self._origin(node, known.name)
                yield from self.node(value, level + 1, "")
            elif isinstance(value, Node):
                yield f"{indent}{name} = {written_value(known, value)}", self._origin(node, known.name)
                yield from self.node(value, level, f"{name}.")
            else:
                yield f"{indent}{name} = {written_value(known, value)}", self._origin(node, known.name)

    def _blocks(self, value: object, level: int) -> Iterator[Line]:
        blocks = value if isinstance(value, tuple) else () if value is None else (value,)
        numbers: dict[int, list[int]] = {}
        for number, block in enumerate(blocks):
            numbers.setdefault(id(block), []).append(number)
        seen: set[int] = set()
        for block in blocks:
            if id(block) in seen:
                continue
            seen.add(id(block))
            head = [block.word]
            if block.labelled:
                head.append(f'"{block.name}"')
            elif block.selects:
                head.append(selector(list(getattr(block, "layers", None) or numbers[id(block)])))
            span = block.span()
            yield f"{'  ' * level}{' '.join(head)}:", self._place(span) if span else "default"
            yield from self.node(block, level + 1, "")

    def _origin(self, node: Node, field: str) -> str:
        if not node.given(field):
            return "default"
        span = node.span(field)
        if span is None:
            return ""
        here = [text for other, text in self.overridden if _within(other, span)]
        return ", ".join([self._place(span), *(f"--let {text}" for text in dict.fromkeys(here))])

    @staticmethod
    def _place(span: Span) -> str:
        return str(span)


def _within(inner: Span, outer: Span) -> bool:
    return inner.source is outer.source and outer.start <= inner.start and inner.end <= outer.end
