"""Collectives: conversions from one layout to another, each with its declared backward.

They are inserted by the `communicate` pass alone. `axis` is a mesh axis of the block's meshes; which ranks that
means is resolved when the graph is written (the group `ep[4..31]`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from moec.passes.ir.attribute_types import AxisName, DimNumber, Reduction
from moec.passes.ir.layout import Layout, Partial, Placement, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, layout_of, register, require
from moec.passes.ir.ops.tokens import Blocks
from moec.passes.ir.value import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Op):
    """What every collective has: the axis it runs along, and what its backward is.

    `sends` says how much a rank sends forward and backward, in parts of (n−1)/n of the whole value (whole on the axis;
    in an all-to-all, of a rank's own part): one for a ring all-gather, a ring reduce-scatter or an all-to-all, two for
    an all-reduce, which is both.
    """

    moves: ClassVar[bool] = True
    backward: ClassVar[str] = "none"
    sends: ClassVar[tuple[int, int]] = (1, 1)
    axis: AxisName

    def require_source(self, value: Value, source: Placement | None) -> Layout:
        """The layout of `value`, which is `source` on the axis, and no other axis cuts its pieces further."""
        layout = layout_of(value)
        if layout.get(self.axis) != source or not layout.can_undo(self.axis):
            raise LayoutError(f"{self.mnemonic} over {self.axis} of %{value.name}, which is {layout}")
        return layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion(Collective):
    """Takes a value from one placement on the axis to another; its shape, which is the global one, stays."""

    @abstractmethod
    def source(self) -> Placement | None:
        """How the operand must lie on the axis; None is replicated."""

    @abstractmethod
    def target(self) -> Placement | None:
        """How the result lies on the axis."""

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (x,) = operands
        require(x.ragged is None, self, "rows move by all_to_all")
        return (Type(shape=x.shape, dtype=x.dtype),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = self.require_source(operands[0], self.source())
        return Placing((layout,), (layout.replace(self.axis, self.target()),))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Conversion):
    """Partial → Replicate. Forward: reduce over the axis. Backward: identity.

    `reduce` is `sum`, or `max` for values that are not differentiated.
    """

    mnemonic: ClassVar[str] = "all_reduce"
    backward: ClassVar[str] = "identity"
    sends: ClassVar[tuple[int, int]] = (2, 0)
    reduce: Reduction = "sum"

    def source(self) -> Placement | None:
        return Partial(self.reduce)

    def target(self) -> Placement | None:
        return None


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatter(Conversion):
    """Partial → Shard(dim). Forward: sum over the axis, each rank its piece. Backward: all_gather."""

    mnemonic: ClassVar[str] = "reduce_scatter"
    backward: ClassVar[str] = "all_gather"
    sends: ClassVar[tuple[int, int]] = (1, 1)
    dim: DimNumber

    def source(self) -> Placement | None:
        return Partial()

    def target(self) -> Placement | None:
        return Shard(self.dim)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTo(Conversion):
    """Replicate → Replicate, for ops that are sharded on the axis. Forward: identity. Backward: all_reduce.

    Megatron's f (Shoeybi et al. 2019, section 3): each rank goes on to do a part, so gradients are partial sums.
    """

    mnemonic: ClassVar[str] = "copy_to"
    backward: ClassVar[str] = "all_reduce"
    sends: ClassVar[tuple[int, int]] = (0, 2)

    def source(self) -> Placement | None:
        return None

    def target(self) -> Placement | None:
        return None


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Conversion):
    """Replicate → Shard(dim). Forward: each rank its piece. Backward: all_gather."""

    mnemonic: ClassVar[str] = "slice"
    backward: ClassVar[str] = "all_gather"
    sends: ClassVar[tuple[int, int]] = (0, 1)
    dim: DimNumber

    def source(self) -> Placement | None:
        return None

    def target(self) -> Placement | None:
        return Shard(self.dim)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather(Conversion):
    """Shard(dim) → Replicate, for ops that are sharded on the axis. Forward: all_gather. Backward: reduce_scatter."""

    mnemonic: ClassVar[str] = "all_gather"
    backward: ClassVar[str] = "reduce_scatter"
    sends: ClassVar[tuple[int, int]] = (1, 1)
    dim: DimNumber

    def source(self) -> Placement | None:
        return Shard(self.dim)

    def target(self) -> Placement | None:
        return None


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class AllGatherAlike(Conversion):
    """Shard(dim) → Replicate, consumed alike on every rank. Forward: all_gather. Backward: slice."""

    mnemonic: ClassVar[str] = "all_gather_alike"
    backward: ClassVar[str] = "slice"
    sends: ClassVar[tuple[int, int]] = (1, 0)
    dim: DimNumber

    def source(self) -> Placement | None:
        return Shard(self.dim)

    def target(self) -> Placement | None:
        return None


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCounts(Collective):
    """How many rows go where: counts `[sources, experts]` → those received, and splits `[2, ranks]` sent and received.

    Counts cross the wire before rows. Not differentiated.
    """

    mnemonic: ClassVar[str] = "exchange_counts"
    backward: ClassVar[str] = "none"
    sends: ClassVar[tuple[int, int]] = (1, 0)

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (counts,) = operands
        require(counts.is_row_counts, self, "wants counts [sources, experts]")
        return (Type(shape=counts.shape, dtype="int64"), Type(shape=(2, "sources"), dtype="int64"))

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = self.require_source(operands[0], Shard(0))
        # Every rank has its own splits: what it sends and receives.
        return Placing((layout,), (layout.replace(self.axis, Shard(1)), layout))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll(Collective):
    """Ragged shard(1) → shard(0), tokens to experts; `reverse`: experts to tokens. Backward: the other direction.

    rows, splits, counts: `counts` are those of the rows that arrive.
    """

    mnemonic: ClassVar[str] = "all_to_all"
    backward: ClassVar[str] = "all_to_all"
    sends: ClassVar[tuple[int, int]] = (1, 1)
    reverse: bool

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, splits, counts = operands
        require(rows.ragged is not None, self, "wants ragged rows")
        require(splits.dtype == "int64" and splits.shape == (2, "sources"), self, "wants splits [2, sources]")
        require(counts.dtype == "int64" and len(counts.shape) == 2, self, "wants counts [sources, experts]")
        return (Type(shape=rows.shape, dtype=rows.dtype, ragged=counts.name),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        rows, splits, counts = operands
        source, target = (Shard(0), Shard(1)) if self.reverse else (Shard(1), Shard(0))
        layout = self.require_source(rows, source)
        return Placing((layout, layout_of(splits), layout_of(counts)), (layout.replace(self.axis, target),))


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllPadded(Conversion):
    """Shard(given) → Shard(wanted), of what has the same shape on every rank. Backward: the other direction."""

    mnemonic: ClassVar[str] = "all_to_all_padded"
    backward: ClassVar[str] = "all_to_all_padded"
    sends: ClassVar[tuple[int, int]] = (1, 1)
    given: DimNumber
    wanted: DimNumber

    def source(self) -> Placement | None:
        return Shard(self.given)

    def target(self) -> Placement | None:
        return Shard(self.wanted)
