"""Ops of a mixture with a capacity: queues of experts, padded rows, and what is done to them.

A group's choices stand in its experts' queues, all first choices before all second ones, tokens in order (GShard,
Lepikhin et al. 2020, section 3.1 and algorithm 1); who stands beyond the capacity is dropped. Groups are `sequence`,
`batch` (of all ranks) or `rank` (one data-parallel rank's sequences). A choice of −1, a padding token's, stands in no
queue and takes no place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moec.passes.ir.attribute_types import ActivationName, Count, RoutingGroup, WideCount
from moec.passes.ir.layout import REPLICATED, Layout, Partial, Shard
from moec.passes.ir.op import Meshes, Op, Placing, Type, register, require, size_of
from moec.passes.ir.ops.moe import (
    apart,
    experts_held,
    experts_layout,
    grouped,
    require_experts,
    require_weights,
)
from moec.passes.ir.ops.tokens import Blocks, own_tokens
from moec.passes.ir.value import TRAINING, Setting, Value


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class CountQueues(Op):
    """How many j-th choices of a piece of a sequence are of each expert.

    experts `[batch, sequence, k]` → `[batch, pieces, k, experts]`; a rank has one piece of each of its sequences.
    """

    mnemonic: ClassVar[str] = "count_queues"
    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        require(experts.dtype == "int64" and len(experts.shape) == 3, self, "wants experts of each token")
        return (Type(shape=(experts.shape[0], "pieces", experts.shape[2], self.num_experts), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStarts(Op):
    """Where each piece's choices start in the queues of its group: counts `[batch, pieces, k, experts]` → alike."""

    mnemonic: ClassVar[str] = "queue_starts"
    group: RoutingGroup

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (counts,) = operands
        require(counts.dtype == "int64" and len(counts.shape) == 4, self, "wants counts of each piece")
        return (Type(shape=counts.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        whole = grouped(self.group, meshes)
        return Placing((whole,), (whole,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity(Op):
    """What takes choices up to a capacity: at most `max(least, ⌈factor · k · tokens / experts⌉)` of a group and expert.

    `factor` is the fraction `parts / whole`, in evaluation `eval_parts / eval_whole`; where the two differ, the last
    operand is the setting `$training`.
    """

    group: RoutingGroup
    parts: WideCount
    whole: WideCount
    eval_parts: WideCount
    eval_whole: WideCount
    least: Count

    @property
    def varies(self) -> bool:
        """Whether the capacity of evaluation is another than that of training."""
        return self.parts * self.eval_whole != self.eval_parts * self.whole

    def capacity(self) -> dict[str, Any]:
        """The attributes that say the capacity."""
        return {name: getattr(self, name) for name in Capacity.__annotations__}

    def require_setting(self, settings: Sequence[Value]) -> None:
        """Requires `$training` exactly where the capacity depends on it."""
        scalar = all(isinstance(v, Setting) and v.name == TRAINING.name for v in settings)
        require(len(settings) == int(self.varies) and scalar, self, "wants $training where its capacity varies")


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class PermutePadded(Capacity):
    """Rows in their places: x, experts, starts → rows `[experts, places, dim]`, counts `[sources, experts]`, positions.

    How many places a rank has follows from shapes and `$training` alone; empty ones are zeros. The position of a choice
    that was dropped is −1.
    """

    mnemonic: ClassVar[str] = "permute_padded"
    moves: ClassVar[bool] = True
    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, experts, starts, *settings = operands
        self.require_setting(settings)
        require(experts.dtype == "int64" and x.shape[:-1] == experts.shape[:-1], self, "wants experts of each token")
        require(starts.shape[2:] == (experts.shape[2], self.num_experts), self, "wants starts in each queue")
        return (
            Type(shape=(self.num_experts, "places", x.shape[-1]), dtype=x.dtype),
            Type(shape=("sources", self.num_experts), dtype="int64"),
            Type(shape=experts.shape, dtype="int64"),
        )

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        rows = experts_layout(meshes, {}, Shard(1))
        counts = experts_layout(meshes, {}, Shard(0))
        settings = (REPLICATED,) * len(operands[3:])
        return Placing(((tokens,) * 3 + settings), (rows, counts, tokens))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class KeepChoices(Capacity):
    """The choices that an expert takes, −1 in the place of the others: experts `[batch, sequence, k]`, starts → alike.

    What `permute_padded` drops with the same attributes.
    """

    mnemonic: ClassVar[str] = "keep_choices"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        experts, starts, *settings = operands
        self.require_setting(settings)
        require(experts.dtype == "int64" and starts.shape[2] == experts.shape[2], self, "wants starts in each queue")
        return (Type(shape=experts.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        settings = (REPLICATED,) * len(operands[2:])
        return Placing(((meshes.own_tokens,) * 2 + settings), (meshes.own_tokens,))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class LargestLoad(Op):
    """The rows of the busiest expert of a rank: experts `[batch, sequence, k]`, −1 for none → scalar.

    Not differentiated.
    """

    mnemonic: ClassVar[str] = "largest_load"
    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        require(experts.dtype == "int64" and len(experts.shape) == 3, self, "wants experts of each token")
        return (Type(shape=(), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        return Placing((tokens,), (Layout.of(dict.fromkeys(tokens.axes, Partial("max"))),))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class PermuteDynamic(Op):
    """As `permute_padded`, with as many places for each expert as the busiest has rows: x, experts, places.

    Only a choice of −1 is dropped (Tutel, Hwang et al. 2022, section 3.3).
    """

    mnemonic: ClassVar[str] = "permute_dynamic"
    moves: ClassVar[bool] = True
    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, experts, places = operands
        require(experts.dtype == "int64" and x.shape[:-1] == experts.shape[:-1], self, "wants experts of each token")
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


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMlpPadded(Op):
    """Each row through its expert: rows `[experts, places, dim]`, weights of rows or none, and experts.

    These are as `require_experts` says.
    """

    mnemonic: ClassVar[str] = "expert_mlp_padded"
    activation: ActivationName

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (rows, *weights), experts = apart(operands)
        require_weights(self, rows, weights)
        require_experts(self, self.activation, rows, experts)
        return (Type(shape=rows.shape, dtype=rows.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        given, experts = apart(operands)
        held = experts_held(self, experts[0])
        rows = experts_layout(meshes, dict.fromkeys(held.axes, Shard(0)), Shard(1))
        return Placing((*(rows,) * len(given), *(held,) * len(experts)), (rows,))

    def flops(self, operands: Sequence[Value], sizes: Mapping[str, int]) -> int:
        _, (up, down, *_) = apart(operands)
        return 2 * sizes["places"] * (size_of(up.shape, sizes) + size_of(down.shape, sizes))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class CombinePadded(Op):
    """Each token's weighted sum of its rows, without those that were dropped: rows, positions, weights."""

    mnemonic: ClassVar[str] = "combine_padded"
    moves: ClassVar[bool] = True

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, positions, weights = operands
        require(positions.shape == weights.shape, self, "wants a weight for each position")
        return (Type(shape=(*positions.shape[:-1], rows.shape[-1]), dtype=rows.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        return Placing((experts_layout(meshes, {}, Shard(1)), tokens, tokens), (tokens,))
