"""Values and parameters: what ops take and give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moec.grammar.source import Span
from moec.passes.ir.layout import Layout

Dim = int | str
"""A constant, or a symbol: `batch`, `sequence`, `rows` (of a ragged value), `sources` (ranks that sent rows)."""

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int64": 8}


def promoted(dtype: str) -> str:
    """`promote_types(dtype, float32)`: what routers, norms and losses compute in."""
    return dtype if dtype in ("fp32", "fp64") else "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The result of an op or an input of a block.

    A ragged value has shape `[experts, "rows", dim]`, and `ragged` names the value that counts its rows per source
    and expert; in memory it is a matrix of rows, source-major, then by expert.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    layout: Layout | None = None
    ragged: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """How a parameter starts: `ones`, `zeros`, or `normal(std)`."""

    kind: str
    std: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}({self.std!r})" if self.kind == "normal" else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Value):
    """A learned tensor of a block, named relative to it (`attention.q.weight`).

    `decays` says whether weight decay applies. `sum_over` are the mesh axes over which its gradient is summed: those
    on which it is replicated while what it is applied to is not. None until the `communicate` pass has decided.
    """

    init: Init
    decays: bool
    sum_over: tuple[str, ...] | None = None
    span: Span | None = field(default=None, compare=False, repr=False)


Attribute = Any
"""What an op's attribute may be: int, float, bool, str or a tuple of them."""
