"""Tiles stored by device and shape: those that moec ships, and a plan's own, measured by `moec tune`.

The shipped ones (`tuned/*.json`) are defaults for well-known layers; each says whether it was measured. A plan's own
(`tiles.json` in its folder) take precedence. For shapes that neither contains, the rule of `tiles.py` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from moec.codegen.data import Data
from moec.codegen.kernels.tiles import Tile, Tiles, load_of, tiles_for

FILE = "tiles.json"
"""A plan's own, in its folder."""

SHIPPED = ("a100", "h100", "h200")
"""The devices that moec ships tiles for, by their names in the library."""

MAX_ENTRIES = 10_000

Extent = Annotated[int, Field(ge=1, le=2**31)]
TileText = Annotated[str, Field(pattern=r"^(16|32|64|128|256)(x(16|32|64|128|256)){2}w(1|2|4|8|16)s[1-8]$")]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class TileKey:
    """The key of a choice of tiles. `load` is the class of rows per expert; `experts` None stands for any number."""

    dtype: str
    load: str
    experts: int | None
    dim: int
    hidden: int
    gated: bool

    def __str__(self) -> str:
        experts = f"{self.experts} × " if self.experts else ""
        return f"{experts}{self.dim} × {self.hidden}{' gated' if self.gated else ''}, {self.dtype}, {self.load} rows"


def key_of(dtype: str, rows: int, experts: int, widths: tuple[int, int], gated: bool) -> TileKey:
    """The key of a product of `rows` rows in all, over `experts`, of a model of these widths (dim and hidden)."""
    return TileKey(dtype, load_of(rows, experts), experts, *widths, gated)


class Measured(Data):
    """Milliseconds of a layer's experts, forward and backward, over `rows` rows: with default tiles and with these."""

    rows: Extent
    default_ms: Milliseconds
    ms: Milliseconds


class Entry(Data):
    """The tiles of one shape; `measured` is null if they were not measured."""

    dtype: Annotated[str, Field(pattern=r"^(bf16|fp16|fp32|fp64)$")]
    load: Annotated[str, Field(pattern=r"^(few|some|many)$")]
    experts: Extent | None
    dim: Extent
    hidden: Extent
    gated: bool
    up: TileText
    down: TileText
    measured: Measured | None

    @property
    def key(self) -> TileKey:
        """The entry's key."""
        return TileKey(self.dtype, self.load, self.experts, self.dim, self.hidden, self.gated)

    @property
    def tiles(self) -> Tiles:
        """The entry's tiles, parsed."""
        return Tiles(Tile.parse(self.up), Tile.parse(self.down))

    @classmethod
    def of(cls, key: TileKey, tiles: Tiles, measured: Measured | None) -> Self:
        """Makes the entry."""
        return cls(
            dtype=key.dtype,
            load=key.load,
            experts=key.experts,
            dim=key.dim,
            hidden=key.hidden,
            gated=key.gated,
            up=str(tiles.up),
            down=str(tiles.down),
            measured=measured,
        )

    @model_validator(mode="after")
    def _one_table(self) -> Entry:
        if self.tiles.up.rows != self.tiles.down.rows:
            raise ValueError("up and down go by one table of tiles, and must have as many rows")
        return self


class StoredTiles(Data):
    """Tiles for one device, at most one entry for a shape. `triton`: the version they were measured with, or null."""

    device: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,100}$")]
    triton: Annotated[str, Field(pattern=r"^[0-9A-Za-z.+]{1,50}$")] | None
    entries: Annotated[tuple[Entry, ...], Field(max_length=MAX_ENTRIES)]

    @model_validator(mode="after")
    def _once_each(self) -> StoredTiles:
        if len(self.by_key()) != len(self.entries):
            raise ValueError("a shape has two entries")
        return self

    def by_key(self) -> dict[TileKey, Tiles]:
        """The tiles by their keys."""
        return {entry.key: entry.tiles for entry in self.entries}


@cache
def shipped(device: str) -> Mapping[TileKey, Tiles]:
    """The tiles that moec ships for a device of this name; empty for most."""
    if device not in SHIPPED:
        return {}
    text = (Path(__file__).parent / "tuned" / f"{device}.json").read_bytes()
    return StoredTiles.model_validate_json(text).by_key()


@dataclass(frozen=True, slots=True)
class Choice:
    """Tiles, and their source: "tuned" (from the plan), "shipped" or "rule"."""

    tiles: Tiles
    source: Literal["tuned", "shipped", "rule"]


def choose(
    dtype: str,
    rows: int,
    experts: int,
    widths: tuple[int, int],
    gated: bool,
    *,
    device: str,
    family: str,
    tuned: Mapping[TileKey, Tiles],
) -> Choice:
    """The tiles of a product, on a device of this name and family: tuned, else shipped, else by the rule.

    Both the listing of a plan's kernels and the operators choose here.
    """
    key = key_of(dtype, rows, experts, widths, gated)
    found = tuned.get(key)
    if found is not None:
        return Choice(found, "tuned")
    known = shipped(device)
    found = known.get(key) or known.get(replace(key, experts=None))
    if found is not None:
        return Choice(found, "shipped")
    return Choice(tiles_for(dtype, rows, experts, widths, family), "rule")
