"""Ops at the model's edge and between its parts: embeddings and norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from moec.passes.ir.attribute_types import Positive
from moec.passes.ir.layout import REPLICATED, Layout, Partial, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, layout_of, register, require
from moec.passes.ir.ops.tokens import Blocks, follow_tokens
from moec.passes.ir.value import Value


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Embed(Op):
    """Rows of a table: ids `[batch, sequence]`, table `[vocab, dim]` → `[batch, sequence, dim]`."""

    mnemonic: ClassVar[str] = "embed"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        ids, table = operands
        require(ids.dtype == "int64" and len(table.shape) == 2, self, "wants int64 ids and a [vocab, dim] table")
        return (Type(shape=(*ids.shape, table.shape[1]), dtype=table.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        held = layout_of(operands[1])
        ids = meshes.tokens
        for axis, placement in held.placements:
            if placement != Shard(0):
                raise LayoutError(f"embed has no rule for a table with {axis}:{placement}")
            # A rank looks up the ids that it has rows of: all tokens, and a partial sum of their vectors.
            ids = ids.replace(axis, None)
        found = Layout.of((*ids.placements, *((axis, Partial()) for axis in held.axes)))
        return Placing((ids, held), (found,))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedPositions(Op):
    """The first rows of a table, for each sequence: ids `[batch, sequence]`, table `[context, dim]` → as `embed`."""

    mnemonic: ClassVar[str] = "embed_positions"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        ids, table = operands
        require(len(ids.shape) == 2 and len(table.shape) == 2, self, "wants ids and a [context, dim] table")
        return (Type(shape=(*ids.shape, table.shape[1]), dtype=table.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        # Positions are counted from the start of a sequence.
        whole = Layout.of((axis, p) for axis, p in layout_of(operands[0]).placements if p == Shard(0))
        return Placing((whole, REPLICATED), (whole,))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm(Op):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dim, in at least fp32 (Zhang & Sennrich 2019)."""

    mnemonic: ClassVar[str] = "rms_norm"
    eps: Positive

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, weight = operands
        require(weight.shape == x.shape[-1:], self, "wants a weight as wide as the last dim")
        require(weight.dtype == x.dtype, self, "wants one dtype")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands[:1], meshes, parameters=1)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm(Op):
    """`(x − mean) / sqrt(variance + eps) * weight + bias` over the last dim, in at least fp32 (Ba et al. 2016).

    x, weight, and bias where there is one.
    """

    mnemonic: ClassVar[str] = "layer_norm"
    eps: Positive

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        x, *vectors = operands
        require(len(vectors) in (1, 2), self, "wants a weight, and at most a bias")
        require(all(v.shape == x.shape[-1:] for v in vectors), self, "wants vectors as wide as the last dim")
        require(all(v.dtype == x.dtype for v in vectors), self, "wants one dtype")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        return follow_tokens(self, operands[:1], meshes, parameters=len(operands) - 1)
