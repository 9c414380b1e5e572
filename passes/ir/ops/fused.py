"""What `fuse` makes of mixtures: one op where rows stay on their rank, weights that travel with them where they do not.

`communicate` decided over which axes gradients of experts are summed, before these ops were there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moec.passes.ir.attribute_types import ActivationName
from moec.passes.ir.layout import REPLICATED, Shard
from moec.passes.ir.op import Meshes, Op, Placing, Type, register, require, size_of
from moec.passes.ir.ops.moe import experts_layout, require_experts
from moec.passes.ir.ops.tokens import Blocks
from moec.passes.ir.value import Value


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureMlp(Op):
    """Each token's weighted sum of its experts' feed-forwards: x, experts, weights, up, down → mixed, counts.

    What permute, expert_mlp and combine give where nothing lies between them, without a copy of a token per choice. Up
    and down, and their biases where there are any, are as `require_experts` says. A choice of −1 is dropped.
    """

    mnemonic: ClassVar[str] = "mixture_mlp"
    moves: ClassVar[bool] = True
    activation: ActivationName

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, experts, weights, *of_experts = operands
        require(experts.dtype == "int64" and x.shape[:-1] == experts.shape[:-1], self, "wants experts of each token")
        require(experts.shape == weights.shape, self, "wants a weight for each choice")
        require_experts(self, self.activation, x, of_experts)
        return (Type(shape=x.shape, dtype=x.dtype), Type(shape=("sources", of_experts[0].shape[0]), dtype="int64"))

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        weights = (REPLICATED,) * len(operands[3:])
        return Placing((*(tokens,) * 3, *weights), (tokens, experts_layout(meshes, {}, Shard(0))))

    def flops(self, operands: Sequence[Value], sizes: Mapping[str, int]) -> int:
        up, down = operands[3:5]
        return 2 * sizes["rows"] * (size_of(up.shape[1:], sizes) + size_of(down.shape[1:], sizes))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class PermuteWeights(Op):
    """Each row's weight: weights, positions, rows → weights of rows `[experts, rows]` or `[experts, places]`.

    They go where rows go then, and `expert_mlp` applies them; of rows only the shape matters. 0 in empty places.
    """

    mnemonic: ClassVar[str] = "permute_weights"
    constants: ClassVar[frozenset[int]] = frozenset({2})
    moves: ClassVar[bool] = True

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        weights, positions, rows = operands
        require(positions.shape == weights.shape, self, "wants a weight for each position")
        return (Type(shape=rows.shape[:-1], dtype=weights.dtype, ragged=rows.ragged),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        rows = experts_layout(meshes, {}, Shard(1))
        return Placing((meshes.own_tokens, meshes.own_tokens, rows), (rows,))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class SumRows(Op):
    """Each token's sum of its rows, which were weighted: rows, positions, counts; back from the expert mesh.

    What `combine` and `combine_padded` are, without anything of a row's size that backward needs.
    """

    mnemonic: ClassVar[str] = "sum_rows"
    moves: ClassVar[bool] = True

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, positions, counts = operands
        require(rows.ragged in (None, counts.name), self, f"rows are counted by {rows.ragged}, not {counts.name}")
        return (Type(shape=(*positions.shape[:-1], rows.shape[-1]), dtype=rows.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        rows, counts = (experts_layout(meshes, {}, Shard(dim)) for dim in (1, 0))
        return Placing((rows, tokens, counts), (tokens,))
