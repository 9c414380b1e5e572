"""Ops of balance terms over the loads of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import Count, Positive, RoutingGroup
from moec.passes.ir.layout import Layout, Partial
from moec.passes.ir.op import Meshes, Op, Placing, Type, op, require
from moec.passes.ir.ops.mixture_ops import group_layout
from moec.passes.ir.ops.padding_ops import require_real
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.ops.token_operands import require_choices
from moec.passes.ir.value import Dim, Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("first_choices", "experts -> first")
class FirstChoices(Op):
    """The first choice of each token: experts `[batch, sequence, k]` → `[batch, sequence, 1]`.

    Counted, these are the c_e of Lepikhin et al. 2020 (arXiv 2006.16668, section 2.2 and algorithm 1): a count over all
    tokens, not over all k choices.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (experts,) = operands
        require_choices(self, experts)
        return (Type(shape=(*experts.shape[:-1], 1), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)


@op("expert_weights", "weights experts -> parts")
class ExpertWeights(Op):
    """The weight that each token gives to each expert: weights, experts `[batch, sequence, k]` →
    `[batch, sequence, experts]`, 0 where it did not choose the expert. A choice of −1 adds to none."""

    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        weights, experts = operands
        require_choices(self, experts)
        require(weights.shape == experts.shape and weights.dtype != "int64", self, "wants a weight for each choice")
        k = experts.shape[-1]
        require(isinstance(k, int) and k <= self.num_experts, self, f"k = {k} of {self.num_experts} experts")
        return (Type(shape=(*experts.shape[:-1], self.num_experts), dtype=weights.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 2, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        index = workload.inner(results[0], "index", workload.count(operands[1]), "int64")
        return elementwise(self, operands, results, workload, keeps=(index,), forward=4, backward=2)


@op("expected_loads", "clean noisy deviation experts -> probabilities")
class ExpectedLoads(Op):
    """P(x, i), the probability that noise drawn again for expert i alone leaves it among the k of token x.

    `Φ((cleanᵢ - kth_excluding) / deviationᵢ)`, with kth_excluding the k-th largest of `noisy` without noisyᵢ (Shazeer
    et al. 2017, arXiv 1701.06538, appendix A, eq. 8 and 9; summed over a batch, eq. 10). `clean`, `noisy`, `deviation`
    `[batch, sequence, experts]` and experts `[batch, sequence, k]`, the k largest of `noisy`, best first → P. Gradients
    flow to all three. A deviation counts as at least 1e-10. Where k is all experts, there is no such threshold.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        clean, noisy, deviation, experts = operands
        fits = all((v.shape, v.dtype) == (clean.shape, clean.dtype) for v in (noisy, deviation))
        require(fits and clean.dtype != "int64" and len(clean.shape) == 3, self, "wants three numbers for each expert")
        k, count = experts.shape[-1], clean.shape[-1]
        require_choices(self, experts, clean)
        require(isinstance(k, int) and isinstance(count, int) and k < count, self, f"k = {k} of {count} experts")
        return (Type(shape=clean.shape, dtype=clean.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 4, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        clean, _, deviation, experts = operands
        chosen = workload.inner(results[0], "chosen", workload.count(clean), "bool")
        (result,), tokens = results, workload.count(clean) / workload.shape(clean)[-1]
        wide = [workload.inner(result, name, workload.count(clean), clean.dtype) for name in _WIDE]
        next_best = workload.inner(result, "next", tokens, clean.dtype)
        keeps = (*wide, chosen, next_best, *workload.keep(deviation, experts))
        return elementwise(self, operands, results, workload, keeps=keeps, forward=12, backward=12)


_WIDE = ("others", "distance", "clamped_deviation", "scaled")
"""Tensors with a number for every expert that `expected_loads` saves for backward."""


@op("loads_above", "scores logits experts -> probabilities")
class LoadsAbove(Op):
    """`Φ((scoreᵢ − kth) / deviation)`, with kth the logit of a token's last choice: scores → probabilities.

    scores and logits `[batch, sequence, experts]`, experts `[batch, sequence, k]`, best first → as scores. Gradients
    flow to scores and logits (Tutel ac0e51b9, `tutel/impls/losses.py`, `load_importance_loss`).
    """

    deviation: Positive

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        scores, logits, experts = operands
        fits = (scores.shape, scores.dtype) == (logits.shape, logits.dtype)
        require(fits and scores.dtype != "int64" and len(scores.shape) == 3, self, "wants two numbers for each expert")
        require_choices(self, experts, scores)
        return (Type(shape=scores.shape, dtype=scores.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 3, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        (scores, *_), (result,) = operands, results
        tokens = workload.count(scores) / workload.shape(scores)[-1]
        keeps = (
            workload.inner(result, "scaled", workload.count(scores), scores.dtype),
            workload.inner(result, "index", tokens, "int64"),
        )
        return elementwise(self, operands, results, workload, keeps=keeps, forward=6, backward=6)


@op("group_totals", "parts real? -> totals", constants={"parts"})
class GroupTotals(Op):
    """Sums of a routing group: parts `[batch, sequence, experts]` → `[groups, experts + 1]`, the last one its tokens.

    With the operand `real`, the sums and the number of tokens are those of real tokens. Groups are as in
    `count_choices`. Not differentiated.
    """

    group: RoutingGroup

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        parts, *real = self.named(operands).values()
        experts = parts.shape[-1]
        require(len(parts.shape) == 3 and isinstance(experts, int), self, "wants parts of each token")
        require_real(self, parts, real)
        groups: Dim = {"sequence": parts.shape[0], "batch": 1, "rank": "data_ranks"}[self.group]
        return (Type(shape=(groups, experts + 1), dtype=parts.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens, layout = meshes.own_tokens, group_layout(self.group, meshes)
        total_layout = Layout.of((axis, layout.get(axis) or Partial()) for axis in tokens.axes)
        return Placing((tokens,) * len(operands), (total_layout,))


@op("variation_loss", "parts totals real? -> loss", constants={"totals"})
class VariationLoss(Op):
    """Sum over routing groups of `tokens · CV²` (Shazeer et al. 2017, eq. 7): parts, totals → scalar.

    CV² is the squared coefficient of variation of the sums of `parts` `[batch, sequence, experts]` over a group: their
    variance over experts / their squared mean, 0 where the mean is 0. `totals` are these sums over whole groups and
    their numbers of tokens (`group_totals`), constants. A part of a group's tokens gives its share of the value, and
    the gradient `∂loss/∂sumᵢ` at the totals: CV² is not linear in the sums, so a rank's own sums would give another
    gradient. With the operand `real`, tokens are real tokens.
    """

    group: RoutingGroup

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        parts, totals, *real = self.named(operands).values()
        experts = parts.shape[-1]
        require(len(parts.shape) == 3 and isinstance(experts, int), self, "wants parts of each token")
        fits = len(totals.shape) == 2 and totals.shape[1] == int(experts) + 1 and totals.dtype == parts.dtype
        require(fits, self, "wants the totals of each group")
        require_real(self, parts, real)
        return (Type(shape=(), dtype=parts.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        tokens = meshes.own_tokens
        real = (tokens,) * len(operands[2:])
        layouts = (tokens, group_layout(self.group, meshes), *real)
        return Placing(layouts, (tokens.as_partial(),))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        _, totals, *real = operands
        masks = [workload.inner(results[0], "real", workload.count(value), "bool") for value in real]
        slopes = workload.inner(results[0], "slopes", workload.count(totals), totals.dtype)
        return elementwise(self, operands, results, workload, keeps=(slopes, *masks), forward=8, backward=2)
