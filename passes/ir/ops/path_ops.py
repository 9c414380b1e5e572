"""Ops that join experts with dense paths: the sigmoid gate of a shared expert, and the weighted sum of two paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.op import Meshes, Placing, TokenOp, Type, op, require
from moec.passes.ir.ops.token_layouts import Blocks, follow_tokens
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op("sigmoid_gate", "x logits -> gated")
class SigmoidGate(TokenOp):
    """x `[…, dim]`, logits `[…, 1]` → `x · sigmoid(logits)`: how Qwen2-MoE gates its shared expert."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, logits = operands
        require(logits.shape == (*x.shape[:-1], 1) and logits.dtype == x.dtype, self, "wants a logit for each token")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        x, logits = operands
        gate = workload.inner(results[0], "gate", workload.count(logits), logits.dtype)
        return elementwise(self, operands, results, workload, keeps=(*workload.keep(x), gate), forward=2, backward=4)


@op("mix", "first second logits -> mixed")
class Mix(TokenOp):
    """first, second `[…, dim]`, logits `[…, 2]` → `first · c₀ + second · c₁` with c = softmax(logits).

    DeepSpeed's Residual-MoE (Rajbhandari et al. 2022, arXiv 2201.05596, section 4.1): first is the experts' result.
    """

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        first, second, logits = operands
        require(first.shape == second.shape and logits.shape == (*first.shape[:-1], 2), self, "wants two logits each")
        require(first.dtype == second.dtype == logits.dtype, self, "wants one dtype")
        return (Type(shape=first.shape, dtype=first.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands, meshes)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        first, second, logits = operands
        weights = workload.inner(results[0], "weights", workload.count(logits), logits.dtype)
        keeps = (*workload.keep(first, second), weights)
        return elementwise(self, operands, results, workload, keeps=keeps, forward=4, backward=6)
