"""The Spec and the Program of a module, and its line in `repr`."""

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

    def summary(self, signature: Mapping[str, Any]) -> str:
        """A line for `repr`; `signature` is that of the module's home."""
        model = self.spec.model
        rank = f", rank {signature['rank']} of {signature['ranks']}" if signature["ranks"] > 1 else ""
        return f"{model.name}: dim {model.dim}, computes in {model.dtype}{rank}"
