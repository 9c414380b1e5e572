"""Ops on padded rows: each expert has the same number of places, filled or empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import Count
from moec.passes.ir.layout import REPLICATED, Shard
from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.gating.capacity_ops import Capacity
from moec.passes.ir.ops.mixture_ops import (
    Activates,
    ExpertsPlacing,
    experts_layout,
    experts_of,
    require_experts,
    require_weights,
)
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.ops.token_operands import require_choices
from moec.passes.ir.value import Value
from moec.passes.ir.work.arrays import smaller, whole
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise, experts_scratch, experts_work, saved_inside_experts, used_share

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("permute_padded", "x experts starts training? -> rows counts positions", operator="permute_padded", moves=True)
class PermutePadded(Capacity):
    """Puts rows in places: x, experts, starts → rows `[experts, places, dim]`, counts `[sources, experts]`, positions.

    The number of places of a rank depends only on shapes and `$training`; empty places are zeros. The position of a
    dropped choice is −1.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, experts, starts, *settings = self.named(operands).values()
        self.require_setting(settings)
        require_choices(self, experts, x)
        require(starts.shape[2] == experts.shape[2], self, "wants starts in each queue")
        return (
            Type(shape=(starts.shape[3], "places", x.shape[-1]), dtype=x.dtype),
            Type(shape=("sources", starts.shape[3]), dtype="int64"),
            Type(shape=experts.shape, dtype="int64"),
        )

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        rows = experts_layout(meshes, {}, Shard(1))
        counts = experts_layout(meshes, {}, Shard(0))
        settings = (REPLICATED,) * len(operands[3:])
        return Placing(((tokens,) * 3 + settings), (rows, counts, tokens))

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        _, _, k, experts = workload.shape(operands[2])
        groups, capacity, tokens = self.room(k, experts, workload)
        return {"places": workload.meshes.dense.ranks * groups * smaller(capacity, tokens), "choices": k}

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, keeps=workload.keep(results[2]), forward=7)


@op("permute_dynamic", "x experts places -> rows counts positions", operator="permute_dynamic", moves=True)
class PermuteDynamic(TokenOp):
    """Like `permute_padded`, but each expert has `places` places, the rows of the busiest expert: x, experts, places.

    Drops only choices of −1 (Tutel, Hwang et al. 2023, section 3.3).
    """

    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, experts, places = operands
        require_choices(self, experts, x)
        require(places.shape == () and places.dtype == "int64", self, "wants a number of places")
        return (
            Type(shape=(self.num_experts, "places", x.shape[-1]), dtype=x.dtype),
            Type(shape=("sources", self.num_experts), dtype="int64"),
            Type(shape=experts.shape, dtype="int64"),
        )

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        rows = experts_layout(meshes, {}, Shard(1))
        counts = experts_layout(meshes, {}, Shard(0))
        return Placing((tokens, tokens, REPLICATED), (rows, counts, tokens))

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        experts = operands[1]
        ranks = workload.meshes.dense.ranks
        _, largest = workload.rows_of(workload.whole(experts) / ranks, self.num_experts)
        return {"places": ranks * -whole(-largest // 1), "choices": workload.shape(experts)[-1]}

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, keeps=workload.keep(results[2]), forward=4)


@op("expert_mlp_padded", "rows up down up_bias? down_bias? weights? -> y")
class ExpertMlpPadded(Activates):
    """Applies to each row its expert: rows `[experts, places, dim]`, experts, and optional weights of rows.

    Experts are as in `require_experts`. With `all_places` they also compute empty places where no row changes rank, so
    that shapes follow from shapes (Megatron-Core's `moe_pad_expert_input_to_capacity`).
    """

    all_places: bool = False

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        by_name = self.named(operands)
        rows = by_name["rows"]
        require_weights(self, rows, by_name)
        require_experts(self, rows, by_name)
        return (Type(shape=rows.shape, dtype=rows.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        by_name = self.named(operands)
        placing = ExpertsPlacing.of(self, by_name["up"], meshes)
        return Placing(placing.of_operands(by_name), (placing.results,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        by_name = self.named(operands)
        rows, experts = by_name["rows"], experts_of(by_name)
        local, places, _ = workload.shape(rows)
        work = experts_work(local * places, places, experts, workload, forward=3, backward=4)
        inner = saved_inside_experts(results[0], local * places, experts[0], workload)
        saved = (*workload.keep(*operands), *inner)
        scratch = experts_scratch(local * places, places, experts, workload, gathers=(0, 0))
        used = used_share(experts[0], workload)
        return Cost(work=work, saved=saved, used=used, scratch=scratch, of_experts=True)


@op("combine_padded", "rows positions weights -> mixed", operator="combine_padded", moves=True)
class CombinePadded(TokenOp):
    """Sums each token's weighted rows, without dropped choices: rows, positions, weights."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, positions, weights = operands
        require(positions.shape == weights.shape, self, "wants a weight for each position")
        return (Type(shape=(*positions.shape[:-1], rows.shape[-1]), dtype=rows.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        return Placing((experts_layout(meshes, {}, Shard(1)), tokens, tokens), (tokens,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, keeps=workload.keep(*operands), backward=2)
