"""The table of rows of grouped products: the offsets of experts' rows, and the rows of each tile.

Forward makes it by kernels, without a wait for the device, and the operator returns it; backward reads it. Its parts
are those of `passes/ir/row_table.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moec.codegen.kernels.shapes import TilesShape
from moec.passes.ir.row_table import table_length, table_parts
from moec.runtime.backends.triton.triton_launch import kernels_of


@dataclass(frozen=True, slots=True)
class Table:
    """The parts of a table for tiles of `height` rows, all int32.

    order [R]: the choice of each row, or its index among rows that arrived from several sources; undefined where rows
    are in the experts' order. offsets [E + 1] of the experts' rows. total [1]: the number of tiles. experts and starts
    [num_tiles]: each tile's expert, −1 from the total on, and its first row.
    """

    saved: Tensor
    num_rows: int
    height: int
    order: Tensor
    offsets: Tensor
    total: Tensor
    experts: Tensor
    starts: Tensor

    @classmethod
    def of(cls, saved: Tensor, num_rows: int, num_experts: int, height: int) -> Table:
        """The parts of a saved table."""
        order, offsets, total, experts, starts = torch.split(saved, list(table_parts(num_rows, num_experts)))
        num_tiles = -(-num_rows // height) + num_experts
        return cls(
            saved,
            num_rows,
            height,
            order[:num_rows],
            offsets[: num_experts + 1],
            total[:1],
            experts[:num_tiles],
            starts[:num_tiles],
        )

    @classmethod
    def empty(cls, like: Tensor, num_rows: int, num_experts: int, height: int) -> Table:
        """Memory for a table on the device of `like`; the operator's result even if no kernel fills it."""
        saved = like.new_empty(table_length(num_rows, num_experts), dtype=torch.int32)
        return cls.of(saved, num_rows, num_experts, height)

    @property
    def num_tiles(self) -> int:
        """A bound from shapes alone: ⌈rows / height⌉ and one more for each expert."""
        return self.experts.shape[0]

    def fill(self, counts: Tensor) -> None:
        """From counts [sources, E] int64: each expert's rows and tiles, and the order of rows from several sources."""
        sources, experts = counts.shape
        counts = counts.contiguous()
        kernels = kernels_of(TilesShape(experts=experts, rows=self.height), counts)
        parts = (self.offsets, self.total, self.experts, self.starts)
        grid = kernels.blocks(self.num_tiles)
        kernels.launch("table", grid, counts, *parts, sources, self.num_rows, self.num_tiles)
        if sources > 1:
            kernels.launch("order", (experts, sources), counts, self.offsets, self.order, sources, self.num_rows)
