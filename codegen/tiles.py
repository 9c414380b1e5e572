"""How the grouped matrix products are cut into tiles: defaults by device, dtype and rows per expert."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share of a product: rows × columns, `depth` at a time, with Triton's warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}w{self.warps}s{self.stages}"
