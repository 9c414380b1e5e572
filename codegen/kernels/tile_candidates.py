"""The tiles that `moec tune` tries: near the default, nearest first, with sums and buffers that can fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import log2

from moec.codegen.kernels.stored_tiles import TileKey
from moec.codegen.kernels.tiles import Tile
from moec.passes.ir.value import DTYPE_BYTES

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
    """The tiles of `rows` rows, sorted by their doublings from the default, ties by their numbers.

    `sums`: tiles of sums that the product keeps, 2 for gate and up. `shared`: bytes of shared memory of a block. Only
    tiles that certainly do not fit are left out; the compiler may find others that do not.
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
    """The 32-bit registers of a thread that the sums take; a warp has 32 threads."""
    return sums * tile.rows * tile.columns * (2 if dtype == "fp64" else 1) // (32 * tile.warps)


def _buffers(tile: Tile, dtype: str, sums: int) -> int:
    """Bytes of the pipeline stages' buffers, without the last stage's: not every device needs that one."""
    return (tile.stages - 1) * tile.depth * (tile.rows + sums * tile.columns) * DTYPE_BYTES[dtype]


def _distance(default: Tile, tile: Tile) -> float:
    """Doublings of columns, depth and warps, plus a half for each stage; rows are not counted."""
    steps = sum(
        abs(log2(ours / theirs)) for ours, theirs in zip(_numbers(tile)[1:4], _numbers(default)[1:4], strict=True)
    )
    return steps + abs(tile.stages - default.stages) / 2


def _numbers(tile: Tile) -> tuple[int, int, int, int, int]:
    return tile.rows, tile.columns, tile.depth, tile.warps, tile.stages
