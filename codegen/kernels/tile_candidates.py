"""The tiles that `moec tune` tries: near the default, nearest first, with sums and buffers that can fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import log2

from moec.codegen.kernels.stored_tiles import TileKey
from moec.codegen.kernels.tile_rule import extents
from moec.codegen.kernels.tiles import SIZES, Kernel, Tile
from moec.passes.ir.value import DTYPE_BYTES

SUMS = 128
"""Registers of a thread that a tile's sums may take, of 255: beyond it kernels spill, or nearly."""

DEPTHS = (16, 32, 64, 128)
WARPS = (2, 4, 8)
STAGES = (2, 3, 4, 5)


def heights(default: Tile) -> tuple[int, ...]:
    """Rows of a tile of row products to try, the default's first; all row products must have the same."""
    return tuple(rows for rows in (default.rows, default.rows // 2, default.rows * 2) if 16 <= rows <= 256)


def around(kernel: Kernel, default: Tile, rows: int | None, key: TileKey, shared: int) -> Iterator[Tile]:
    """The tiles of a product, sorted by their doublings from the default, ties by their numbers.

    `rows`: the rows of a tile, None for a gradient of weights, whose tiles may have any. `shared`: bytes of shared
    memory of a block. Only tiles that certainly do not fit are left out; the compiler may find others that do not.
    """
    limits = [_widest(extent) for extent in extents(kernel, (key.dim, key.hidden), key.gated)]
    sizes = itertools.product(SIZES if rows is None else (rows,), SIZES, DEPTHS)
    tiles = (
        Tile(*size, warps, stages)
        for size, warps, stages in itertools.product(sizes, WARPS, STAGES)
        if all(number <= limit for number, limit in zip(size, limits, strict=True))
    )
    fitting = (tile for tile in tiles if _registers(tile, key.dtype) <= SUMS and _buffers(tile, key.dtype) <= shared)
    yield from sorted(fitting, key=lambda tile: (_distance(default, tile), _numbers(tile)))


def _widest(extent: int | None) -> int:
    return max(SIZES) if extent is None else max(16, 1 << (extent - 1).bit_length())


def _registers(tile: Tile, dtype: str) -> int:
    """The 32-bit registers of a thread that the sums take; a warp has 32 threads."""
    return tile.rows * tile.columns * (2 if dtype == "fp64" else 1) // (32 * tile.warps)


def _buffers(tile: Tile, dtype: str) -> int:
    """Bytes of the pipeline stages' buffers, without the last stage's: not every device needs that one."""
    return (tile.stages - 1) * tile.depth * (tile.rows + tile.columns) * DTYPE_BYTES[dtype]


def _distance(default: Tile, tile: Tile) -> float:
    """Doublings of rows, columns, depth and warps, plus a half for each stage."""
    steps = sum(
        abs(log2(number / usual)) for number, usual in zip(_numbers(tile)[:4], _numbers(default)[:4], strict=True)
    )
    return steps + abs(tile.stages - default.stages) / 2


def _numbers(tile: Tile) -> tuple[int, int, int, int, int]:
    return tile.rows, tile.columns, tile.depth, tile.warps, tile.stages
