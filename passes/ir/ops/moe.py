"""Ops of a mixture of experts: route, permute, expert_mlp, combine, and the balance terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.attribute_types import ActivationName, Count, RoutingGroup
from moec.passes.ir.layout import Layout, Partial, Placement, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, layout_of, register, require, size_of
from moec.passes.ir.ops.padding import require_real
from moec.passes.ir.ops.tokens import Blocks, own_tokens, sum_tokens
from moec.passes.ir.value import Dim, Parameter, Value


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Op):
    """Which experts each token goes to: logits `[batch, sequence, experts]` → probabilities, weights, experts.

    `order = before` scores all experts and keeps the best k, `after` scores only the k best logits; ties go to the
    lower index. The probabilities are for balance terms: the softmax, or sigmoid scores over their sum
    (DeepSeek-V3, eq. 19).
    """

    mnemonic: ClassVar[str] = "route"
    k: Count
    score: Literal["softmax", "sigmoid"]
    order: Literal["before", "after"]
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


def experts_layout(meshes: Meshes, by_expert: Mapping[str, Placement], otherwise: Placement) -> Layout:
    """The layout on the expert mesh that is `by_expert` on the axes that it names, and `otherwise` on the others.

    A dim is cut in the order of `by_expert`, then in that of the mesh.
    """
    assert meshes.experts is not None, "an op of a mixture stands in a block without an expert mesh"
    return Layout.of({**by_expert, **{axis: otherwise for axis in meshes.experts.wide_axes() if axis not in by_expert}})


def grouped(group: str, meshes: Meshes) -> Layout:
    """Where what is counted over routing groups lies: whole on the axes over which a group is spread."""
    return Layout.of((axis, p) for axis, p in meshes.own_tokens.placements if p == Shard(0) and group != "batch")


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Permute(Op):
    """Rows in the order of their expert: x, experts → rows (ragged), counts `[sources, experts]`, positions.

    This is where a value leaves the dense mesh for the expert mesh: a rank's tokens become its rows.
    """

    mnemonic: ClassVar[str] = "permute"
    moves: ClassVar[bool] = True
    num_experts: Count

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
        own_rows = experts_layout(meshes, {}, Shard(1))
        own_counts = experts_layout(meshes, {}, Shard(0))
        return Placing(tokens, (own_rows, own_counts, tokens[0]))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class PermuteReal(Permute):
    """`permute` of choices among which some are −1: these get no row, and −1 for their position."""

    mnemonic: ClassVar[str] = "permute_real"


def require_experts(op: Op, activation: str, x: Value, weights: Sequence[Value]) -> None:
    """Experts of x `[…, dim]`: up `[experts, parts, hidden, dim]`, down `[experts, dim, hidden]`, maybe both biases.

    All have the dtype of x. A bias is `[experts, parts, hidden]` or `[experts, dim]`: one number for each output.
    """
    up, down, *biases = weights
    experts, parts, hidden, _ = up.shape
    require(parts == ACTIVATIONS[activation].parts, op, f"{parts} parts")
    dim = x.shape[-1]
    require(up.shape[3] == dim and down.shape == (experts, dim, hidden), op, "widths differ")
    require(all(weight.dtype == x.dtype for weight in weights), op, "wants one dtype")
    wanted = [up.shape[:-1], down.shape[:-1]]
    require(not biases or [bias.shape for bias in biases] == wanted, op, "wants a bias for each output, or none")


def apart(operands: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
    """What experts are given, and the experts themselves: their up and down, and maybe both biases."""
    given = [value for value in operands if not isinstance(value, Parameter)]
    return given, operands[len(given) :]


def require_weights(op: Op, rows: Value, weights: Sequence[Value]) -> None:
    """At most one more operand: a weight for each row."""
    for weight in weights:
        alike = (weight.shape, weight.ragged) == (rows.shape[:-1], rows.ragged)
        require(len(weights) == 1 and alike, op, "wants a weight for each row, or none")


def experts_held(op: Op, up: Value) -> Layout:
    """How experts lie over ranks: all that they have alike, each whole on one."""
    held = layout_of(up)
    for axis, placement in held.placements:
        if placement != Shard(0):
            raise LayoutError(f"{op.mnemonic} has no rule for experts with {axis}:{placement}")
    return held


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMlp(Op):
    """Each row through its expert: rows, counts, weights of rows or none, and experts as `require_experts` says."""

    mnemonic: ClassVar[str] = "expert_mlp"
    activation: ActivationName

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (rows, counts, *weights), experts = apart(operands)
        require(rows.ragged == counts.name, self, f"rows are counted by {rows.ragged}, not {counts.name}")
        require_weights(self, rows, weights)
        require_experts(self, self.activation, rows, experts)
        return (Type(shape=rows.shape, dtype=rows.dtype, ragged=rows.ragged),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        (_, _, *weights), experts = apart(operands)
        held = experts_held(self, experts[0])
        rows = experts_layout(meshes, dict.fromkeys(held.axes, Shard(0)), Shard(1))
        counts = experts_layout(meshes, dict.fromkeys(held.axes, Shard(1)), Shard(0))
        return Placing((rows, counts, *(rows,) * len(weights), *(held,) * len(experts)), (rows,))

    def flops(self, operands: Sequence[Value], sizes: Mapping[str, int]) -> int:
        _, (up, down, *_) = apart(operands)
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
        return Placing((experts_layout(meshes, {}, Shard(1)), *tokens.operands), tokens.results)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class CountChoices(Op):
    """How often the tokens of a routing group chose each expert: experts `[batch, sequence, k]` → `[groups, experts]`.

    A choice of −1 counts for none. A group is a `sequence`, the `batch` of all ranks, or the sequences of one
    data-parallel rank (`rank`). Not differentiated.
    """

    mnemonic: ClassVar[str] = "count_choices"
    num_experts: Count
    group: RoutingGroup

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        require(experts.dtype == "int64" and len(experts.shape) == 3, self, "wants experts of each token")
        groups: Dim = {"sequence": experts.shape[0], "batch": 1, "rank": "shares"}[self.group]
        return (Type(shape=(groups, self.num_experts), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens, whole = meshes.own_tokens, grouped(self.group, meshes)
        counted = Layout.of((axis, whole.get(axis) or Partial()) for axis in tokens.axes)
        return Placing((tokens,), (counted,))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchLoss(Op):
    """Sum over routing groups of `tokens · E · Σ fᵢ·Pᵢ` (Fedus et al. 2021, eq. 4): probabilities, choices → scalar.

    fᵢ, from `choices` `[groups, experts]`, is of whole groups; Pᵢ may be of a part, for the sum is linear in it.
    With a third operand, `real_tokens`, tokens and Pᵢ are those of real tokens; a group without any adds 0.
    """

    mnemonic: ClassVar[str] = "switch_loss"
    group: RoutingGroup

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        probabilities, choices, *real = operands
        require(choices.shape[1] == probabilities.shape[2], self, "wants the choices of each group")
        require_real(self, probabilities, real)
        return (Type(shape=(), dtype=probabilities.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        real = (tokens,) * len(operands[2:])
        return Placing(
            (tokens, grouped(self.group, meshes), *real), (Layout.of(dict.fromkeys(tokens.axes, Partial())),)
        )


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ZLoss(Op):
    """Sum over tokens of the squared log-sum-exp of the logits (ST-MoE, eq. 5).

    With a second operand, `real_tokens`, over real tokens.
    """

    mnemonic: ClassVar[str] = "z_loss"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        require_real(self, operands[0], operands[1:])
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
