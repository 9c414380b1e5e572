"""Collectives of ragged rows, and of the counts of rows per expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from moec.passes.cost.cost import Cost, Saved
from moec.passes.ir.layout import Shard
from moec.passes.ir.op import Meshes, Placing, Type, layout_of, register, require
from moec.passes.ir.ops.collective_ops import Collective
from moec.passes.ir.ops.token_layouts import Blocks
from moec.passes.ir.value import Value

if TYPE_CHECKING:
    from moec.passes.cost.workload import Workload


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCounts(Collective):
    """Exchanges row counts: counts `[sources, experts]` → received counts, splits `[2, ranks]` (sent and received).

    Ranks exchange counts before rows. Not differentiated.
    """

    mnemonic: ClassVar[str] = "exchange_counts"
    takes: ClassVar[str] = "counts"
    gives: ClassVar[str] = "received splits"
    operator: ClassVar[str | None] = "exchange_counts"
    backward: ClassVar[str] = "none"
    purpose: ClassVar[str] = "counts"
    sends: ClassVar[tuple[int, int]] = (1, 0)

    def infer(self, operands: Sequence[Value], blocks: Blocks) -> tuple[Type, ...]:
        (counts,) = operands
        require(counts.is_row_counts, self, "wants counts [sources, experts]")
        return (Type(shape=counts.shape, dtype="int64"), Type(shape=(2, "sources"), dtype="int64"))

    def place(self, operands: Sequence[Value], meshes: Meshes, blocks: Blocks) -> Placing:
        layout = self.require_source(operands[0], Shard(0))
        # Splits differ between ranks: the rows that the rank sends and receives.
        return Placing((layout,), (layout.replace(self.axis, Shard(1)), layout))

    def volume(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> float:
        """Bytes of the rank's counts."""
        return workload.bytes(operands[0])


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll(Collective):
    """Ragged shard(1) → shard(0), tokens to experts; `reverse`: experts to tokens. Backward: the other direction.

    Operands rows, splits, counts: `counts` are the counts of the received rows.
    """

    mnemonic: ClassVar[str] = "all_to_all"
    takes: ClassVar[str] = "rows splits counts"
    gives: ClassVar[str] = "received"
    operator: ClassVar[str | None] = "all_to_all"
    typing: ClassVar[frozenset[str]] = frozenset({"counts"})
    backward: ClassVar[str] = "all_to_all"
    purpose: ClassVar[str] = "all_to_all of rows"
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

    def volume(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> float:
        """Bytes of the rank's rows before or after the all-to-all, whichever is more."""
        return max(workload.bytes(operands[0]), workload.bytes(*results))

    def cost(self, operands: Sequence[Value], results: Sequence[Value], workload: Workload) -> Cost:
        splits = Saved(operands[1].name, 2 * workload.meshes.size(self.axis) * workload.width("int64"))
        return replace(Collective.cost(self, operands, results, workload), saved=(splits,))
