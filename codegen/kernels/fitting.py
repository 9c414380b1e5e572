"""Replaces tiles that exceed a device's shared memory by smaller ones."""

from __future__ import annotations

from dataclasses import replace

from moec.codegen.kernels.tiles import KERNELS, Tile, Ways
from moec.passes.ir.value import DTYPE_BYTES


def buffer_bytes(tile: Tile, dtype: str) -> int:
    """Bytes of shared memory that a tile's buffers take: `stages` steps of both operands."""
    return tile.stages * tile.depth * (tile.rows + tile.columns) * DTYPE_BYTES[dtype]


def fitted(ways: Ways, dtype: str, shared: int) -> Ways:
    """The same ways where every tile's buffers fit `shared` bytes: with fewer buffers, then narrower, then shallower.

    Rows stay, so that products still share one table. A tile that cannot fit gets the smallest buffers.
    """
    tiles = {kernel: tile for kernel in KERNELS if (tile := ways.tile(kernel)) is not None}
    return replace(ways, **{kernel: _fitted(tile, dtype, shared) for kernel, tile in tiles.items()})


def _fitted(tile: Tile, dtype: str, shared: int) -> Tile:
    while buffer_bytes(tile, dtype) > shared:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.columns > 64:
            tile = replace(tile, columns=tile.columns // 2)
        elif tile.depth > 16:
            tile = replace(tile, depth=tile.depth // 2)
        else:
            break
    return tile
