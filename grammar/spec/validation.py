"""Validation of nodes that are built in Python, by pydantic models made from the same annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from moec.grammar.spec.base import Node, field_types

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
    _MODELS[cls] = create_model(cls.__name__, __config__=_STRICT, **fields)
    return _MODELS[cls]
