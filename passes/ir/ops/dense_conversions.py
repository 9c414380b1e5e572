"""Conversions of values that have one shape on every rank: collectives, `slice`, `copy_to` and `keep_on_first`.

`communicate` inserts them, `tensor_parallel` also a `slice`. `axis` is a mesh axis of the block's meshes; codegen
resolves it to a group of ranks (`ep[4..31]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moec.passes.ir.attribute_types import DimNumber, Reduction
from moec.passes.ir.layout import Partial, Placement, Shard
from moec.passes.ir.op import Type, op, require
from moec.passes.ir.ops.conversion import Conversion, Unconverted
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Choices

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op(
    "all_reduce",
    operator="all_reduce",
    collectives=("all_reduce", "none"),
    resolved={"axis": "str group", "reduce": ""},
)
class AllReduce(Conversion):
    """Partial → Replicate. Forward: reduce over the axis. Backward: identity.

    `reduce` is `sum`, or `max` for values that are not differentiated.
    """

    reduce: Reduction = "sum"

    def torch_operator(self) -> str:
        return "all_reduce" if self.reduce == "sum" else f"all_reduce_{self.reduce}"

    def source(self) -> Placement | None:
        return Partial(self.reduce)

    def target(self) -> Placement | None:
        return None

    def backward(self) -> Unconverted:
        return "identity" if self.reduce == "sum" else "none"


@op("reduce_scatter", operator="reduce_scatter", collectives=("reduce_scatter", "all_gather"))
class ReduceScatter(Conversion):
    """Partial → Shard(dim). Forward: sum over the axis; each rank keeps its piece. Backward: all_gather."""

    dim: DimNumber

    def source(self) -> Placement | None:
        return Partial()

    def target(self) -> Placement | None:
        return Shard(self.dim)

    def backward(self) -> Conversion:
        return AllGather.over(self.axis, dim=self.dim)


@op("copy_to", operator="copy_to", partial_gradient=True, collectives=("none", "all_reduce"))
class CopyTo(Conversion):
    """Replicate → Replicate, for ops that are sharded on the axis. Forward: identity. Backward: all_reduce.

    Megatron's f (Shoeybi et al. 2019, section 3): each rank uses x for a part of the result, so x's gradient is a
    partial sum.
    """

    def source(self) -> Placement | None:
        return None

    def target(self) -> Placement | None:
        return None

    def backward(self) -> Conversion:
        return AllReduce.over(self.axis)


@op("slice", operator="slice", collectives=("none", "all_gather"))
class Slice(Conversion):
    """Replicate → Shard(dim). Forward: each rank keeps its piece. Backward: all_gather."""

    dim: DimNumber

    def source(self) -> Placement | None:
        return None

    def target(self) -> Placement | None:
        return Shard(self.dim)

    def backward(self) -> Conversion:
        return AllGather.over(self.axis, dim=self.dim)


@op("keep_on_first", operator="keep_on_first", carries={"dense"})
class KeepOnFirst(Conversion):
    """Replicate → Partial. Forward: the first rank of the axis keeps the value, the others have zeros. Backward:
    identity.

    For a bias that every rank would otherwise add to its term of the sum.
    """

    def source(self) -> Placement | None:
        return None

    def target(self) -> Placement | None:
        return Partial()

    def backward(self) -> Unconverted:
        return "identity"


@op("all_gather", operator="all_gather", partial_gradient=True, collectives=("all_gather", "reduce_scatter"))
class AllGather(Conversion):
    """Shard(dim) → Replicate, for ops that are sharded on the axis. Forward: all_gather. Backward: reduce_scatter."""

    dim: DimNumber

    def source(self) -> Placement | None:
        return Shard(self.dim)

    def target(self) -> Placement | None:
        return None

    def backward(self) -> Conversion:
        return ReduceScatter.over(self.axis, dim=self.dim)


@op("all_gather_alike", operator="all_gather_alike", carries={"dense"}, collectives=("all_gather", "none"))
class AllGatherAlike(Conversion):
    """Shard(dim) → Replicate, for ops that are replicated on the axis. Forward: all_gather. Backward: slice."""

    dim: DimNumber

    def source(self) -> Placement | None:
        return Shard(self.dim)

    def target(self) -> Placement | None:
        return None

    def backward(self) -> Conversion:
        return Slice.over(self.axis, dim=self.dim)


@op("all_to_all_padded", operator="all_to_all_padded", carries={"dense"}, collectives=("all_to_all", "all_to_all"))
class AllToAllPadded(Conversion):
    """Shard(given) → Shard(wanted), for values with one shape on every rank. Backward: Shard(wanted) → Shard(given)."""

    given: DimNumber
    wanted: DimNumber

    def source(self) -> Placement | None:
        return Shard(self.given)

    def target(self) -> Placement | None:
        return Shard(self.wanted)

    def backward(self) -> Conversion:
        return AllToAllPadded.over(self.axis, given=self.wanted, wanted=self.given)

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        require(self.given != self.wanted, self, "wants two dims")
        return Conversion.infer(self, operands, blocks)

    def choices(self, operands: Sequence[Value], workload: Workload) -> Choices | None:
        return workload.choices_of(operands[0]) if {self.given, self.wanted} == {0, 1} else None

    def volume(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> float:
        """Bytes of the rank's part."""
        return workload.bytes(operands[0])
