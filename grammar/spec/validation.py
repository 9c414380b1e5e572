"""Validation of nodes that are built in Python, by pydantic models made from the same annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model, field_validator

from moec.grammar.spec.base import Node, field_types
from moec.grammar.units import a_layer_holds

_STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


def validated(cls: type[Node], values: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a `cls` made of `values`, defaults filled in. Raises `pydantic.ValidationError`."""
    made = _model(cls)(**values)
    return {name: getattr(made, name) for name in field_types(cls)}


_MODELS: dict[type[Node], type[BaseModel]] = {}


def _model(cls: type[Node]) -> type[BaseModel]:
    if cls in _MODELS:
        return _MODELS[cls]
    fields: dict[str, Any] = {
        name: (annotation, getattr(cls, name, ...)) for name, annotation in field_types(cls).items()
    }
    checks = {"range": field_validator("*")(_in_range)}
    _MODELS[cls] = create_model(cls.__name__, __config__=_STRICT, __validators__=checks, **fields)
    return _MODELS[cls]


def _in_range(value: Any) -> Any:
    """`value`. Its floats have the range that `resolve/numbers.py` wants in a file."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not a_layer_holds(number):
            raise ValueError("must be within the range of bf16")
    return value
