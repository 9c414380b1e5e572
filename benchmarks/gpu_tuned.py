"""From measured rows of part b to the ways that moec ships for that device: the fastest of what was measured."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_rows import Row

from moec.codegen.kernels.stored_tiles import FOLDER, Entry, Measured, StoredTiles, TileKey, key_of
from moec.codegen.kernels.tiles import KERNELS, ROW_KERNELS, Kernel, Tile, Way, Ways, parse_way

NOISE = 0.02
"""A way must be faster than the default by more than this fraction of its time."""


@dataclass(slots=True)
class Layer:
    """What was measured of one layer: its rows, each product's default, and milliseconds of each way."""

    rows: int
    usual: dict[Kernel, Way] = field(default_factory=dict)
    times: dict[Kernel, dict[Way, float]] = field(default_factory=lambda: defaultdict(dict))

    def best(self) -> Ways | None:
        """The fastest ways whose tiles can share a table; None if a product's default was not measured."""
        if self.usual.keys() != set(KERNELS):
            return None
        heights = {way.rows for kernel in ROW_KERNELS for way in self.times[kernel] if isinstance(way, Tile)}
        found = (self._at(rows) for rows in sorted(heights))
        return min((ways for ways in found if ways is not None), key=self.total, default=None)

    def total(self, ways: Ways) -> float:
        """Milliseconds of all six products."""
        return sum(self.times[kernel][ways.of(kernel)] for kernel in KERNELS)

    def _at(self, rows: int) -> Ways | None:
        chosen: dict[str, Way] = {}
        for kernel in KERNELS:
            ways = [way for way in self.times[kernel] if kernel not in ROW_KERNELS or _fits(way, rows)]
            if not ways:
                return None
            best, usual = min(ways, key=self.times[kernel].__getitem__), self.usual[kernel]
            close = usual in ways and self.times[kernel][best] >= self.times[kernel][usual] * (1 - NOISE)
            chosen[kernel] = usual if close else best
        return Ways(**chosen)


def _fits(way: Way, rows: int) -> bool:
    return not isinstance(way, Tile) or way.rows == rows


def write(rows: Sequence[Row], folder: Path = FOLDER) -> list[Path]:
    """Writes a file for each device, and returns their paths. Entries of other layers that were measured stay."""
    by_device: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.get("part") == "b" and "ms" in row:
            by_device[row["device"]].append(row)
    return [_write_one(device, of, folder) for device, of in by_device.items()]


def _write_one(device: str, rows: Sequence[Row], folder: Path) -> Path:
    path = folder / f"{device}.json"
    before = StoredTiles.model_validate_json(path.read_bytes()).entries if path.exists() else ()
    entries = {entry.key: entry for entry in before if entry.measured is not None}
    entries |= {entry.key: entry for entry in _entries(layers(rows))}
    stored = StoredTiles(device=device, triton=rows[-1]["triton"], entries=tuple(entries.values()))
    new = path.with_suffix(".new")
    new.write_text(stored.model_dump_json(indent=1) + "\n")
    os.replace(new, path)
    return path


def layers(rows: Sequence[Row]) -> Mapping[TileKey, Layer]:
    """What was measured on one device, by layer."""
    found: dict[TileKey, Layer] = {}
    for row in rows:
        number = row["tokens"] * row["k"]
        key = key_of(row["dtype"], number, row["experts"], (row["dim"], row["hidden"]), row["gated"])
        layer, way = found.setdefault(key, Layer(number)), parse_way(row["way"])
        layer.times[row["kernel"]][way] = row["ms"]
        if row["usual"]:
            layer.usual[row["kernel"]] = way
    return found


def _entries(found: Mapping[TileKey, Layer]) -> Iterator[Entry]:
    for key, layer in found.items():
        best = layer.best()
        if best is None:
            continue
        default = Ways(**layer.usual)
        default_ms, ms = (round(layer.total(ways), 4) for ways in (default, best))
        yield Entry.of(key, best, Measured(rows=layer.rows, default_ms=default_ms, ms=ms))
