"""The ways to compute grouped matrix products: by a rendered kernel with a tile of its own, or by a library.

`tile_rule.py` chooses by family of devices, `stored_tiles.py` has the tiles stored for a device and shape.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

Kernel = Literal["up", "down", "down_backward", "down_weights", "up_backward", "up_weights"]

KERNELS: tuple[Kernel, ...] = get_args(Kernel)
"""The six products of a layer's experts, in the order in which they run."""

ROW_KERNELS: tuple[Kernel, ...] = ("up", "down", "down_backward", "up_backward")
"""Products with one row of output per row. They share one table of tiles, so their tiles have equal rows."""

GATHERING_KERNELS: tuple[Kernel, ...] = ("up", "down_backward", "down_weights", "up_weights")
"""Products that read tokens, rows as they arrived, or the gradients of these: rows in another order are gathered."""

Library = Literal["grouped_mm", "quack"]
"""A library that computes a product: `torch.nn.functional.grouped_mm`, or quack's grouped products."""

LIBRARIES: tuple[Library, ...] = get_args(Library)

SIZES, WARPS, MAX_STAGES = (16, 32, 64, 128, 256), (1, 2, 4, 8, 16), 8
TILE_PATTERN = (
    rf"(?:{'|'.join(map(str, SIZES))})(?:x(?:{'|'.join(map(str, SIZES))})){{2}}"
    rf"w(?:{'|'.join(map(str, WARPS))})s[1-{MAX_STAGES}]"
)
WAY_PATTERN = rf"^(?:{'|'.join(LIBRARIES)}|{TILE_PATTERN})$"


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's part of a product: rows × columns, `depth` at a time, with Triton's warps, and buffers.

    `columns` is the width of the matrix instruction's tile: for a gated `up` it covers columns / 2 of gate and
    columns / 2 of up, otherwise as many columns of the result. A gradient of weights is rows × columns, and `depth` is
    the rows summed per step. `stages` is the number of buffers that the loop keeps in shared memory; the launch turns
    it into Triton's num_stages.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}w{self.warps}s{self.stages}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises `ValueError` for other text, and for a tile that no kernel can have."""
        if re.fullmatch(TILE_PATTERN, text) is None:
            raise ValueError(
                f"`{text}` is not a tile: rows x columns x depth, each {SIZES[0]} to {SIZES[-1]}, w warps, s stages"
            )
        return cls(*map(int, re.split("[xws]", text)))


def num_stages(tile: Tile, family: str, indirect: bool) -> int:
    """Triton's num_stages for which a loop has `tile.stages` buffers; `indirect`: it reads rows through indices.

    Found by compiling for sm_80 and sm_90 with Triton 3.6 and 3.9, which agree. With the instruction of warpgroups,
    wgmma, n stages give n buffers; with `mma`, one is kept in registers, and they give n - 1. An indirect load is two
    stages, that of its index and its own, so each load ahead counts twice.
    """
    if family == "cdna":
        return tile.stages
    wgmma = family == "hopper" and tile.rows >= 64 and tile.warps >= 4
    loads_ahead = tile.stages - 1 if wgmma else tile.stages
    return (2 * loads_ahead if indirect else loads_ahead) + 1


Way = Tile | Library
"""The way to compute one product."""


def parse_way(text: str) -> Way:
    """The inverse of `str` of a `Way`. Raises `ValueError`."""
    for library in LIBRARIES:
        if text == library:
            return library
    return Tile.parse(text)


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways of the six products of a layer's experts.

    Raises `ValueError` if the tiles of `ROW_KERNELS` differ in rows.
    """

    up: Way
    down: Way
    down_backward: Way
    down_weights: Way
    up_backward: Way
    up_weights: Way

    def __post_init__(self) -> None:
        rows = {tile.rows for tile in map(self.tile, ROW_KERNELS) if tile is not None}
        if len(rows) > 1:
            names = ", ".join(ROW_KERNELS)
            raise ValueError(f"{names} share one table of tiles, so their tiles must have as many rows: {self}")

    def of(self, kernel: Kernel) -> Way:
        """The way of one product."""
        way: Way = getattr(self, kernel)
        return way

    def tile(self, kernel: Kernel) -> Tile | None:
        """The tile of one product; None if a library computes it."""
        way = self.of(kernel)
        return way if isinstance(way, Tile) else None

    def with_way(self, kernel: Kernel, way: Way) -> Self:
        """These ways, with another one for one product."""
        return replace(self, **{kernel: way})

    @property
    def rows(self) -> int:
        """The rows of a tile in the table of tiles; with no tile among `ROW_KERNELS`, any number would do."""
        return next((tile.rows for tile in map(self.tile, ROW_KERNELS) if tile is not None), 128)

    def __str__(self) -> str:
        return " ".join(f"{kernel}={self.of(kernel)}" for kernel in KERNELS)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises `ValueError` that says what is wrong with the text."""
        pairs = [word.partition("=") for word in text.split()]
        if tuple(name for name, _, _ in pairs) != KERNELS:
            raise ValueError(f"`{text}` does not name each product once, in order: {', '.join(KERNELS)}")
        return cls(*(parse_way(way) for _, _, way in pairs))
