"""The op that sends rows of an expert to one of its copies: its home, or a guest on another rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import AxisName, Count
from moec.passes.ir.layout import REPLICATED, Shard
from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.mixture_ops import experts_layout
from moec.passes.ir.ops.ragged_conversions import GatherCounts
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op(
    "assign_slots",
    "experts slots -> placed counts received splits",
    operator="assign_slots",
    resolved={"axis": "str group"},
    sited=True,
    moves=True,
    copies_to_host=True,
)
class AssignSlots(TokenOp):
    """Choices of experts → choices of slots, with what `exchange_counts` would give for the rows of slots.

    `slots` [2, ranks, slots of a rank]: the expert of each slot, −1 for none, and its share of the expert's rows. A
    slot's number counts rank by rank. All ranks of the axis gather the counts `[1, num_experts]` of their rows, and
    split each expert's rows among its slots alike: as the shares say, or where all shares are 0 so that ranks have
    equally many rows (`passes/guests/split.py`). Choices of −1 stay −1.
    """

    axis: AxisName
    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        experts, slots = operands
        require(experts.dtype == "int64" and len(experts.shape) == 3, self, "wants choices [batch, sequence, k]")
        fits = slots.dtype == "int64" and len(slots.shape) == 3 and slots.shape[0] == 2
        require(fits, self, "wants slots [2, ranks, slots of a rank]")
        _, ranks, of_rank = slots.shape
        assert isinstance(ranks, int)
        assert isinstance(of_rank, int)
        require(
            ranks * of_rank >= self.num_experts, self, f"has {ranks * of_rank} slots for {self.num_experts} experts"
        )
        return (
            Type(shape=experts.shape, dtype="int64"),
            Type(shape=("sources", self.num_experts), dtype="int64"),
            Type(shape=("sources", ranks * of_rank), dtype="int64"),
            Type(shape=(2, "sources"), dtype="int64"),
        )

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens, counts = meshes.own_tokens, experts_layout(meshes, {}, Shard(0))
        return Placing((tokens, REPLICATED), (tokens, counts, counts.replace(self.axis, Shard(1)), counts))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        _, counts, received, splits = results
        gathered = GatherCounts.over(self.axis).cost((counts,), (received, splits), workload)
        own = elementwise(self, operands, results, workload, forward=4)
        return Cost(work=own.work, saved=own.saved, sent=gathered.sent)
