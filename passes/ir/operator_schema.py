"""Derives the schema of a torch operator from the class of its op, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from moec.passes.ir.op import Op, operand_names

SITE = "str site='', Tensor? layer=None"
"""The part of the model that a collective serves, for messages: see `runtime/ops/dense_collectives.py`."""

WAYS = "str? ways=None"
"""How an operator of experts computes each of its products: the text of a `Ways`. None: it chooses at the call."""


def schema_of(op: type[Op], name: str | None = None, *, also: str = "", saved: bool = True) -> str:
    """`route(Tensor logits, int k, …) -> (Tensor probabilities, …)`, under the op's own name or another.

    Operands come first, in the order of the class, then the layer's number, attributes, and arguments computed from the
    meshes. `also` is one more argument, for an operator that an emission function calls. `saved` adds the results that
    are for backward.
    """
    assert name or op.operator, op
    arguments = [*_arguments(op), *([also] if also else [])]
    results = [f"Tensor {result}" for result in (*op.gives.split(), *(op.saved.split() if saved else ()))]
    kind = "Tensor" if len(results) == 1 else f"({', '.join(results)})"
    return f"{name or op.operator}({', '.join(arguments)}) -> {kind}"


def _arguments(op: type[Op]) -> Iterator[str]:
    required, optional = operand_names(op)
    yield from (f"Tensor {name}" for name in required if name not in op.typing)
    yield from (f"Tensor? {name}" for name in optional)
    if op.numbered:
        yield "Tensor layer"
    hints = get_type_hints(op, include_extras=True)
    yield from (f"{_torch_type(hints[name])} {name}{_default(op, name)}" for name in given_attributes(op))
    yield from (text for text in op.resolved.values() if text)
    if op.tiled:
        yield WAYS
    if op.sited:
        yield SITE


@cache
def given_attributes(op: type[Op]) -> tuple[str, ...]:
    """The attributes that the torch operator takes unchanged."""
    return tuple(name for name in op.attribute_names() if name not in op.resolved)


def attributes_among(op: type[Op], arguments: Sequence[Any]) -> dict[str, Any]:
    """The attributes of an op, by name, among the positional arguments of its torch operator."""
    names, start = given_attributes(op), num_tensors(op)
    return dict(zip(names, arguments[start : start + len(names)], strict=True))


@cache
def num_tensors(op: type[Op]) -> int:
    """How many operands the torch operator takes, required and optional; they are its first arguments."""
    required, optional = operand_names(op)
    return len([name for name in required if name not in op.typing]) + len(optional)


@cache
def resolved_arguments(op: type[Op]) -> tuple[str, ...]:
    """The names of the arguments that replace attributes: `groups`, `spread`, `group`."""
    return tuple(part.split()[-1] for text in op.resolved.values() for part in text.split(", ") if part)


def _default(op: type[Op], name: str) -> str:
    defaults = op.attribute_defaults()
    if name not in defaults:
        return ""
    default = defaults[name]
    return f"={list(default) if isinstance(default, tuple) else default!r}"


def _torch_type(annotation: Any) -> str:
    """`int`, `float`, `bool`, `str`, a list of one of them, or `float?` where None is allowed."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        inner, none_type = get_args(annotation)
        assert none_type is NoneType
        return f"{_torch_type(inner)}?"
    if origin is Annotated:
        return _torch_type(get_args(annotation)[0])
    if origin is Literal:
        return "str"
    if origin is tuple:
        return f"{_torch_type(get_args(annotation)[0])}[]"
    return str(annotation.__name__)
