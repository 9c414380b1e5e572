"""Values and parameters: what ops take and give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moec.passes.ir.layout import Layout
from moec.passes.ir.source_line import SourceLine

Dim = int | str
"""A constant, or one of `SYMBOLS`."""

SYMBOLS = frozenset({"batch", "sequence", "rows", "sources", "places", "pieces", "shares"})
"""Sizes that a Program does not know: `rows` of a ragged value, `sources` (ranks that sent rows), `places` of an expert
with a capacity, `pieces` of a sequence (one for each rank of tp), `shares` of a batch (one for each data-parallel
rank)."""

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

    @property
    def is_row_counts(self) -> bool:
        """Whether it says how many rows each source has for each expert: `[sources, experts]`, as `ragged` names."""
        return self.dtype == "int64" and len(self.shape) == 2 and self.shape[0] == "sources"


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
    span: SourceLine | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Value):
    """A whole number that a job may change without compiling again, from `low` to `high`; it starts as `default`.

    In a graph it is a 0-d int64 tensor on CPU, alike on every rank: an int would make a graph for each of its values.
    """

    default: int
    low: int
    high: int


TRAINING = Setting(name="training", shape=(), dtype="int64", default=1, low=0, high=1)
"""1 in training, 0 in evaluation."""

Attribute = Any
"""What an op's attribute may be: int, float, bool, str or a tuple of them."""
