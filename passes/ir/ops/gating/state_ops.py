"""Ops that give states their new values, once per training step. None is differentiated."""

from __future__ import annotations

from collections.abc import Sequence

from moec.passes.ir.attribute_types import Positive
from moec.passes.ir.layout import REPLICATED, Layout
from moec.passes.ir.op import Meshes, Op, Placing, Type, layout_of, op, require
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value


@op("sum_sources", "counts -> loads")
class SumSources(Op):
    """Rows of each expert from all sources: counts `[sources, experts]` → loads `[experts]`."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (counts,) = operands
        require(counts.is_row_counts, self, "wants counts [sources, experts]")
        return (Type(shape=counts.shape[1:], dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0])
        sources = Layout.of((axis, placement) for axis, placement in layout.placements if axis in layout.cuts(0))
        return Placing((sources,), (sources.as_partial(),))


@op("move_bias", "bias loads -> moved", constants={"bias"})
class MoveBias(Op):
    """Moves each expert's bias towards equal loads: `biasᵢ + rate · sign(mean(loads) − loadsᵢ)`.

    Auxiliary-loss-free balancing (Wang et al. 2024, arXiv 2408.15664, algorithm 1). bias fp32 `[experts]`, loads int64
    `[experts]`. The sign is that of `sum(loads) − experts · loadsᵢ`, in whole numbers, so every rank has the same bits.
    """

    rate: Positive

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        bias, loads = operands
        require(bias.dtype == "fp32" and len(bias.shape) == 1, self, "wants an fp32 bias [experts]")
        require(loads.dtype == "int64" and loads.shape == bias.shape, self, "wants the load of each expert")
        return (Type(shape=bias.shape, dtype=bias.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return Placing((REPLICATED, REPLICATED), (REPLICATED,))
