"""Ops of a mixture of experts: route, permute, expert_mlp, combine, and the balance terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moec.passes.ir.layout import Layout, Partial, Placement, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, layout_of, register, require, size_of
from moec.passes.ir.ops.linear import ACTIVATION_PARTS
from moec.passes.ir.ops.tokens import Blocks, own_tokens, sum_tokens
from moec.passes.ir.value import Value


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Op):
    """Which experts each token goes to: logits `[batch, sequence, experts]` → probabilities, weights, experts.

    `order = before` scores all experts and keeps the best k, `after` scores only the k best logits; ties go to the
    lower index. The probabilities are for balance terms: the softmax, or sigmoid scores over their sum
    (DeepSeek-V3, eq. 19).
    """

    mnemonic: ClassVar[str] = "route"
    k: int
    score: str
    order: str
    normalize: bool

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (logits,) = operands
        experts = logits.shape[-1]
        require(isinstance(experts, int) and self.k <= experts, self, f"k = {self.k} of {experts} experts")
        chosen = (*logits.shape[:-1], self.k)
        return (
            Type(shape=logits.shape, dtype=logits.dtype),
            Type(shape=chosen, dtype=logits.dtype),
            Type(shape=chosen, dtype="int64"),
        )

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)


def _experts_layout(meshes: Meshes, by_expert: Mapping[str, Placement], otherwise: Placement) -> Layout:
    assert meshes.experts is not None, "an op of a mixture stands in a block without an expert mesh"
    return Layout.of({axis: by_expert.get(axis, otherwise) for axis in meshes.experts.wide_axes()})


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Permute(Op):
    """Rows in the order of their expert: x, experts → rows (ragged), counts `[sources, experts]`, positions.

    This is where a value leaves the dense mesh for the expert mesh: a rank's tokens become its rows.
    """

    mnemonic: ClassVar[str] = "permute"
    moves: ClassVar[bool] = True
    num_experts: int

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, experts = operands
        require(experts.dtype == "int64" and x.shape[:-1] == experts.shape[:-1], self, "wants experts of each token")
        counts = self.results[1].name
        return (
            Type(shape=(self.num_experts, "rows", x.shape[-1]), dtype=x.dtype, ragged=counts),
            Type(shape=("sources", self.num_experts), dtype="int64"),
            Type(shape=experts.shape, dtype="int64"),
        )

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = own_tokens(self, 2, meshes).operands
        own_rows = _experts_layout(meshes, {}, Shard(1))
        own_counts = _experts_layout(meshes, {}, Shard(0))
        return Placing(tokens, (own_rows, own_counts, tokens[0]))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMlp(Op):
    """Each row through its expert: rows, counts, up `[experts, parts, hidden, dim]`, down `[experts, dim, hidden]`."""

    mnemonic: ClassVar[str] = "expert_mlp"
    activation: str

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, counts, up, down = operands
        experts, parts, hidden, dim = up.shape
        require(rows.ragged == counts.name, self, f"rows are counted by {rows.ragged}, not {counts.name}")
        require(parts == ACTIVATION_PARTS[self.activation], self, f"{parts} parts")
        require(down.shape == (experts, dim, hidden) and rows.shape[2] == dim, self, "widths differ")
        return (Type(shape=rows.shape, dtype=rows.dtype, ragged=rows.ragged),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        held = layout_of(operands[2])
        for axis, placement in held.placements:
            if placement != Shard(0):
                raise LayoutError(f"expert_mlp has no rule for experts with {axis}:{placement}")
        rows = _experts_layout(meshes, dict.fromkeys(held.axes, Shard(0)), Shard(1))
        counts = _experts_layout(meshes, dict.fromkeys(held.axes, Shard(1)), Shard(0))
        return Placing((rows, counts, held, held), (rows,))

    def flops(self, operands: Sequence[Value], sizes: Mapping[str, int]) -> int:
        _, _, up, down = operands
        return 2 * sizes["rows"] * (size_of(up.shape[1:], sizes) + size_of(down.shape[1:], sizes))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Combine(Op):
    """Each token's weighted sum of its rows; back from the expert mesh to the dense one."""

    mnemonic: ClassVar[str] = "combine"
    moves: ClassVar[bool] = True

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, positions, weights = operands
        require(positions.shape == weights.shape, self, "wants a weight for each position")
        return (Type(shape=(*positions.shape[:-1], rows.shape[-1]), dtype=rows.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = own_tokens(self, 2, meshes)
        return Placing((_experts_layout(meshes, {}, Shard(1)), *tokens.operands), tokens.results)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class CountChoices(Op):
    """How often the tokens of each sequence chose each expert: experts `[batch, sequence, k]` → `[batch, experts]`.

    Not differentiated.
    """

    mnemonic: ClassVar[str] = "count_choices"
    num_experts: int

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        require(experts.dtype == "int64" and len(experts.shape) == 3, self, "wants experts of each token")
        return (Type(shape=(experts.shape[0], self.num_experts), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        counted = Layout.of((axis, p if p == Shard(0) else Partial()) for axis, p in tokens.placements)
        return Placing((tokens,), (counted,))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchLoss(Op):
    """Sum over sequences of `tokens · E · Σ fᵢ·Pᵢ` (Fedus et al. 2021, eq. 4): probabilities, choices → scalar.

    fᵢ, from `choices` `[batch, experts]`, is of whole sequences; Pᵢ may be of a part, for the sum is linear in it.
    """

    mnemonic: ClassVar[str] = "switch_loss"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        probabilities, choices = operands
        batch, _, experts = probabilities.shape
        require(choices.shape == (batch, experts), self, "wants the choices of each sequence")
        return (Type(shape=(), dtype=probabilities.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        sequences = Layout.of((axis, p) for axis, p in tokens.placements if p == Shard(0))
        return Placing((tokens, sequences), (Layout.of(dict.fromkeys(tokens.axes, Partial())),))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ZLoss(Op):
    """Sum over tokens of the squared log-sum-exp of the logits (ST-MoE, eq. 5)."""

    mnemonic: ClassVar[str] = "z_loss"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        return (Type(shape=(), dtype=operands[0].dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return sum_tokens(self, operands, meshes)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum(Op):
    """`Σ weightᵢ · operandᵢ` over scalars: a layer's balance terms."""

    mnemonic: ClassVar[str] = "weighted_sum"
    weights: tuple[float, ...]

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        require(len(operands) == len(self.weights) > 0, self, "wants one weight for each operand")
        require(
            all(v.shape == () and v.dtype == operands[0].dtype for v in operands), self, "wants scalars of one dtype"
        )
        return (Type(shape=(), dtype=operands[0].dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0])
        return Placing((layout,) * len(operands), (layout,))
