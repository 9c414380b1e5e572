"""Strict JSON, and the base class of its data, for plan folders and checkpoints."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Data(BaseModel):
    """Frozen and strict; undeclared fields are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)


def strict_json(content: bytes) -> Any:
    """The value of a JSON text. Raises `ValueError` for anything else, NaN and infinity included."""

    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is no number")

    try:
        return json.loads(content.decode(), parse_constant=refuse_constant)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def first_fault(error: ValidationError) -> str:
    """The first field that pydantic refuses, and its reason."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
