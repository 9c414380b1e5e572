"""Conversions of ragged rows, and of the counts of rows per expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from moec.passes.ir.layout import Partial, Placement, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, Type, layout_of, op, require
from moec.passes.ir.ops.conversion import Conversion, Kind, Unconverted
from moec.passes.ir.ops.dense_conversions import AllGatherAlike
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value
from moec.passes.ir.work.cost import Cost, Saved

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@op(
    "exchange_counts",
    "counts -> received splits",
    operator="exchange_counts",
    carries={"row counts"},
    purpose="counts",
    sends=(1, 0),
)
class ExchangeCounts(Conversion):
    """Exchanges row counts: counts `[sources, experts]` → received counts, splits `[2, ranks]` (sent and received).

    Ranks exchange counts before rows. Not differentiated.
    """

    def source(self) -> Placement | None:
        return Shard(0)

    def target(self) -> Placement | None:
        return Shard(1)

    def backward(self) -> Unconverted:
        return "none"

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (counts,) = operands
        require(counts.is_row_counts, self, "wants counts [sources, experts]")
        return (Type(shape=counts.shape, dtype="int64"), Type(shape=(2, "sources"), dtype="int64"))

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = self.require_source(operands[0])
        # Splits differ between ranks: the rows that the rank sends and receives.
        return Placing((layout,), (layout.replace(self.axis, self.target()), layout))

    def volume(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> float:
        """Bytes of the rank's counts."""
        return workload.bytes(operands[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsConversion(Conversion):
    """Base of conversions of ragged rows. The last operand, `counts`, counts the rows of the result."""

    carries: ClassVar[frozenset[Kind]] = frozenset({"rows"})
    typing: ClassVar[frozenset[str]] = frozenset({"counts"})

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, *_, counts = self.named(operands).values()
        self.require_kind(rows)
        require(counts.is_row_counts, self, "wants counts [sources, experts]")
        return (Type(shape=rows.shape, dtype=rows.dtype, ragged=counts.name),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        counts = operands[-1]
        if layout_of(counts).get(self.axis) != _counts_placement(self.target()):
            raise LayoutError(f"{self.mnemonic} over {self.axis} to rows that %{counts.name} does not count")
        return Conversion.place(self, operands, meshes, blocks)


def _counts_placement(rows: Placement | None) -> Placement | None:
    """The placement of counts `[sources, experts]` on an axis where their rows `[experts, rows, …]` have `rows`."""
    return Shard(1 - rows.dim) if isinstance(rows, Shard) else None


@op("all_to_all", "rows splits counts -> received", operator="all_to_all", purpose="all_to_all of rows", sends=(1, 1))
class AllToAll(RowsConversion):
    """Ragged shard(1) → shard(0), tokens to experts; `reverse`: experts to tokens. Backward: the other direction.

    Operands rows, splits, counts: `splits` of `exchange_counts` say how many rows go to and come from each rank.
    """

    reverse: bool

    def source(self) -> Placement | None:
        return Shard(0) if self.reverse else Shard(1)

    def target(self) -> Placement | None:
        return Shard(1) if self.reverse else Shard(0)

    def backward(self) -> Conversion:
        return AllToAll.over(self.axis, reverse=not self.reverse)

    def counts_conversion(self) -> Conversion:
        return ExchangeCounts.over(self.axis)

    def restores_rows(self) -> bool:
        return self.reverse

    def other_operands(self, counting: Op) -> tuple[str, ...]:
        received, splits = counting.results
        return splits.name, counting.operands[0] if self.reverse else received.name

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        splits = self.named(operands)["splits"]
        require(splits.dtype == "int64" and splits.shape == (2, "sources"), self, "wants splits [2, sources]")
        return RowsConversion.infer(self, operands, blocks)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        rows = operands[0]
        axes = [axis for axis in (meshes.experts.wide_axes() if meshes.experts else ()) if axis != self.axis]
        # Rows are sorted by source, then by expert: those of several sources are not sorted by their ranks.
        if any(layout_of(rows).get(axis) != Shard(1) for axis in axes):
            raise LayoutError(f"all_to_all over {self.axis} of %{rows.name}, with rows of several ranks over {axes}")
        return RowsConversion.place(self, operands, meshes, blocks)

    def volume(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> float:
        """Bytes of the rank's rows before or after the all-to-all, whichever is more."""
        return max(workload.bytes(operands[0]), workload.bytes(*results))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        splits = Saved(operands[1].name, 2 * workload.meshes.size(self.axis) * workload.width("int64"))
        return replace(Conversion.cost(self, operands, results, workload), saved=(splits,))


# ---- rows of a rank's tokens ↔ rows of all ranks' tokens, for experts cut or copied over the axis ---------


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredRows(RowsConversion):
    """Base of conversions to or from the rows of all ranks' tokens, source by source.

    `all_counts` `[sources of all ranks, experts]` counts them on every rank: `all_gather_alike` of the counts. It is
    saved for backward.
    """

    takes: ClassVar[str] = "rows all_counts counts"
    gives: ClassVar[str] = "own_rows"
    purpose: ClassVar[str] = "gathered rows"

    def counts_conversion(self) -> Conversion:
        return AllGatherAlike.over(self.axis, dim=0)

    def restores_rows(self) -> bool:
        return self.target() is not None

    def other_operands(self, counting: Op) -> tuple[str, ...]:
        all_counts = counting.results[0].name
        return (all_counts, counting.operands[0]) if self.restores_rows() else (all_counts,)

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        if self.restores_rows():
            rows, all_counts, _ = self.named(operands).values()
            require(rows.ragged == all_counts.name, self, f"rows are counted by {rows.ragged}, not {all_counts.name}")
        return RowsConversion.infer(self, operands, blocks)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        all_counts = operands[1]
        if layout_of(all_counts).get(self.axis) is not None:
            raise LayoutError(f"{self.mnemonic} over {self.axis} with %{all_counts.name}, which not every rank has")
        return RowsConversion.place(self, operands, meshes, blocks)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        return replace(Conversion.cost(self, operands, results, workload), saved=workload.keep(operands[1]))


@op("all_gather_rows", "rows all_counts -> all_rows", operator="all_gather_rows", partial_gradient=True, sends=(1, 1))
class AllGatherRows(GatheredRows):
    """Ragged shard(1) → Replicate, for experts cut over the axis: the rows of all ranks, source by source.

    Backward: reduce_scatter_rows.
    """

    def source(self) -> Placement | None:
        return Shard(1)

    def target(self) -> Placement | None:
        return None

    def backward(self) -> Conversion:
        return ReduceScatterRows.over(self.axis)


@op("all_gather_rows_alike", "rows all_counts -> all_rows", operator="all_gather_rows_alike", sends=(1, 0))
class AllGatherRowsAlike(GatheredRows):
    """Ragged shard(1) → Replicate, for experts that are copied over the axis. Backward: slice_rows."""

    def source(self) -> Placement | None:
        return Shard(1)

    def target(self) -> Placement | None:
        return None

    def backward(self) -> Conversion:
        return SliceRows.over(self.axis)


@op("reduce_scatter_rows", operator="reduce_scatter_rows", sends=(1, 1))
class ReduceScatterRows(GatheredRows):
    """Ragged Partial → shard(1): the sum of all ranks' rows; each rank keeps those of its tokens.

    Backward: all_gather_rows.
    """

    def source(self) -> Placement | None:
        return Partial()

    def target(self) -> Placement | None:
        return Shard(1)

    def backward(self) -> Conversion:
        return AllGatherRows.over(self.axis)


@op("slice_rows", operator="slice_rows", sends=(0, 1))
class SliceRows(GatheredRows):
    """Ragged Replicate → shard(1): each rank keeps the rows of its tokens. Backward: all_gather_rows."""

    def source(self) -> Placement | None:
        return None

    def target(self) -> Placement | None:
        return Shard(1)

    def backward(self) -> Conversion:
        return AllGatherRows.over(self.axis)
