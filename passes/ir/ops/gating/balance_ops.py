"""The balance terms of a mixture, and the counts that they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import Count, RoutingGroup
from moec.passes.ir.layout import Layout, Partial, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, layout_of, op, require
from moec.passes.ir.ops.mixture_ops import group_layout
from moec.passes.ir.ops.padding_ops import require_real
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens, sum_tokens
from moec.passes.ir.ops.token_operands import require_choices
from moec.passes.ir.value import Dim, Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("count_choices", "experts -> choices", operator="count_choices", resolved={"group": "int groups"})
class CountChoices(Op):
    """Counts a routing group's choices of each expert: experts `[batch, sequence, k]` → `[groups, experts]`.

    A choice of −1 is not counted. A group is a `sequence`, the `batch` of all ranks, or the sequences of one
    data-parallel rank (`rank`). Not differentiated.
    """

    num_experts: Count
    group: RoutingGroup

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        require_choices(self, experts)
        groups: Dim = {"sequence": experts.shape[0], "batch": 1, "rank": "data_ranks"}[self.group]
        return (Type(shape=(groups, self.num_experts), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens, layout = meshes.own_tokens, group_layout(self.group, meshes)
        count_layout = Layout.of((axis, layout.get(axis) or Partial()) for axis in tokens.axes)
        return Placing((tokens,), (count_layout,))


@op("largest_scores", "logits -> experts")
class LargestScores(Op):
    """The experts of each token's k largest logits: `[batch, sequence, experts]` → `[batch, sequence, k]`, int64.

    Best first, ties to the lower index. Neither biases nor groups of experts change them (DeepSeek-V3, arXiv
    2412.19437, eq. 18). Not differentiated.
    """

    k: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (logits,) = operands
        experts = logits.shape[-1]
        require(isinstance(experts, int) and self.k <= experts, self, f"k = {self.k} of {experts} experts")
        return (Type(shape=(*logits.shape[:-1], self.k), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)


@op("sum_groups", "x -> sums")
class SumGroups(Op):
    """Sums over groups of neighbouring experts: `[…, experts]` → `[…, groups]`, of probabilities or of counts."""

    groups: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        experts = x.shape[-1] if x.shape else None
        require(isinstance(experts, int) and x.ragged is None, self, "wants a number of each expert")
        assert isinstance(experts, int)
        require(experts % self.groups == 0, self, f"{experts} experts in {self.groups} equal groups")
        return (Type(shape=(*x.shape[:-1], self.groups), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0])
        if Shard(len(operands[0].shape) - 1) in [placement for _, placement in layout.placements]:
            raise LayoutError("sum_groups has no rule for experts on different ranks")
        return Placing((layout,), (layout,))


@op("switch_loss", "probabilities choices real? -> loss")
class SwitchLoss(Op):
    """Sum over routing groups of `tokens · E · Σ fᵢ·Pᵢ` (Fedus et al. 2021, eq. 4): probabilities, choices → scalar.

    fᵢ, from `choices` `[groups, experts]`, covers whole groups; Pᵢ may cover a part, because the sum is linear in Pᵢ.
    With the operand `real`, tokens and Pᵢ are those of real tokens; a group without real tokens adds 0.
    """

    group: RoutingGroup

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        probabilities, choices, *real = self.named(operands).values()
        require(choices.shape[1] == probabilities.shape[2], self, "wants the choices of each group")
        require_real(self, probabilities, real)
        return (Type(shape=(), dtype=probabilities.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        real = (tokens,) * len(operands[2:])
        return Placing((tokens, group_layout(self.group, meshes), *real), (tokens.as_partial(),))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        probabilities, choices, *real = operands
        saved = workload.keep(probabilities)
        if real:  # masking copies the probabilities
            saved = (
                workload.inner(results[0], "masked", workload.count(probabilities), probabilities.dtype),
                workload.inner(results[0], "real", workload.count(*real), "bool"),
            )
        return elementwise(self, operands, results, workload, keeps=(*saved, *workload.keep(choices)))


@op("z_loss", "logits real? -> loss")
class ZLoss(Op):
    """Sum over tokens of the squared log-sum-exp of the logits (ST-MoE, eq. 5).

    With the operand `real`, the sum is over real tokens.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        require_real(self, operands[0], operands[1:])
        return (Type(shape=(), dtype=operands[0].dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return sum_tokens(self, operands, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        logits, *real = operands
        tokens = workload.count(logits) / workload.shape(logits)[-1]
        masks = [workload.inner(results[0], "real", workload.count(value), "bool") for value in real]
        keeps = (*workload.keep(logits), workload.inner(results[0], "log_sums", tokens, logits.dtype), *masks)
        return elementwise(self, operands, results, workload, keeps=keeps, forward=3, backward=3)


@op("weighted_sum", "terms* -> total")
class WeightedSum(Op):
    """`Σ weightᵢ · operandᵢ` over scalars: a layer's balance terms."""

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
