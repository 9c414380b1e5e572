"""Ops of gates that choose for all tokens of a routing group at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import RoutingGroup, WideCount
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.op import Meshes, Op, Placing, TokenOp, Type, op
from moec.passes.ir.ops.mixture_ops import group_layout
from moec.passes.ir.ops.padding_ops import require_real
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.ops.token_operands import require_scores, require_training
from moec.passes.ir.value import Value
from moec.passes.ir.work.arrays import smaller, whole
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op(
    "choose_tokens",
    "scores real? -> experts",
    operator="choose_tokens",
    resolved={"group": "int groups"},
    constants={"scores"},
    chooses="experts",
    sparse=True,
)
class ChooseTokens(Op):
    """Each expert takes its best tokens of each routing group: scores `[batch, sequence, E]` → experts, same shape.

    The result is e for each token that expert e takes, else −1. An expert takes `⌈parts / whole · T / E⌉` of a group's
    T tokens, at most T; equal scores go to the earlier token (Zhou et al. 2022, arXiv 2202.09368, section 3.2). With
    the operand `real`, no expert takes a padding token; T includes padding. Not differentiated.
    """

    group: RoutingGroup
    parts: WideCount
    whole: WideCount

    def other_tokens(self, operands: Sequence[Value]) -> str:
        return "`expert_choice`, whose experts choose among all tokens of a group"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        scores, *real = operands
        require_scores(self, scores)
        require_real(self, scores, real)
        return (Type(shape=scores.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = group_layout(self.group, meshes)
        return Placing((layout,) * len(operands), (layout,))

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        tokens, experts = workload.tokens, workload.shape(operands[0])[2]
        groups = {"sequence": workload.batch, "batch": 1, "rank": whole(workload.sizes["data_ranks"])}[self.group]
        group_tokens = tokens // groups
        taken = -(-self.parts * group_tokens // (self.whole * experts))
        return {"rows": groups * experts * smaller(group_tokens, taken)}

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=6)


@op(
    "balanced_assignment",
    "scores training real? -> experts",
    operator="balanced_assignment",
    resolved={"group": "int groups"},
    constants={"scores"},
    chooses="experts",
)
class BalancedAssignment(TokenOp):
    """An expert for each token: scores `[batch, sequence, E]` → experts `[batch, sequence, 1]`.

    In training the matching of a group's tokens and experts with the largest sum of scores in which each expert gets
    ⌊T/E⌋ or ⌈T/E⌉ of the T tokens (Lewis et al. 2021, arXiv 2103.16716, section 3.1, eq. 2); in evaluation the best
    expert (section 3.1.2). With the operand `real`, T counts real tokens, and a padding token has −1. The matching is
    computed on the host. Not differentiated.
    """

    group: RoutingGroup

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        scores, training, *real = operands
        require_scores(self, scores)
        require_training(self, training)
        require_real(self, scores, real)
        return (Type(shape=(*scores.shape[:2], 1), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = group_layout(self.group, meshes)
        return Placing((layout, REPLICATED, *(layout,) * len(operands[2:])), (layout,))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=40)
