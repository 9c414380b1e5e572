"""Which tiles `moec tune` tries: those around the default whose sums and buffers can fit, the nearest first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import log2

from moec.codegen.kernels.stored_tiles import TileKey
from moec.codegen.kernels.tiles import Tile
from moec.codegen.kernels.work import BYTES

SUMS = 128
"""Registers of a thread that a tile's sums may take, of 255: beyond it kernels spill, or nearly."""

COLUMNS = (16, 32, 64, 128, 256)
DEPTHS = (16, 32, 64, 128)
WARPS = (2, 4, 8)
STAGES = (2, 3, 4, 5)


def heights(default: Tile) -> tuple[int, ...]:
    """Rows of a tile to try, the default's first; up and down must have the same."""
    return tuple(rows for rows in (default.rows, default.rows // 2, default.rows * 2) if 16 <= rows <= 256)


def around(default: Tile, rows: int, key: TileKey, sums: int, shared: int) -> Iterator[Tile]:
    """The tiles of `rows` rows, by how many doublings they are from the default, equal ones in order.

    `sums`: tiles of sums that the product keeps, 2 for gate and up. `shared`: bytes of shared memory of a block. What a
    compiler makes of a tile is not known here: this leaves out what cannot fit, not all that does not.
    """
    widest = max(16, 1 << (max(key.dim, key.hidden) - 1).bit_length())
    tiles = (
        Tile(rows, columns, depth, warps, stages)
        for columns, depth, warps, stages in itertools.product(COLUMNS, DEPTHS, WARPS, STAGES)
        if columns <= widest and depth <= widest
    )
    fitting = (tile for tile in tiles if _registers(tile, key.dtype, sums) <= SUMS)
    fitting = (tile for tile in fitting if _buffers(tile, key.dtype, sums) <= shared)
    yield from sorted(fitting, key=lambda tile: (_distance(default, tile), _numbers(tile)))


def _registers(tile: Tile, dtype: str, sums: int) -> int:
    """32 bits each, of a thread; a warp has 32."""
    return sums * tile.rows * tile.columns * (2 if dtype == "fp64" else 1) // (32 * tile.warps)


def _buffers(tile: Tile, dtype: str, sums: int) -> int:
    """What pipeline stages hold. Not every device needs one for the last, which is what is counted here."""
    return (tile.stages - 1) * tile.depth * (tile.rows + sums * tile.columns) * BYTES[dtype]


def _distance(default: Tile, tile: Tile) -> float:
    """Doublings of columns, depth and warps, and half a step for each stage; rows are given."""
    steps = sum(
        abs(log2(ours / theirs)) for ours, theirs in zip(_numbers(tile)[1:4], _numbers(default)[1:4], strict=True)
    )
    return steps + abs(tile.stages - default.stages) / 2


def _numbers(tile: Tile) -> tuple[int, int, int, int, int]:
    return tile.rows, tile.columns, tile.depth, tile.warps, tile.stages
