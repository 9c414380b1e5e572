"""Ops that join experts with the dense paths beside them: a gate of one's own, and a mixture of two paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from moec.passes.ir.op import Meshes, Op, Placing, Type, register, require
from moec.passes.ir.ops.tokens import Blocks, follow_tokens
from moec.passes.ir.value import Value


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidGate(Op):
    """x `[…, dim]`, logits `[…, 1]` → `x · sigmoid(logits)`: how Qwen2-MoE gates its shared expert."""

    mnemonic: ClassVar[str] = "sigmoid_gate"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, logits = operands
        require(logits.shape == (*x.shape[:-1], 1) and logits.dtype == x.dtype, self, "wants a logit for each token")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands, meshes)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Mix(Op):
    """first, second `[…, dim]`, logits `[…, 2]` → `first · c₀ + second · c₁` with c = softmax(logits).

    DeepSpeed's Residual-MoE (Rajbhandari et al. 2022, arXiv 2201.05596, section 4.1): first are the experts.
    """

    mnemonic: ClassVar[str] = "mix"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        first, second, logits = operands
        require(first.shape == second.shape and logits.shape == (*first.shape[:-1], 2), self, "wants two logits each")
        require(first.dtype == second.dtype == logits.dtype, self, "wants one dtype")
        return (Type(shape=first.shape, dtype=first.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands, meshes)
