"""Ops of the loss: sums over this rank's tokens, and the one division by the global counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.op import Meshes, Op, Placing, Type, layout_of, register, require
from moec.passes.ir.ops.tokens import Blocks, sum_tokens
from moec.passes.ir.value import Value, promoted


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(Op):
    """Sum over valid labels of −log softmax(logits)[label], in at least fp32; −100 is ignored."""

    mnemonic: ClassVar[str] = "cross_entropy"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        logits, labels = operands
        require(labels.dtype == "int64" and logits.shape[:-1] == labels.shape, self, "wants a label for each token")
        return (Type(shape=(), dtype=promoted(logits.dtype)),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return sum_tokens(self, operands, meshes)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class CountLabels(Op):
    """Number of labels: the valid ones, or all."""

    mnemonic: ClassVar[str] = "count_labels"
    valid_only: bool

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (labels,) = operands
        require(labels.dtype == "int64", self, "wants labels")
        return (Type(shape=(), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return sum_tokens(self, operands, meshes)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class CountTokens(Op):
    """Number of tokens of x `[batch, sequence, dim]`. Not differentiated."""

    mnemonic: ClassVar[str] = "count_tokens"
    constants: ClassVar[frozenset[int]] = frozenset({0})

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        require(len(x.shape) == 3, self, "wants a vector for each token")
        return (Type(shape=(), dtype="int64"),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return sum_tokens(self, operands, meshes)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Mean(Op):
    """`total / max(count, 1)`: total may be a partial sum, count must be the global one."""

    mnemonic: ClassVar[str] = "mean"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        total, count = operands
        require(total.shape == () and count.shape == () and count.dtype == "int64", self, "wants a scalar and a count")
        return (Type(shape=(), dtype=total.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0])
        return Placing((layout, REPLICATED), (layout,))
