"""Collectives: conversions from one layout to another, each with its declared backward.

`communicate` inserts them, `tensor_parallel` also a `slice`. `axis` is a mesh axis of the block's meshes; codegen
resolves it to a group of ranks (`ep[4..31]`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from moec.passes.cost.cost import Cost, Sent
from moec.passes.cost.formulas import elementwise
from moec.passes.ir.attribute_types import AxisName, DimNumber, Reduction
from moec.passes.ir.layout import Layout, Partial, Placement, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, layout_of, register, require
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value

if TYPE_CHECKING:
    from moec.passes.cost.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Op):
    """Base of collectives: the axis, and the collective that backward runs.

    `sends` counts what a rank sends forward and backward, in units of (n−1)/n of the value (whole on the axis; in an
    all-to-all, the rank's part): 1 for a ring all-gather, a ring reduce-scatter or an all-to-all, 2 for an all-reduce,
    which is a reduce-scatter and an all-gather.
    """

    moves: ClassVar[bool] = True
    backward: ClassVar[str] = "none"
    sends: ClassVar[tuple[int, int]] = (1, 1)
    purpose: ClassVar[str] = "activations"
    """The heading under which its bytes are listed."""
    resolved: ClassVar[Mapping[str, str]] = {"axis": "str group"}
    sited: ClassVar[bool] = True
    axis: AxisName

    def require_source(self, value: Value, source: Placement | None) -> Layout:
        """The layout of `value`. Requires placement `source` on the axis, and no later cut of the same dim."""
        layout = layout_of(value)
        if layout.get(self.axis) != source or not layout.can_undo(self.axis):
            raise LayoutError(f"{self.mnemonic} over {self.axis} of %{value.name}, which is {layout}")
        return layout

    def volume(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> float:
        """Bytes of the value, whole on the axis; in an all-to-all, bytes of the rank's part."""
        value = operands[0]
        return workload.bytes(replace(value, layout=layout_of(value).replace(self.axis, None)))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        copied = elementwise(self, operands, results, workload).work
        ranks = workload.meshes.size(self.axis)
        part = self.volume(operands, results, workload) * (ranks - 1) / ranks
        forward, backward = self.sends
        sent = Sent(
            axis=self.axis,
            purpose=self.purpose,
            forward=forward * part,
            backward=0 if operands[0].dtype == "int64" else backward * part,
            backward_op=self.backward,
        )
        return Cost(work=copied, sent=(sent,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion(Collective):
    """Changes the placement of a value on the axis. The shape, which is global, stays the same."""

    takes: ClassVar[str] = "x"
    gives: ClassVar[str] = "y"

    @abstractmethod
    def source(self) -> Placement | None:
        """The placement that the operand must have on the axis; None is replicated."""

    @abstractmethod
    def target(self) -> Placement | None:
        """The placement of the result on the axis; None is replicated."""

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
    operator: ClassVar[str | None] = "all_reduce"
    backward: ClassVar[str] = "identity"
    sends: ClassVar[tuple[int, int]] = (2, 0)
    resolved: ClassVar[Mapping[str, str]] = {"axis": "str group", "reduce": ""}
    reduce: Reduction = "sum"

    def torch_operator(self) -> str:
        return "all_reduce" if self.reduce == "sum" else f"all_reduce_{self.reduce}"

    def source(self) -> Placement | None:
        return Partial(self.reduce)

    def target(self) -> Placement | None:
        return None


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatter(Conversion):
    """Partial → Shard(dim). Forward: sum over the axis; each rank keeps its piece. Backward: all_gather."""

    mnemonic: ClassVar[str] = "reduce_scatter"
    operator: ClassVar[str | None] = "reduce_scatter"
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

    Megatron's f (Shoeybi et al. 2019, section 3): each rank uses x for a part of the result, so x's gradient is a
    partial sum.
    """

    mnemonic: ClassVar[str] = "copy_to"
    operator: ClassVar[str | None] = "copy_to"
    backward: ClassVar[str] = "all_reduce"
    sends: ClassVar[tuple[int, int]] = (0, 2)

    def source(self) -> Placement | None:
        return None

    def target(self) -> Placement | None:
        return None


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Conversion):
    """Replicate → Shard(dim). Forward: each rank keeps its piece. Backward: all_gather."""

    mnemonic: ClassVar[str] = "slice"
    operator: ClassVar[str | None] = "slice"
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
    operator: ClassVar[str | None] = "all_gather"
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
    """Shard(dim) → Replicate, for ops that are replicated on the axis. Forward: all_gather. Backward: slice."""

    mnemonic: ClassVar[str] = "all_gather_alike"
    operator: ClassVar[str | None] = "all_gather_alike"
    backward: ClassVar[str] = "slice"
    sends: ClassVar[tuple[int, int]] = (1, 0)
    dim: DimNumber

    def source(self) -> Placement | None:
        return Shard(self.dim)

    def target(self) -> Placement | None:
        return None


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllPadded(Conversion):
    """Shard(given) → Shard(wanted), for values with one shape on every rank. Backward: Shard(wanted) → Shard(given)."""

    mnemonic: ClassVar[str] = "all_to_all_padded"
    operator: ClassVar[str | None] = "all_to_all_padded"
    backward: ClassVar[str] = "all_to_all_padded"
    sends: ClassVar[tuple[int, int]] = (1, 1)
    given: DimNumber
    wanted: DimNumber

    def source(self) -> Placement | None:
        return Shard(self.given)

    def target(self) -> Placement | None:
        return Shard(self.wanted)

    def volume(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> float:
        """Bytes of the rank's part."""
        return workload.bytes(operands[0])
