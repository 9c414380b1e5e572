"""The shapes of kernels that compute no product: routing, gated activations, the table of tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moec.codegen.kernels.kernel_shape import KernelShape, power_of_two
from moec.passes.ir.activations import kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape(KernelShape):
    """`route` and its backward: logits [T, E] of fp32 or fp64."""

    template: ClassVar[str] = "route"
    experts: int
    k: int
    score: str
    after: bool
    normalize: bool
    scale: float = 1.0
    groups: int = 1
    keep_groups: int = 1
    group_score: str = "top2_sum"
    biased: bool = False
    dtype: str

    @property
    def backward_shape(self) -> RouteShape:
        """The shape of the kernel `route_backward`, which reads the choices and so needs no groups and no biases."""
        return replace(self, groups=1, keep_groups=1, group_score="top2_sum", biased=False)

    def constants(self) -> dict[str, Any]:
        """A program has about 2,048 scores: with twice as many, backward spills from 64 experts on (sm_90)."""
        groups, size = power_of_two(self.groups), power_of_two(self.experts // self.groups)
        width = groups * size
        lowest = "-1.7976931348623157e308" if self.dtype == "fp64" else "-3.4028234663852886e38"
        block = max(1, min(64, 2048 // width))
        return {"EP": width, "GP": groups, "SP": size, "KP": power_of_two(self.k), "BLOCK": block, "lowest": lowest}

    def pointers(self) -> dict[str, str]:
        """The numbers of chosen experts are int64."""
        return {"experts_ptr": "i64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedShape(KernelShape):
    """The gated activation of a dense feed-forward, and its gradient."""

    template: ClassVar[str] = "gated"
    hidden: int
    activation: str
    dtype: str
    clamp: float | None = None
    alpha: float | None = None

    def constants(self) -> dict[str, Any]:
        """A program computes at most 1,024 columns at a time."""
        kind = kind_of(self.activation, self.clamp, self.alpha)
        return {"BLOCK": min(1024, power_of_two(self.hidden)), "function": kind.function, "second": kind.second}


TABLES = ("offsets_ptr", "total_ptr", "experts_ptr", "starts_ptr", "order_ptr")
"""Arguments with the tables of each expert's rows and tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesShape(KernelShape):
    """The table of each tile's expert, for grouped products."""

    template: ClassVar[str] = "tiles"
    experts: int
    rows: int

    def constants(self) -> dict[str, Any]:
        """A program makes about 8,192 comparisons at a time."""
        width = power_of_two(self.experts)
        return {"EP": width, "BLOCK": max(1, min(128, 8192 // width))}

    def pointers(self) -> dict[str, str]:
        """The counts, which an operator gives, are int64; the table is int32."""
        return {"counts_ptr": "i64", **dict.fromkeys(TABLES, "i32")}
