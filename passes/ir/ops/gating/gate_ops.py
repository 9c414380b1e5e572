"""Ops of gates: the experts that each token goes to, and their weights.

The passes after `lower` use a token's choices and do not depend on the op that made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from moec.passes.ir.attribute_types import Bounds, Count, Positive
from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("route", "logits bias? -> probabilities weights experts", operator="route", scores="logits", constants={"bias"})
class Route(TokenOp):
    """Chooses k experts for each token: logits `[batch, sequence, experts]` → probabilities, weights, experts.

    With the operand `bias`, fp32 `[experts]`, the k experts with the largest score + bias are chosen, whatever `order`
    is; weights are computed from scores without it (Wang et al. 2024, arXiv 2408.15664). No gradient flows to it.

    `order = before` scores all experts and keeps the best k, `after` scores only the k best logits; ties go to the
    lower index. The probabilities are for balance terms: the softmax, or sigmoid scores divided by their sum
    (DeepSeek-V3, eq. 19). `scale` multiplies the weights after `normalize` divided them (DeepSeek-V3, arXiv 2412.19437:
    the routed scaling factor 2.5); the probabilities stay as they are.

    With `groups` above 1, expert i is in group i · groups / experts, and only experts of the `keep_groups` best groups
    are chosen, whatever the scores of the others are. A group's score is the sum of its two best scores (`top2_sum`:
    DeepSeek-V3, section 2.1.2; of a group of one expert: its score) or its best (`max`: DeepSeek-V2, arXiv 2405.04434,
    section 2.2.2), of the scores that choose: with the bias, where there is one. Ties go to the lower group.
    """

    k: Count
    score: Literal["softmax", "sigmoid"]
    order: Literal["before", "after"]
    normalize: bool
    scale: Positive = 1.0
    groups: Count = 1
    keep_groups: Count = 1
    group_score: Literal["top2_sum", "max"] = "top2_sum"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        logits, *biases = operands
        experts = logits.shape[-1]
        require(isinstance(experts, int) and self.k <= experts, self, f"k = {self.k} of {experts} experts")
        assert isinstance(experts, int)
        require(experts % self.groups == 0, self, f"{experts} experts in {self.groups} equal groups")
        pool = self.keep_groups * (experts // self.groups)
        require(self.k <= pool <= experts, self, f"k = {self.k} of the {pool} experts of {self.keep_groups} groups")
        fits = all((bias.shape, bias.dtype) == ((experts,), "fp32") for bias in biases)
        require(fits, self, "wants an fp32 bias for each expert")
        choice_shape = (*logits.shape[:-1], self.k)
        return (
            Type(shape=logits.shape, dtype=logits.dtype),
            Type(shape=choice_shape, dtype=logits.dtype),
            Type(shape=choice_shape, dtype="int64"),
        )

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes, parameters=len(operands) - 1)

    def binds(self, operands: Sequence[Value], workload: Workload) -> Mapping[str, float]:
        return {"expert_groups": self.groups, "kept_groups": self.keep_groups}

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        (logits, *_), (_, weights, experts) = operands, results
        return elementwise(self, operands, results, workload, keeps=workload.keep(logits, weights, experts))


@op("every_expert", "scores -> experts", constants={"scores"})
class EveryExpert(TokenOp):
    """All experts of each token, in their order: scores `[batch, sequence, experts]` → experts, the same shape."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (scores,) = operands
        require(len(scores.shape) == 3 and scores.dtype != "int64", self, "wants scores of each token")
        return (Type(shape=scores.shape, dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)


@op("round_weights", "weights -> rounded")
class RoundWeights(TokenOp):
    """Weights of choices rounded to `dtype`, and wide again: `[batch, sequence, k]` → the same shape and dtype.

    Megatron and transformers round so. Under `torch.compile` Inductor may drop the round trip.
    """

    dtype: Literal["bf16", "fp16"]

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (weights,) = operands
        require(len(weights.shape) == 3 and weights.dtype == "fp32", self, "wants fp32 weights of each token")
        return (Type(shape=weights.shape, dtype=weights.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)


@op("attend_experts", "projected -> logits")
class AttendExperts(TokenOp):
    """Router logits by attention between experts: `[batch, sequence, 3 · experts]` → `[batch, sequence, experts]`.

    The last dim is q, k and v, one number of each for every expert. Logit i is `Σⱼ softmaxⱼ(qᵢ · kⱼ) · vⱼ`: width 1, so
    no scale (Yuan 2.0-M32, arXiv 2405.17976, section 2: the attention router). Fused attention computes the logits;
    backward keeps two numbers of each expert, not the softmax.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (projected,) = operands
        width = projected.shape[-1]
        require(len(projected.shape) == 3 and isinstance(width, int), self, "wants numbers of each token")
        assert isinstance(width, int)
        require(width % 3 == 0, self, "wants a query, a key and a value of each expert")
        return (Type(shape=(*projected.shape[:-1], width // 3), dtype=projected.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        (projected,), (logits,) = operands, results
        inner = [workload.inner(logits, name, workload.count(logits), logits.dtype) for name in ("attended", "sums")]
        keeps = (*workload.keep(projected), *inner)
        return elementwise(self, operands, results, workload, keeps=keeps, forward=2, backward=5)


@op("hash_route", "ids -> weights experts")
class HashRoute(TokenOp):
    """A fixed choice of `k` different experts for each id: ids `[batch, sequence]` → weights, all 1 / k, and experts.

    The random hash of Roller et al. 2021 (arXiv 2106.04426, section 3.1), computed by a function instead of a table of
    the vocabulary. Every pair of id and expert has a random number; the k experts with the largest numbers are chosen,
    largest first (highest random weight: Thaler and Ravishankar 1998). The number is
    `mix(mix(seed) + golden · (id · 2³¹ + expert))` modulo 2⁶⁴, compared as signed, with `mix` and `golden` of
    SplitMix64 (Steele et al. 2014). It is a bijection of the pairs, so there are no ties, and an integer, so every
    device and every rank makes the same choice.
    """

    k: Count
    num_experts: Count
    seed: Annotated[int, Bounds(ge=0, lt=2**63)]

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (ids,) = operands
        require(ids.dtype == "int64" and len(ids.shape) == 2, self, "wants ids")
        require(self.k <= self.num_experts, self, f"k = {self.k} of {self.num_experts} experts")
        choice_shape = (*ids.shape, self.k)
        return Type(shape=choice_shape, dtype="fp32"), Type(shape=choice_shape, dtype="int64")

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 1, meshes)
