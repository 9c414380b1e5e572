"""Conversions of ragged rows, and of the counts of rows per expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from moec.passes.ir.attribute_types import AxisName
from moec.passes.ir.layout import Partial, Placement, Shard
from moec.passes.ir.op import LayoutError, Meshes, Op, Placing, TokenOp, Type, layout_of, op, require
from moec.passes.ir.ops.conversion import Conversion, Kind, Unconverted
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value
from moec.passes.ir.work.arrays import larger
from moec.passes.ir.work.cost import Choices, Cost, Direction, Saved, Work
from moec.passes.ir.work.formulas import elementwise

if TYPE_CHECKING:
    from moec.passes.ir.work.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CountsConversion(Conversion):
    """Base of conversions of row counts: counts `[sources, experts]` → counts on other ranks, splits `[2, ranks]`.

    `splits` are on the host: the rows that the rank sends to, and receives from, each rank of the axis. Ranks convert
    counts before rows, once for all conversions of these rows, forward and backward. Not differentiated.
    """

    takes: ClassVar[str] = "counts"
    gives: ClassVar[str] = "received splits"
    carries: ClassVar[frozenset[Kind]] = frozenset({"row counts"})
    purpose: ClassVar[str] = "counts"
    copies_to_host: ClassVar[bool] = True

    def source(self) -> Placement | None:
        return Shard(0)

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


@op("exchange_counts", operator="exchange_counts", collectives=("all_to_all", "none"))
class ExchangeCounts(CountsConversion):
    """Counts of the rows of a rank's tokens → those of its experts."""

    def target(self) -> Placement | None:
        return Shard(1)

    def volume(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> float:
        """Bytes of the rank's counts."""
        return workload.bytes(operands[0])


@op("gather_counts", operator="gather_counts", collectives=("all_gather", "none"))
class GatherCounts(CountsConversion):
    """Counts of the rows of a rank's tokens → those of all ranks' tokens, source by source."""

    def target(self) -> Placement | None:
        return None


@op(
    "exchange_and_gather_counts",
    "counts -> received all_counts splits all_splits",
    operator="exchange_and_gather_counts",
    resolved={"axis": "str group", "gather_axis": "str gather_group"},
    sited=True,
    moves=True,
    copies_to_host=True,
)
class ExchangeAndGatherCounts(TokenOp):
    """`exchange_counts` over an axis, then `gather_counts` over another, whose splits go to the host in one copy.

    `join_counts` writes it for rows that go to their experts and are then gathered.
    """

    axis: AxisName
    gather_axis: AxisName

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        received, splits = ExchangeCounts.over(self.axis).infer(operands, blocks)
        return received, received, splits, splits

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        exchanged = ExchangeCounts.over(self.axis).place(operands, meshes, blocks)
        received, splits = exchanged.results
        gathered = GatherCounts.over(self.gather_axis).place([replace(operands[0], layout=received)], meshes, blocks)
        return Placing(exchanged.operands, (received, gathered.results[0], splits, gathered.results[1]))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        received, all_counts, splits, all_splits = results
        exchange = ExchangeCounts.over(self.axis).cost(operands, (received, splits), workload)
        gather = GatherCounts.over(self.gather_axis).cost((received,), (all_counts, all_splits), workload)
        work = elementwise(self, operands, results, workload).work
        return Cost(work=work, sent=(*exchange.sent, *gather.sent))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsConversion(Conversion):
    """Base of conversions of ragged rows. `counts` counts the rows of the result.

    `splits`, of the conversion of the counts over the same axis, say how many rows go to and come from each rank. They
    are saved for backward.
    """

    takes: ClassVar[str] = "rows splits counts"
    carries: ClassVar[frozenset[Kind]] = frozenset({"rows"})
    typing: ClassVar[frozenset[str]] = frozenset({"counts"})

    def other_operands(self, counting: Op) -> tuple[str, ...]:
        received, splits = counting.results
        return splits.name, counting.operands[0] if self.restores_rows() else received.name

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        rows, splits, counts = operands
        self.require_kind(rows)
        require(splits.dtype == "int64" and splits.shape == (2, "sources"), self, "wants splits [2, sources]")
        require(counts.is_row_counts, self, "wants counts [sources, experts]")
        return (Type(shape=rows.shape, dtype=rows.dtype, ragged=counts.name),)

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        counts = operands[-1]
        if layout_of(counts).get(self.axis) != _counts_placement(self.target()):
            raise LayoutError(f"{self.mnemonic} over {self.axis} to rows that %{counts.name} does not count")
        return Conversion.place(self, operands, meshes, blocks)

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        splits = Saved(operands[1].name, 2 * workload.meshes.size(self.axis) * workload.width("int64"))
        # Rows are contiguous: the collective reads and writes them, and no kernel beside it.
        once = Direction(launches=1)
        work = Work(forward=once, backward=once)
        return replace(Conversion.cost(self, operands, results, workload), work=work, saved=(splits,))


def _counts_placement(rows: Placement | None) -> Placement | None:
    """The placement of counts `[sources, experts]` on an axis where their rows `[experts, rows, …]` have `rows`."""
    return Shard(1 - rows.dim) if isinstance(rows, Shard) else None


@op(
    "all_to_all",
    "rows splits counts -> received",
    operator="all_to_all",
    purpose="all_to_all of rows",
    collectives=("all_to_all", "all_to_all"),
)
class AllToAll(RowsConversion):
    """Ragged shard(1) → shard(0), tokens to experts; `reverse`: experts to tokens. Backward: the other direction."""

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

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        rows = operands[0]
        axes = [axis for axis in (meshes.experts.wide_axes() if meshes.experts else ()) if axis != self.axis]
        # It sends contiguous pieces. Rows of several sources are sorted by source first, then by expert and its rank.
        if any(layout_of(rows).get(axis) != Shard(1) for axis in axes):
            raise LayoutError(f"all_to_all over {self.axis} of %{rows.name}, with rows of several ranks over {axes}")
        return RowsConversion.place(self, operands, meshes, blocks)

    def choices(self, operands: Sequence[Value], workload: Workload) -> Choices | None:
        return workload.choices_of(operands[0])

    def volume(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> float:
        """Bytes of the rank's rows before or after the all-to-all, whichever is more."""
        return larger(workload.bytes(operands[0]), workload.bytes(*results))


# ---- rows of a rank's tokens ↔ rows of all ranks' tokens, for experts cut over the axis -------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredRows(RowsConversion):
    """Base of conversions to or from the rows of all ranks' tokens, source by source."""

    gives: ClassVar[str] = "own_rows"
    purpose: ClassVar[str] = "gathered rows"

    def counts_conversion(self) -> Conversion:
        return GatherCounts.over(self.axis)

    def restores_rows(self) -> bool:
        return self.target() is not None


@op(
    "all_gather_rows",
    "rows splits counts -> all_rows",
    operator="all_gather_rows",
    partial_gradient=True,
    collectives=("all_gather", "reduce_scatter"),
)
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


@op("reduce_scatter_rows", operator="reduce_scatter_rows", collectives=("reduce_scatter", "all_gather"))
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
