"""A Spec to its canonical text: one way to write it, self-contained, and reading back as an equal Spec.

Defaults are left out. There is no `use` and no `let`: the cluster and its device are written in full. Identical layers
are one `layers` block, so the text grows only with the distinct layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from fractions import Fraction

from moec.grammar.diagnostics.diagnostic import InternalError
from moec.grammar.format import formatted
from moec.grammar.layer_numbers import ranges
from moec.grammar.schema import Field, Kind, NumberKind, ReferenceKind, TextKind, WordKind, fields
from moec.grammar.source import Source
from moec.grammar.spec import Layer, LayerRange, ParallelLayers, Spec, distinct_layers
from moec.grammar.spec.base import Node
from moec.grammar.units import written

_INDENT = "  "
_WIDEST = 100
"""Columns of an inner block that is written on one line."""


def to_text(spec: Spec) -> str:
    """The `.moe` text of `spec`: `load_text(to_text(spec)).spec == spec`, if `rules.check` finds nothing in it."""
    blocks = [_block(spec.model)] if spec.model else []
    blocks += [_block(node) for node in (*spec.layers, spec.cluster.device, spec.cluster)]
    blocks += [_block(node) for node in (spec.train, spec.adapt) if node]
    blocks += [_block(spec.parallel)] if _says_anything(spec.parallel) else []
    return "\n".join("\n".join(block) + "\n" for block in blocks)


def model_text(spec: Spec) -> str:
    """The text of the `model` block alone, in the standard layout."""
    text = "\n".join(_block(spec.model)) + "\n"
    return formatted(Source(spec.model.name, text))


def written_value(known: Field, value: object) -> str:
    """`value` as it is written for the field `known`."""
    return _value(known.kinds, value)


def set_lines(node: Node) -> list[str]:
    """The content of a block: a line for each value that is not the default, and the lines of inner blocks."""
    lines: list[str] = []
    for known in fields(type(node)).values():
        value = getattr(node, known.name)
        if value is None or (not known.required and value == known.default):
            continue
        if not known.block:
            lines.append(f"{known.word} = {written_value(known, value)}")
        else:
            for inner, of_layers in _blocks(value):
                lines += _block(inner, of_layers, inside=True)
    return lines


def _block(node: Node, selector: str = "", *, inside: bool = False) -> list[str]:
    """The lines of `word "label" selector { … }`."""
    head = [node.word, *([_quoted(node.name)] if node.labelled else []), *([selector] if selector else [])]  # type: ignore[attr-defined]
    lines = set_lines(node)
    if not lines:
        return [f"{' '.join(head)} {{ }}"]
    short = f"{' '.join(head)} {{ {'; '.join(lines)} }}"
    if inside and len(short) <= _WIDEST and not any(line.endswith(("{", "}")) for line in lines):
        return [short]
    return [f"{' '.join(head)} {{", *(_INDENT + line for line in lines), "}"]


def _blocks(value: Node | tuple[Node, ...]) -> Iterator[tuple[Node, str]]:
    """Each block of a field, with the selector of those that have one."""
    if isinstance(value, Node):
        yield value, ""
    elif all(isinstance(node, Layer) for node in value):
        yield from _layers(value)  # type: ignore[arg-type]
    else:
        for node in value:
            yield node, selector(list(node.layers)) if isinstance(node, ParallelLayers) and node.layers else ""


def _layers(layers: tuple[Layer, ...]) -> Iterator[tuple[Node, str]]:
    """Each distinct layer with the selector of all its layers, so that they are one object when read back."""
    for layer, indices in distinct_layers(layers):
        yield layer, "" if len(indices) == len(layers) else selector(indices)


def selector(indices: list[int]) -> str:
    """`5`, `0..31`, `1..23 step 2`, or a list of numbers and ranges."""
    first, last = indices[0], indices[-1]
    step = indices[1] - first if len(indices) > 2 else 1
    if step > 1 and indices == list(range(first, last + 1, step)):
        return f"{first}..{last} step {step}"
    runs = ranges(indices)
    return runs[0] if len(runs) == 1 else f"[{', '.join(runs)}]"


def _value(kinds: tuple[Kind, ...], value: object) -> str:
    match value:
        case Node() if any(isinstance(kind, ReferenceKind) for kind in kinds):
            return _reference(value.name)  # type: ignore[attr-defined]
        case Node() if value.form == "product":
            return " * ".join(
                written_value(known, getattr(value, known.name)) for known in fields(type(value)).values()
            )
        case Node():
            return _call(value)
        case bool():
            return "true" if value else "false"
        case Enum():
            return str(value.value)
        case int() | float() | Fraction():
            unit = next((kind.unit for kind in kinds if isinstance(kind, NumberKind)), "")
            return written(value, unit)
        case str() if any(isinstance(kind, WordKind) and value in kind.values for kind in kinds):
            return value
        case str() if any(isinstance(kind, TextKind) for kind in kinds):
            return _quoted(value)
        case LayerRange():
            return str(value)
        case tuple():
            items = tuple(item for kind in kinds for item in getattr(kind, "items", ()))
            return f"[{', '.join(_value(items, item) for item in value)}]"
    raise InternalError(f"a Spec holds a value that has no text: {value!r}")


def _call(node: Node) -> str:
    arguments = []
    by_position = True
    for known in _in_order(node):
        value = getattr(node, known.name)
        if value is None or (not known.required and value == known.default):
            by_position = False
            continue
        by_position = by_position and known.name in node.positional
        text = written_value(known, value)
        arguments.append(text if by_position else f"{known.word} = {text}")
    return f"{node.word}({', '.join(arguments)})" if arguments else node.word


def _in_order(node: Node) -> list[Field]:
    """Positional fields first, in their order."""
    known = list(fields(type(node)).values())
    order = {name: index for index, name in enumerate(node.positional)}
    return sorted(known, key=lambda item: order.get(item.name, len(order)))


def _reference(name: str) -> str:
    plain = name.isascii() and name.isidentifier() and name[0].isalpha()
    return name if plain and name not in ("use", "let", "step") else _quoted(name)


def _quoted(text: str) -> str:
    assert '"' not in text, "the schema keeps labels to what can be written"
    return f'"{text}"'


def _says_anything(node: Node) -> bool:
    return any(getattr(node, known.name) != known.default or known.required for known in fields(type(node)).values())
