"""Packed sequences: which text of its sequence a token belongs to, and its position in this text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from moec.passes.ir.attribute_types import TokenId
from moec.passes.ir.layout import Shard
from moec.passes.ir.op import Meshes, Op, Placing, Type, layout_of, register, require
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Segments(Op):
    """Splits each sequence after every `separator`: ids `[batch, sequence]` → segments and positions, int64.

    The segments of a sequence are numbered from 0. A separator is the last token of its segment. Positions start at 0
    in each segment.
    """

    mnemonic: ClassVar[str] = "segments"
    takes: ClassVar[str] = "ids"
    gives: ClassVar[str] = "segments positions"
    separator: TokenId

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (ids,) = operands
        require(ids.dtype == "int64" and len(ids.shape) == 2, self, "wants ids")
        return (Type(shape=ids.shape, dtype="int64"),) * 2

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        # Segments are counted from the start of a sequence.
        whole = layout_of(operands[0]).only(Shard(0))
        return Placing((whole,), (whole, whole))
