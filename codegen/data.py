"""The base of what plan folders keep as JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Data(BaseModel):
    """Frozen, strict, nothing beyond what is declared."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)
