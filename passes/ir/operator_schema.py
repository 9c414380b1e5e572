"""Derives the schema of a torch operator from the class of its op, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from moec.passes.ir.op import Op, operand_names

SITE = "str site='', Tensor? layer=None"
"""Arguments with the part of the model that a collective serves, for messages: see `runtime/ops/conversions.py`."""


def schema_of(op: type[Op], name: str | None = None) -> str:
    """`route(Tensor logits, int k, …) -> (Tensor probabilities, …)`, under the op's own name or another.

    Operands come first, in the order of the class, then attributes, then arguments computed from the meshes.
    """
    assert op.operator is not None, op
    results = [f"Tensor {result}" for result in (*op.gives.split(), *op.saved.split())]
    given = "Tensor" if len(results) == 1 else f"({', '.join(results)})"
    return f"{name or op.operator}({', '.join(_arguments(op))}) -> {given}"


def _arguments(op: type[Op]) -> Iterator[str]:
    required, optional = operand_names(op)
    yield from (f"Tensor {name}" for name in required if name not in op.typing)
    yield from (f"Tensor? {name}" for name in optional)
    hints = get_type_hints(op, include_extras=True)
    yield from (f"{_torch_type(hints[name])} {name}{_default(op, name)}" for name in given_attributes(op))
    yield from (text for text in op.resolved.values() if text)
    if op.sited:
        yield SITE


@cache
def given_attributes(op: type[Op]) -> tuple[str, ...]:
    """The attributes that the torch operator takes unchanged."""
    return tuple(name for name in op.attribute_names() if name not in op.resolved)


@cache
def resolved_arguments(op: type[Op]) -> tuple[str, ...]:
    """The names of the arguments that replace attributes: `groups`, `spread`, `group`."""
    return tuple(part.split()[-1] for text in op.resolved.values() for part in text.split(", ") if part)


def _default(op: type[Op], name: str) -> str:
    default = next(field.default for field in fields(op) if field.name == name)
    return "" if default is MISSING else f"={default!r}"


def _torch_type(annotation: Any) -> str:
    """`int`, `float`, `bool`, `str`, or a list of one of them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _torch_type(get_args(annotation)[0])
    if origin is Literal:
        return "str"
    if origin is tuple:
        return f"{_torch_type(get_args(annotation)[0])}[]"
    return str(annotation.__name__)
