"""Ops of queues that are not in token order: they compute priorities of tokens, and keep the choices with places.

With priorities of tokens, all first choices of a routing group come before all second ones, as in `capacity_ops`. Among
the j-th choices, the token with the highest priority comes first; equal ones are in token order. With priorities of
choices, the choice with the highest comes first, whether it is a token's first one or not. The ops see whole routing
groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from moec.passes.ir.attribute_types import Count, Positive
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.gating.capacity_ops import Capacity
from moec.passes.ir.ops.mixture_ops import group_layout
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.ops.token_operands import require_choices, require_scores
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("best_score", "scores -> priorities", constants={"scores"})
class BestScore(TokenOp):
    """The largest score of each token: scores `[batch, sequence, n]` → `[batch, sequence]`. Not differentiated.

    The priority of batch prioritized routing, `max_i g(X)_{t,i}` (Riquelme et al. 2021, arXiv 2106.05974, section 4.1).
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (scores,) = operands
        require(scores.dtype != "int64" and len(scores.shape) == 3, self, "wants scores of each token")
        return (Type(shape=scores.shape[:-1], dtype=scores.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)


@op(
    "keep_first",
    "experts priorities training? -> kept",
    operator="keep_first",
    resolved={"group": "int groups"},
    constants={"priorities"},
    chooses="kept",
)
class KeepFirst(Capacity):
    """Replaces dropped choices by −1: experts `[batch, sequence, k]`, priorities `[batch, sequence]` → kept.

    Like `keep_choices`, with queues in the order of priorities. Sorting takes `k·T·log(k·T)` for T tokens of a group.
    """

    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        experts, priorities, *settings = self.named(operands).values()
        self.require_setting(settings)
        require_choices(self, experts)
        fits = priorities.dtype != "int64" and priorities.shape == experts.shape[:-1]
        require(fits, self, "wants a priority of each token")
        return (Type(shape=experts.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = group_layout(self.group, meshes)
        return Placing((layout, layout, *(REPLICATED,) * len(operands[2:])), (layout,))

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        return self.bound_rows(operands[0], self.num_experts, workload)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=6)


@op(
    "keep_best",
    "experts priorities? training? -> kept",
    operator="keep_best",
    resolved={"group": "int groups"},
    constants={"priorities"},
    chooses="kept",
)
class KeepBest(Capacity):
    """Replaces dropped choices by −1: experts `[batch, sequence, k]`, priorities of the same shape → kept.

    Each expert keeps the choices with the highest priorities; equal ones, and all without the operand, are token by
    token, and a token's own in their order. With weights as priorities it is the drop policy `probs` of Megatron-LM
    0.16.1 (`transformer/moe/moe_utils.py`, `apply_router_token_dropping`) and DeepSpeed 0.19.8 (`moe/sharded_moe.py`,
    `topkgating`). Their `position` takes `torch.topk` of equal numbers, which promises no order.
    """

    num_experts: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        by_name = self.named(operands)
        experts, priorities = by_name["experts"], by_name.get("priorities")
        self.require_setting([by_name["training"]] if "training" in by_name else [])
        require_choices(self, experts)
        fits = priorities is None or (priorities.dtype != "int64" and priorities.shape == experts.shape)
        require(fits, self, "wants a priority of each choice, or none")
        return (Type(shape=experts.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = group_layout(self.group, meshes)
        return Placing(tuple(REPLICATED if n == "training" else layout for n in self.named(operands)), (layout,))

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        return self.bound_rows(operands[0], self.num_experts, workload)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=6)


@op(
    "reroute",
    "logits experts priorities? bias? training? -> rerouted scored",
    operator="reroute",
    resolved={"group": "int groups"},
    constants={"logits", "priorities", "bias"},
    chooses="rerouted scored",
)
class Reroute(Capacity):
    """Gives dropped choices to other experts: logits `[batch, sequence, E]`, experts `[…, k]` → experts, scored.

    The choices that find a place are those that `keep_choices`, or with `priorities` `keep_first`, keeps. The others
    then ask in rounds: the first of a token's choices without a place asks the best expert, by logits or with `bias` by
    score + bias, that has room and that the token has not chosen; requests take the room in the order of the queue. A
    choice that finds no expert is −1 in `rerouted`, and its first expert in `scored`, by which weights are computed.
    This is No-Token-Left-Behind (Fedus et al. 2021, arXiv 2101.03961, appendix B), whose stages are the rounds, for any
    k. There are at most `E + k` rounds: a request is granted, or its expert is full.
    """

    score: Literal["softmax", "sigmoid"]

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        by_name = self.named(operands)
        logits, experts = by_name["logits"], by_name["experts"]
        self.require_setting([by_name["training"]] if "training" in by_name else [])
        require_choices(self, experts, logits)
        require_scores(self, logits, "logits")
        fits = "priorities" not in by_name or by_name["priorities"].shape == logits.shape[:-1]
        require(fits, self, "wants a priority of each token, or none")
        require(
            "bias" not in by_name or by_name["bias"].shape == logits.shape[-1:], self, "wants a bias of each expert"
        )
        return (Type(shape=experts.shape, dtype="int64"),) * 2

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = group_layout(self.group, meshes)
        replicated = {"bias": REPLICATED, "training": REPLICATED}
        return Placing(tuple(replicated.get(name, layout) for name in self.named(operands)), (layout, layout))

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        logits, experts, *_ = operands
        return self.bound_rows(experts, workload.shape(logits)[-1], workload)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return elementwise(self, operands, results, workload, forward=6)


@op("renormalize", "weights kept -> renormalized")
class Renormalize(TokenOp):
    """`scale · wⱼ / Σ w` over a token's choices that found a place; 0 for the others: weights, kept → weights.

    Both are `[batch, sequence, k]`, and kept is −1 for a choice without a place. The sum is at least the epsilon of
    fp32, so a token without places has zeros and no NaN (DeepSpeed 0.19.8, `moe/sharded_moe.py`, `top2gating` and
    `topkgating`). `scale` is the gate's, which the weights contain.
    """

    scale: Positive = 1.0

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        weights, kept = operands
        require_choices(self, kept)
        fits = weights.dtype != "int64" and weights.shape == kept.shape
        require(fits, self, "wants a weight of each choice")
        return (Type(shape=weights.shape, dtype=weights.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 2, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        (weights, _), (result,) = operands, results
        choices, k = workload.count(weights), workload.shape(weights)[-1]
        keeps = (
            workload.inner(result, "none", choices, "bool"),
            workload.inner(result, "placed", choices, weights.dtype),
            workload.inner(result, "sums", choices / k, weights.dtype),
            workload.inner(result, "divisors", choices / k, weights.dtype),
        )
        return elementwise(self, operands, results, workload, keeps=keeps, forward=5, backward=5)


@op("chosen_weights", "logits experts -> weights")
class ChosenWeights(TokenOp):
    """The weights that `route` with the same attributes gives to choices made elsewhere: logits, experts → weights.

    Weights have the shape of experts, `[batch, sequence, k]`. A choice of −1 gets that of expert 0. With the score
    `none` the operand `logits` holds the experts' scores already, such as the probabilities of `route`.
    """

    score: Literal["softmax", "sigmoid", "none"]
    order: Literal["before", "after"] = "before"
    normalize: bool = False
    scale: Positive = 1.0

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        logits, experts = operands
        require_choices(self, experts, logits)
        require_scores(self, logits, "logits")
        require(self.score != "none" or not self.normalize, self, "scores cannot be normalized as logits")
        return (Type(shape=experts.shape, dtype=logits.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 2, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        (logits, _), (weights,) = operands, results
        num_chosen, num_scores = workload.count(weights), workload.count(logits)
        saved = [workload.inner(weights, "indices", num_chosen, "int64")]
        over_chosen = self.normalize or (self.order == "after" and self.score == "softmax")
        if not over_chosen and self.score == "softmax":
            saved.append(workload.inner(weights, "scores", num_scores, logits.dtype))
        elif self.score == "none":
            pass
        elif self.scale == 1:
            saved += workload.keep(weights)
        else:
            saved.append(workload.inner(weights, "unscaled", num_chosen, logits.dtype))
        if over_chosen and self.score == "sigmoid":
            saved += (*workload.keep(logits), workload.inner(weights, "buffer", num_scores, logits.dtype))
        return elementwise(self, operands, results, workload, keeps=saved)
