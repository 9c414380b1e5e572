"""The Spec and the Program of a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moec.grammar.spec import Spec
from moec.passes.ir import Program


@dataclass(frozen=True, slots=True)
class ModuleOrigin:
    """The Spec and the Program that a module runs; deep copies share it."""

    spec: Spec
    program: Program

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleOrigin:
        return self

    def in_words(self, place: Mapping[str, Any]) -> str:
        """A line for `repr`; `place` is the signature of the module's home."""
        model = self.spec.model
        rank = f", rank {place['rank']} of {place['ranks']}" if place["ranks"] > 1 else ""
        return f"{model.name}: dim {model.dim}, computes in {model.dtype}{rank}"
