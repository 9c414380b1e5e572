"""Checks the attributes that a file gives an op against the annotations of the op's class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from moec.passes.ir.ir_error import UnreadableLineError, quoted
from moec.passes.ir.op import Op
from moec.passes.ir.value import Attribute

LARGEST_WHOLE = 2**63
"""An attribute of type float may be written as a whole number below this one."""

Check = Callable[[Any], Any]
"""Returns a value of the type, an int as a float where the type is float. Raises `ValueError` for another type."""


@cache
def attribute_types(op: type[Op]) -> Mapping[str, Check]:
    """A strict check for each attribute of `op`, from its annotation."""
    hints = get_type_hints(op, include_extras=True)
    return {name: _check_of(hints[name]) for name in op.attribute_names()}


@cache
def attributes_of_type(op: type[Op], annotation: Any) -> tuple[str, ...]:
    """The names of the attributes of `op` that have this annotation, a type of `attribute_types.py`."""
    hints = get_type_hints(op, include_extras=True)
    return tuple(name for name in op.attribute_names() if hints[name] == annotation)


@cache
def _check_of(annotation: Any) -> Check:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(_check_of(arguments[0]), annotation.__metadata__)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple and arguments[1:] == (...,):
        return _list_of(_check_of(arguments[0]))
    if origin in (Union, UnionType) and len(arguments) == 2 and arguments[1] is NoneType:
        check = _check_of(arguments[0])
        return lambda value: None if value is None else check(value)
    return _SCALARS[annotation]


def _bounded(check: Check, bounds: Iterable[Any]) -> Check:
    def check_bounds(value: Any) -> Any:
        checked = check(value)
        for bound in bounds:
            if complaint := bound.complaint(checked):
                raise ValueError(complaint)
        return checked

    return check_bounds


def _one_of(words: tuple[str, ...]) -> Check:
    def check_word(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return check_word


def _list_of(check: Check) -> Check:
    def check_items(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, tuple):
            raise ValueError("must be a list")
        return tuple(map(check, value))

    return check_items


def _exactly(kind: type, words: str) -> Check:
    def require_kind(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"must be {words}")
        return value

    return require_kind


def _number(value: Any) -> float:
    number = float(value) if type(value) is int and abs(value) < LARGEST_WHOLE else value
    if type(number) is not float or not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


_SCALARS: Mapping[Any, Check] = {
    int: _exactly(int, "a whole number"),
    float: _number,
    bool: _exactly(bool, "true or false"),
    str: _exactly(str, "a text"),
}


def op_class(mnemonic: str) -> type[Op]:
    """The class of the op called `mnemonic`. Raises `UnreadableLineError`."""
    if mnemonic not in Op.registry:
        raise UnreadableLineError(f"there is no op {quoted(mnemonic)}{did_you_mean(mnemonic, Op.registry)}")
    return Op.registry[mnemonic]


def check_attributes(op: type[Op], attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """`attributes`, checked against the types that `op` declares, with defaults for what is left out.

    Raises `UnreadableLineError`.
    """
    types, defaults = attribute_types(op), op.attribute_defaults()
    for name in attributes:
        if name not in types:
            raise UnreadableLineError(f"{op.mnemonic} has no attribute {quoted(name)}{did_you_mean(name, types)}")
    checked: dict[str, Attribute] = {}
    for name, type_ in types.items():
        if name not in attributes and name in defaults:
            checked[name] = defaults[name]
            continue
        if name not in attributes:
            raise UnreadableLineError(f"{op.mnemonic} wants the attribute {name!r}")
        try:
            checked[name] = type_(attributes[name])
        except ValueError as error:
            raise UnreadableLineError(
                f"{op.mnemonic} has {name} = {quoted(str(attributes[name]))}: it {error}"
            ) from None
    return checked


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'route'?`, or nothing where no known word is close."""
    close = get_close_matches(word[:40], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
