"""The rendered grouped products of one projection, `up` or `down`, and their launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moec.codegen.kernels.product_shapes import ProductShape
from moec.codegen.kernels.tiles import Tile
from moec.passes.ir.activations import ACTIVATIONS
from moec.runtime.backends.triton.product_clock import run_product
from moec.runtime.backends.triton.triton_blocks import described, programs_at
from moec.runtime.backends.triton.triton_launch import Kernels
from moec.runtime.backends.triton.triton_table import Table
from moec.runtime.backends.triton.triton_tiles import target_at


@dataclass(frozen=True, slots=True)
class Projection:
    """The kernels of one projection, and their table."""

    shape: ProductShape
    kernels: Kernels
    table: Table

    def product(self, kernel: str, width: int, *arguments: Tensor, numbers: tuple[int, ...] = ()) -> None:
        """A product of all rows with a matrix of `width` columns."""
        table = self.table
        tile = self._tile(kernel)
        # A tile of a gated `up` covers as many columns of both parts.
        columns = tile.columns // (ACTIVATIONS[self.shape.activation].parts if kernel == "up" else 1)
        tiles = table.num_tiles * -(-width // columns)
        persistent = self.shape.persistent(kernel)
        grid = (min(tiles, programs_at(self.kernels.device, self.shape.resident(kernel))) if persistent else tiles,)
        tables = (table.offsets, table.experts, table.starts, table.total if persistent else table.num_tiles)
        self._launch(kernel, grid, *self._in_blocks(kernel, arguments), *tables, *numbers)

    def weights(self, kernel: str, shape: Sequence[int], *arguments: Tensor) -> None:
        """The gradient [E, *shape] of a projection's weights."""
        tile, (m, n) = self._tile(kernel), shape
        grid = (-(-m // tile.rows) * -(-n // tile.columns), self.table.offsets.shape[0] - 1)
        self._launch(kernel, grid, *arguments, self.table.offsets)

    @property
    def parts(self) -> int:
        """How many tiles of down's backward cover a row: each gives a part of the gradient of the row's weight."""
        return -(-self.shape.hidden // self._tile("down_backward").columns)

    def bias(self, kernel: str, width: int, *arguments: Tensor) -> None:
        """The gradient [E, width] of a projection's bias."""
        grid = (*self.kernels.blocks(width, "BB"), self.table.offsets.shape[0] - 1)
        self.kernels.launch(kernel, grid, *arguments, self.table.offsets, **self._options(kernel))

    def _in_blocks(self, kernel: str, arguments: tuple[Tensor, ...]) -> Iterator[Any]:
        """The arguments, with a descriptor for each that the kernel reads in blocks."""
        blocks = self.shape.blocks(kernel)
        for name, argument in zip(self.kernels.arguments(kernel), arguments, strict=False):
            yield described(argument, blocks[name]) if name in blocks else argument

    def _launch(self, kernel: str, grid: tuple[int, ...], *arguments: Any) -> None:
        options = self._options(kernel)
        run_product(kernel, lambda: self.kernels.launch(kernel, grid, *arguments, **options))

    def _options(self, kernel: str) -> dict[str, int]:
        return self.shape.options(kernel, target_at(self.kernels.device).family)

    def _tile(self, kernel: str) -> Tile:
        tile = self.shape.tile_of(kernel)
        assert tile is not None, f"no kernel of this shape is called {kernel}"
        return tile
