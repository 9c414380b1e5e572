"""Checks the attributes that a file gives an op against the annotations of the op's class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from moec.passes.ir.ir_error import UnreadableLineError, quoted
from moec.passes.ir.op import Op
from moec.passes.ir.value import Attribute

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@cache
def attribute_types(op: type[Op]) -> Mapping[str, TypeAdapter[Any]]:
    """A strict check for each attribute of `op`, from its annotation."""
    hints = get_type_hints(op, include_extras=True)
    return {name: _adapter(hints[name]) for name in op.attribute_names()}


@cache
def attributes_of_type(op: type[Op], annotation: Any) -> tuple[str, ...]:
    """The names of the attributes of `op` that have this annotation, a type of `attribute_types.py`."""
    hints = get_type_hints(op, include_extras=True)
    return tuple(name for name in op.attribute_names() if hints[name] == annotation)


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=_STRICT)


def op_class(mnemonic: str) -> type[Op]:
    """The class of the op called `mnemonic`. Raises `UnreadableLineError`."""
    if mnemonic not in Op.registry:
        raise UnreadableLineError(f"there is no op {quoted(mnemonic)}{did_you_mean(mnemonic, Op.registry)}")
    return Op.registry[mnemonic]


def check_attributes(op: type[Op], given: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """`given`, checked against the types that `op` declares, with defaults for what is left out.

    Raises `UnreadableLineError`.
    """
    types, defaults = attribute_types(op), op.attribute_defaults()
    for name in given:
        if name not in types:
            raise UnreadableLineError(f"{op.mnemonic} has no attribute {quoted(name)}{did_you_mean(name, types)}")
    checked: dict[str, Attribute] = {}
    for name, type_ in types.items():
        if name not in given and name in defaults:
            checked[name] = defaults[name]
            continue
        if name not in given:
            raise UnreadableLineError(f"{op.mnemonic} wants the attribute {name!r}")
        try:
            checked[name] = type_.validate_python(given[name])
        except ValidationError as error:
            message = error.errors(include_url=False, include_context=False)[0]["msg"]
            shown = quoted(str(given[name]))
            raise UnreadableLineError(f"{op.mnemonic} has {name} = {shown}: {_lower(message)}") from None
    return checked


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'route'?`, or nothing where no known word is close."""
    close = get_close_matches(word[:40], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
