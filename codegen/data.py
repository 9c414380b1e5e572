"""The base class of the JSON data in plan folders."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Data(BaseModel):
    """Frozen and strict; undeclared fields are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)
