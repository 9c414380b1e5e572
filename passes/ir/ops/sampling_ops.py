"""Ops of `sparsemixer`: experts that are sampled round by round, and weights with the gradient of that choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from moec.passes.ir.attribute_types import Bounds
from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.token_layouts import Blocks, own_tokens
from moec.passes.ir.ops.token_operands import require_scores, require_training
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op(
    "sample_experts",
    "logits numbers training -> probabilities experts outside full",
    scores="logits",
    chooses="outside full",
    constants={"numbers"},
)
class SampleExperts(TokenOp):
    """Samples k different experts for each token, from logits `[batch, sequence, experts]`.

    In each round, over the experts not yet chosen, with m their largest logit (SparseMixer, Liu et al. 2023, arXiv
    2310.00811, and its second version in GRIN, arXiv 2409.12136; the model Phi-3.5-MoE):

    - candidates are the experts with `(m - logit) / max(|logit|, m) ≤ 2 · jitter`;
    - in training an expert is drawn from the softmax of the candidates' logits, by the first k of the token's uniform
      `numbers` `[batch, sequence, 2 k]` (Phi-3.5-MoE draws from the same distribution by Gumbel noise); in evaluation
      the best one is chosen, of equal ones the first;
    - the choice is `full` (1) if its logit is m, or else with probability 1/4 in training; else 0.

    Gives the softmax of all logits for balance terms, experts `[batch, sequence, k]`, `outside` `[batch, sequence,
    experts]`, whose bit r says that the expert is no candidate in round r, and `full` `[batch, sequence, k]`. With a
    jitter above 0.5 an expert may be a candidate again after rounds in which it was none: its logit is below 0, and m
    falls from above to below its amount.
    """

    k: Annotated[int, Bounds(ge=1, le=63)]
    jitter: Annotated[float, Bounds(ge=0, le=1)]

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        logits, numbers, training = operands
        tokens, experts = logits.shape[:-1], logits.shape[-1]
        require(isinstance(experts, int) and self.k <= experts, self, f"k = {self.k} of {experts} experts")
        require_scores(self, logits, "logits")
        require(numbers.shape == (*tokens, 2 * self.k) and numbers.dtype != "int64", self, "wants 2 k numbers a token")
        require_training(self, training)
        choices = Type(shape=(*tokens, self.k), dtype="int64")
        outside = Type(shape=logits.shape, dtype="int64")
        return Type(shape=logits.shape, dtype=logits.dtype), choices, outside, choices

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 2, meshes, parameters=1)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        probabilities, tokens = results[0], workload.count(results[1]) / self.k
        best = [workload.inner(probabilities, f"best_{x}", tokens, x) for x in (probabilities.dtype, "int64")]
        keeps = (*workload.keep(operands[0]), *best)
        return elementwise(self, operands, results, workload, keeps=keeps, forward=3 + 16 * self.k)


@op("sampled_weights", "logits experts outside full -> weights")
class SampledWeights(TokenOp):
    """The weights of sampled experts: logits, and the `experts`, `outside` and `full` of `sample_experts` → weights.

    The weight of a round's choice is δ · p, with p its probability in the softmax of that round's candidates, and δ = 1
    where the choice is full, else 1/3. Its gradient is that of p alone: the layer's gradients at δ = 1 (one time in
    four) and at δ = 1/3 (three in four) are the two points of Heun's third-order method, by which GRIN (arXiv
    2409.12136) estimates the gradient of the expected loss. So the gradient is, by definition, not that of the forward
    pass. Weights are not normalized over the k choices. In evaluation δ is 1.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        logits, experts, outside, full = operands
        require(all(v.dtype == "int64" for v in (experts, outside, full)), self, "wants experts, rounds and marks")
        fits = outside.shape == logits.shape and full.shape == experts.shape
        fits = fits and experts.shape[:-1] == logits.shape[:-1]
        require(fits and len(logits.shape) == 3 and logits.dtype != "int64", self, "wants sampled experts")
        return (Type(shape=experts.shape, dtype=logits.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return own_tokens(self, 4, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        logits, experts, *_ = operands
        (weights,), rounds = results, workload.shape(experts)[-1]
        size, keeps = workload.count(logits), [*workload.keep(experts)]
        for number in range(rounds):
            keeps.append(workload.inner(weights, f"gates_{number}", size, logits.dtype))
        return elementwise(
            self, operands, results, workload, keeps=keeps, forward=8 * rounds, backward=6 * rounds
        )  # fmt: skip
