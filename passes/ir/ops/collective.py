"""Collectives: conversions from one layout to another, each with its declared backward.

They are inserted by the `communicate` pass alone. `axis` is a mesh axis of the block's meshes; which ranks that
means is resolved when the graph is written (the group `ep[4..31]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from moec.passes.ir.layout import Partial, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, layout_of, register, require
from moec.passes.ir.ops.tokens import Blocks
from moec.passes.ir.value import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Op):
    """What every collective has: the axis it runs along."""

    axis: str


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Collective):
    """Partial → Replicate. Forward: sum over the axis. Backward: identity."""

    mnemonic: ClassVar[str] = "all_reduce"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0])
        if layout.get(self.axis) != Partial():
            raise LayoutError(f"all_reduce over {self.axis} of a value that is {layout}")
        return Placing((layout,), (layout.replace(self.axis, None),))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCounts(Collective):
    """How many rows go where: counts `[sources, experts]` → those received, and splits `[2, ranks]` sent and received.

    Counts cross the wire before rows. Not differentiated.
    """

    mnemonic: ClassVar[str] = "exchange_counts"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (counts,) = operands
        require(counts.dtype == "int64" and len(counts.shape) == 2, self, "wants counts [sources, experts]")
        return (Type(shape=counts.shape, dtype="int64"), Type(shape=(2, "sources"), dtype="int64"))

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = layout_of(operands[0])
        if layout.get(self.axis) != Shard(0):
            raise LayoutError(f"exchange_counts over {self.axis} of counts that are {layout}")
        # Every rank has its own splits: what it sends and receives.
        return Placing((layout,), (layout.replace(self.axis, Shard(1)), layout))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll(Collective):
    """Ragged shard(1) → shard(0), tokens to experts; `reverse`: experts to tokens. Backward: the other direction.

    rows, splits, counts: `counts` are those of the rows that arrive.
    """

    mnemonic: ClassVar[str] = "all_to_all"
    reverse: bool

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, _, counts = operands
        require(rows.ragged is not None, self, "wants ragged rows")
        return (Type(shape=rows.shape, dtype=rows.dtype, ragged=counts.name),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        rows, splits, counts = operands
        layout = layout_of(rows)
        source, target = (Shard(0), Shard(1)) if self.reverse else (Shard(1), Shard(0))
        if layout.get(self.axis) != source:
            raise LayoutError(f"all_to_all over {self.axis} of rows that are {layout}")
        return Placing((layout, layout_of(splits), layout_of(counts)), (layout.replace(self.axis, target),))
