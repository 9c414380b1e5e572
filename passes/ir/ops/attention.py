"""Attention, and what is done to heads before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moec.passes.ir.attribute_types import Count, Positive
from moec.passes.ir.layout import REPLICATED, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, register, require, size_of
from moec.passes.ir.ops.tokens import Blocks, settled
from moec.passes.ir.value import Value


def _by_heads(op: Op, operands: Sequence[Value], meshes: Meshes) -> Placing:
    """Every rank has whole sequences, of some heads."""
    layout = settled(operands[0], meshes)
    for axis, placement in layout.placements:
        if placement not in (Shard(0), Shard(2)):
            raise LayoutError(f"{op.mnemonic} has no rule for {axis}:{placement}")
    return Placing((layout,) * len(operands), (layout,))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Rope(Op):
    """Rotary positions on `[batch, sequence, heads, head_dim]`, half-split convention (Su et al. 2021)."""

    mnemonic: ClassVar[str] = "rope"
    theta: Positive

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        width = x.shape[-1]
        require(len(x.shape) == 4 and isinstance(width, int) and width % 2 == 0, self, "wants heads of even width")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return _by_heads(self, operands, meshes)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Op):
    """Causal softmax attention: q `[batch, sequence, heads, head_dim]`, k and v with `kv_heads` that divide heads."""

    mnemonic: ClassVar[str] = "attention"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        q, k, v = operands
        require(k.shape == v.shape and q.shape[:2] == k.shape[:2], self, "wants k like v, over the tokens of q")
        require(q.shape[3] == k.shape[3], self, "wants one head width")
        return (Type(shape=q.shape, dtype=q.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return _by_heads(self, operands, meshes)

    def flops(self, operands: Sequence[Value], sizes: Mapping[str, int]) -> int:
        # Scores and values, the causal half of each (the convention that MFU figures use).
        return 2 * size_of(operands[0].shape, sizes) * sizes["sequence"]


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatHeads(Op):
    """Each head `copies` times: `[heads, …]` → `[heads · copies, …]`, copies side by side.

    Grouped-query attention over the copies is the same, and tensor parallelism may cut between them.
    """

    mnemonic: ClassVar[str] = "repeat_heads"
    copies: Count

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        heads, *rest = x.shape
        require(isinstance(heads, int), self, "wants a known number of heads")
        assert isinstance(heads, int)
        return (Type(shape=(heads * self.copies, *rest), dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return Placing((REPLICATED,), (REPLICATED,))
