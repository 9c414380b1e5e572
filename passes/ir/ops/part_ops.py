"""Ops of a mixture with experts of several kinds or sizes: each part of the experts gets its own choices and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from moec.passes.ir.attribute_types import Bounds, Count
from moec.passes.ir.layout import Shard
from moec.passes.ir.limits import MAX_DIM
from moec.passes.ir.op import Meshes, Op, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.mixture_ops import experts_layout
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.ops.token_operands import require_choices
from moec.passes.ir.value import Dim, Value

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("select_experts", "experts -> selected")
class SelectExperts(TokenOp):
    """The choices of one part of the experts: experts `[batch, sequence, k]` → the same shape.

    The part has `count` experts from `first` on, of `num_experts`. Its choices count from 0; all others become −1.
    """

    first: Annotated[int, Bounds(ge=0, le=MAX_DIM)]
    count: Count
    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        require(experts.dtype == "int64", self, "wants experts of each token")
        require(self.first + self.count <= self.num_experts, self, f"has {self.num_experts} experts in all")
        return (Type(shape=experts.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        experts = operands[0]
        return {
            "rows": workload.whole(experts),
            "choices": workload.shape(experts)[-1],
            "all_experts": self.num_experts,
        }


@op("count_made", "experts -> made")
class CountMade(Op):
    """The number of choices that are not −1: experts `[batch, sequence, k]` → `[sources, 1]`."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        require_choices(self, experts)
        return (Type(shape=("sources", 1), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return Placing(own_tokens(self, 1, meshes).operands, (experts_layout(meshes, {}, Shard(0)),))


@op("concat_counts", "counts* -> all_counts", moves=True)
class ConcatCounts(Op):
    """The counts `[sources, experts]` of all parts of the experts, one after the other."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        require(all(counts.is_row_counts for counts in operands), self, "wants counts [sources, experts]")
        total: Dim = sum(int(counts.shape[1]) for counts in operands)
        return (Type(shape=("sources", total), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = experts_layout(meshes, {}, Shard(0))
        return Placing((layout,) * len(operands), (layout,))
