"""Tiles stored by device and shape: those that moec ships, and those of a plan, which `moec tune` measured.

Shipped tiles (`tuned/*.json`) are for well-known layers; none are shipped yet. A plan's tiles (`tiles.json` in its
folder) take precedence. For other shapes the rule of `tile_rule.py` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from moec.codegen.data import Data
from moec.codegen.kernels.library_rule import with_libraries
from moec.codegen.kernels.model.model_device import FOLDER
from moec.codegen.kernels.tile_rule import load_of, reason, tiles_for
from moec.codegen.kernels.tiles import KERNELS, WAY_PATTERN, Ways, parse_way

MAX_ENTRIES = 10_000

Extent = Annotated[int, Field(ge=1, le=2**31)]
WayText = Annotated[str, Field(pattern=WAY_PATTERN)]
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
    """The way of each product of one shape; `measured` is null if the choice was not measured."""

    dtype: Annotated[str, Field(pattern=r"^(bf16|fp16|fp32|fp64)$")]
    load: Annotated[str, Field(pattern=r"^(few|some|many)$")]
    experts: Extent | None
    dim: Extent
    hidden: Extent
    gated: bool
    up: WayText
    down: WayText
    down_backward: WayText
    down_weights: WayText
    up_backward: WayText
    up_weights: WayText
    measured: Measured | None

    @property
    def key(self) -> TileKey:
        """The entry's key."""
        return TileKey(self.dtype, self.load, self.experts, self.dim, self.hidden, self.gated)

    @property
    def ways(self) -> Ways:
        """The entry's ways, parsed."""
        return self._parsed()

    @classmethod
    def of(cls, key: TileKey, ways: Ways, measured: Measured | None) -> Self:
        """Makes the entry."""
        fields: dict[str, Any] = asdict(key) | {kernel: str(ways.of(kernel)) for kernel in KERNELS}
        return cls(**fields, measured=measured)

    @model_validator(mode="after")
    def _one_table(self) -> Entry:
        self._parsed()  # raises ValueError if the tiles of row products differ in rows
        return self

    def _parsed(self) -> Ways:
        return Ways(*(parse_way(getattr(self, kernel)) for kernel in KERNELS))


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

    def by_key(self) -> dict[TileKey, Ways]:
        """The ways by their keys."""
        return {entry.key: entry.ways for entry in self.entries}


@cache
def shipped(device: str) -> Mapping[TileKey, Ways]:
    """The ways that moec ships for a device of this name; empty for most."""
    file = FOLDER / f"{device}.json"
    return StoredTiles.model_validate_json(file.read_bytes()).by_key() if file.is_file() else {}


@dataclass(frozen=True, slots=True)
class Choice:
    """The ways of products, their source ("tuned": the plan's tiles; "shipped"; "rule"), and a short reason."""

    ways: Ways
    source: Literal["tuned", "shipped", "rule"]
    reason: str


def choose(
    dtype: str,
    rows: int,
    experts: int,
    widths: tuple[int, int],
    gated: bool,
    *,
    device: str,
    family: str,
    tuned: Mapping[TileKey, Ways],
) -> Choice:
    """The ways of a layer's products, on a device of this name and family: tuned, else shipped, else by the rule.

    Operators and the list of a plan's kernels call this one function.
    """
    key = key_of(dtype, rows, experts, widths, gated)
    ways = tuned.get(key)
    if ways is not None:
        return Choice(ways, "tuned", f"tuned on {device} for {key.load} rows per expert")
    shipped_ways = shipped(device)
    ways = shipped_ways.get(key) or shipped_ways.get(replace(key, experts=None))
    if ways is not None:
        return Choice(ways, "shipped", f"shipped for {device} and {key.load} rows per expert")
    tiles = tiles_for(dtype, rows, experts, widths, gated, family)
    ways, library_gains = with_libraries(tiles, dtype, rows, experts, widths, gated, device)
    rule_reason = reason(dtype, rows, experts, family)
    return Choice(ways, "rule", f"{rule_reason}; {library_gains}" if library_gains else rule_reason)
