"""How the grouped matrix products are cut into tiles: the rule, by family of devices, dtype and rows per expert.

Rows per expert decide a product's class: `few` (decoding, or very many experts), `some`, or `many`. Hopper's tiles are
near those of published Triton kernels. Tiles stored for a device and shape take precedence (`stored_tiles.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's part of a product: rows × columns, `depth` at a time, with Triton's warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}w{self.warps}s{self.stages}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`."""
        return cls(*map(int, re.split("[xws]", text)))


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of the products with `up` (two sums, gate and up, per tile) and with `down`; equal numbers of rows."""

    up: Tile
    down: Tile


FEW, SOME = 24, 96
"""The most rows per expert of the classes `few` and `some`."""


def load_of(rows: int, experts: int) -> str:
    """The class of `rows` rows in all over `experts`: "few", "some" or "many" rows per expert."""
    each = -(-rows // experts)
    return "few" if each <= FEW else "some" if each <= SOME else "many"


HALF: Mapping[str, Mapping[str, Tiles]] = {
    "hopper": {
        "few": Tiles(Tile(16, 64, 128, 4, 4), Tile(16, 128, 64, 4, 4)),
        "some": Tiles(Tile(64, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4)),
        "many": Tiles(Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 4)),
    },
    "ampere": {
        "few": Tiles(Tile(16, 64, 64, 4, 4), Tile(16, 128, 64, 4, 4)),
        "some": Tiles(Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
        "many": Tiles(Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
    },
    "cdna": {
        "few": Tiles(Tile(16, 64, 64, 4, 2), Tile(16, 64, 64, 4, 2)),
        "some": Tiles(Tile(64, 64, 64, 4, 2), Tile(64, 128, 64, 4, 2)),
        "many": Tiles(Tile(128, 64, 64, 4, 2), Tile(128, 128, 64, 8, 2)),
    },
}
"""bf16 and fp16. Blackwell takes Hopper's."""

FULL: Mapping[str, Tiles] = {
    "fp32": Tiles(Tile(64, 32, 32, 4, 2), Tile(64, 64, 32, 4, 2)),
    "fp64": Tiles(Tile(32, 32, 16, 4, 2), Tile(32, 32, 16, 4, 2)),
}
"""Full precision is for proofs, not for speed: one class."""


def tiles_for(dtype: str, rows: int, experts: int, widths: tuple[int, int], family: str) -> Tiles:
    """The rule's tiles for `rows` rows in all, over `experts`, of a model of these two widths (dim and hidden).

    `family` is "hopper" (and what came after it), "ampere" or "cdna". No tile is wider than the widest matrix.
    """
    chosen = FULL[dtype] if dtype in FULL else HALF[family][load_of(rows, experts)]
    widest = max(16, 1 << (max(widths) - 1).bit_length())
    return Tiles(_narrowed(chosen.up, widest), _narrowed(chosen.down, widest))


def _narrowed(tile: Tile, widest: int) -> Tile:
    return Tile(tile.rows, min(tile.columns, widest), min(tile.depth, widest), tile.warps, tile.stages)
