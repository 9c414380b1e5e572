"""Queues of experts, and the capacity beyond which choices are dropped.

Each expert has a queue of a group's choices: all first choices before all second choices, tokens in order (GShard,
Lepikhin et al. 2020, section 3.1 and algorithm 1). Choices beyond the capacity are dropped. Groups are `sequence`,
`batch` (of all ranks) or `rank` (the sequences of one data-parallel rank). A padding token's choice, −1, is in no
queue and takes no place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moec.passes.ir.attribute_types import Count, RoutingGroup, WideCount
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.op import Meshes, Op, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.mixture_ops import group_layout
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.ops.token_operands import require_choices, require_training_where
from moec.passes.ir.value import Value
from moec.passes.ir.work.arrays import larger, smaller, whole
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("count_queues", "experts -> queues", operator="count_queues")
class CountQueues(TokenOp):
    """Counts, for each piece of a sequence, its j-th choices of each expert.

    experts `[batch, sequence, k]` → `[batch, pieces, k, experts]`; a rank has one piece of each of its sequences.
    """

    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        require_choices(self, experts)
        return (Type(shape=(experts.shape[0], "pieces", experts.shape[2], self.num_experts), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=2)


@op("queue_starts", "counts -> starts", operator="queue_starts", resolved={"group": "int groups"})
class QueueStarts(TokenOp):
    """The start of each piece's choices in its group's queues: counts `[batch, pieces, k, experts]` → same shape."""

    group: RoutingGroup

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (counts,) = operands
        require(counts.dtype == "int64" and len(counts.shape) == 4, self, "wants counts of each piece")
        return (Type(shape=counts.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = group_layout(self.group, meshes)
        return Placing((layout,), (layout,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity(Op):
    """Base of ops with a capacity: at most `max(least, ⌈factor · k · tokens / experts⌉)` choices per group and expert.

    `factor` is `parts / whole` in training and `eval_parts / eval_whole` in evaluation; where the two differ, the last
    operand is the setting `$training`.
    """

    resolved: ClassVar[Mapping[str, str]] = {"group": "int groups, int spread"}
    group: RoutingGroup
    parts: WideCount
    whole: WideCount
    eval_parts: WideCount
    eval_whole: WideCount
    least: Count

    def other_tokens(self, operands: Sequence[Value]) -> str:
        """Costs nothing where an expert has a place for every token, `factor · k ≥ experts`: no choice is dropped."""
        by_name = self.named(operands)
        k, scored = by_name["experts"].shape[-1], by_name.get("starts") or by_name.get("logits")
        experts = scored.shape[-1] if scored is not None else getattr(self, "num_experts", 0)
        if isinstance(k, int) and isinstance(experts, int) and self.eval_parts * k >= self.eval_whole * experts:
            return ""
        return "a capacity, under which the choices of several tokens compete"

    @property
    def varies(self) -> bool:
        """Whether the capacity factors of training and evaluation differ."""
        return self.parts * self.eval_whole != self.eval_parts * self.whole

    def capacity(self) -> dict[str, Any]:
        """The attributes that define the capacity, by name."""
        return {name: getattr(self, name) for name in Capacity.attribute_names()}

    def require_setting(self, settings: Sequence[Value]) -> None:
        """Requires `$training` exactly where the capacity depends on it."""
        require_training_where(self, self.varies, settings)

    def bound_rows(self, experts: Value, num_experts: int, workload: Workload) -> Mapping[str, float]:
        """The most rows of choices with a place, over all ranks, and of one expert: experts `[batch, sequence, k]`."""
        groups, capacity, _ = self.room(workload.shape(experts)[-1], num_experts, workload)
        ranks = 1 if self.group == "batch" else workload.meshes.size("dp")
        places = capacity * groups * ranks
        return {"rows": smaller(workload.whole(experts), num_experts * places), "expert_rows": places}

    def room(self, k: int, experts: int, workload: Workload) -> tuple[int, int, int]:
        """In training: routing groups of a rank, places per expert and group, and the rank's tokens per group."""
        dp, sharers = workload.meshes.size("dp"), workload.meshes.sharers
        groups_of = {
            "sequence": larger(1, workload.batch // dp),
            "batch": 1,
            "rank": larger(1, whole(workload.sizes["data_ranks"]) // dp),
        }
        groups = groups_of[self.group]
        tokens = workload.tokens // (dp * sharers * groups)
        group_tokens = tokens * sharers * (dp if self.group == "batch" else 1)
        return groups, larger(self.least, -(-self.parts * k * group_tokens // (self.whole * experts))), tokens


@op("keep_choices", "experts starts training? -> kept", operator="keep_choices")
class KeepChoices(Capacity):
    """Replaces dropped choices by −1: experts `[batch, sequence, k]`, starts → kept, of the shape of experts.

    Drops the same choices as `permute_padded` with the same attributes.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        experts, starts, *settings = self.named(operands).values()
        self.require_setting(settings)
        require(experts.dtype == "int64" and starts.shape[2] == experts.shape[2], self, "wants starts in each queue")
        return (Type(shape=experts.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        settings = (REPLICATED,) * len(operands[2:])
        return Placing(((meshes.own_tokens,) * 2 + settings), (meshes.own_tokens,))

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        experts, starts, *_ = operands
        return self.bound_rows(experts, workload.shape(starts)[-1], workload)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=3)


@op("largest_load", "experts -> places", operator="largest_load")
class LargestLoad(TokenOp):
    """Number of rows of a rank's busiest expert: experts `[batch, sequence, k]` → scalar.

    A choice of −1 is not counted. Not differentiated.
    """

    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        require_choices(self, experts)
        return (Type(shape=(), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        return Placing((tokens,), (tokens.as_partial("max"),))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=2)
