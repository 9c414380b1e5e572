"""The search for one shape's tiles: tries tiles around the default, keeps those that fit, agree and are faster."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

import torch

from moec.codegen.kernels.of_plan import PlanProducts
from moec.codegen.kernels.shapes import ProductShape
from moec.codegen.kernels.stored_tiles import Entry, Measured
from moec.codegen.kernels.tile_candidates import around, heights
from moec.codegen.kernels.tiles import Tile, Tiles
from moec.runtime.tune.tune_layer import TunedLayer, agree

NOISE = 0.02
"""A tile must be faster than the default by more than this fraction of its time; else the default stays."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Bench:
    """The device to measure on: `target` is the compile target, `shared` the bytes of shared memory per block."""

    device: torch.device
    name: str
    target: str | None
    shared: int


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result for one shape: milliseconds over `rows` rows, and the number of pairs of tiles that ran.

    `misfits` do not fit the device, or spill more than the default; `wrong` pairs gave other numbers.
    """

    products: PlanProducts
    rows: int
    default: Tiles
    default_ms: float
    best: Tiles
    best_ms: float
    tried: int
    misfits: int
    wrong: int

    @property
    def entry(self) -> Entry:
        """The entry of `tiles.json`."""
        measured = Measured(rows=self.rows, default_ms=round(self.default_ms, 4), ms=round(self.best_ms, 4))
        return Entry.of(self.products.key, self.best, measured)


def search(products: PlanProducts, bench: Bench, most: int, report: Say) -> Tuned:
    """Measures, for each height of tiles, pairs of the `most` tiles around the default."""
    trial = _Trial(products, bench, most)
    layer, default = trial.layer, trial.default
    report(f"{products.key}: {layer.rows:,} rows; by default up {default.up}, down {default.down}")
    best = default
    for rows in heights(default.up):
        tuned = trial.best_of(rows)
        if tuned is not None and trial.time(tuned) < trial.time(best):
            best = tuned
        report(f"  up to {rows} rows a tile: {trial.time(best):.3f} ms with up {best.up}, down {best.down}")
    # The minimum of many noisy times is biased low, so both are measured again.
    default_ms = best_ms = layer.milliseconds(default)
    if best != default:
        best_ms = layer.milliseconds(best)
    if best_ms >= default_ms * (1 - NOISE):
        best, best_ms = default, default_ms
    return Tuned(products, layer.rows, default, default_ms, best, best_ms, len(trial.times), trial.misfits, trial.wrong)


class _Trial:
    """For one height of tiles: the best `up` with the default-like `down`, then the best `down` with that `up`."""

    def __init__(self, products: PlanProducts, bench: Bench, most: int) -> None:
        self.products, self.bench, self.most = products, bench, most
        self.layer = TunedLayer(products, bench.device)
        self.default = self.layer.default()
        self.exact = self.layer.results(self.default)
        self.times: dict[Tiles, float] = {}
        self.misfits = self.wrong = 0

    def best_of(self, rows: int) -> Tiles | None:
        """The fastest pair of this height; of ties, the one nearest to the default. None if no tile fits."""
        sums = 2 if self.products.key.gated else 1
        ups = self._fitting(self.products.up, self.default.up, rows, sums)
        downs = self._fitting(self.products.down, self.default.down, rows, 1)
        if not ups or not downs:
            return None
        up = min(ups, key=lambda tile: self.time(Tiles(tile, downs[0])))
        down = min(downs, key=lambda tile: self.time(Tiles(up, tile)))
        return Tiles(up, down)

    def time(self, tiles: Tiles) -> float:
        """Milliseconds; infinite for tiles that do not run or give other numbers than the default."""
        if tiles not in self.times:
            self.times[tiles] = self._measured(tiles)
        return self.times[tiles]

    def _measured(self, tiles: Tiles) -> float:
        from triton.errors import TritonError

        try:
            results = self.layer.results(tiles)
        except TritonError:  # a launch needs more shared memory than the device has
            self.misfits += 1
            return math.inf
        if not agree(results, self.exact, self.products.key.dtype):
            self.wrong += 1
            return math.inf
        del results
        return self.layer.milliseconds(tiles)

    def _fitting(self, shape: ProductShape, default: Tile, rows: int, sums: int) -> list[Tile]:
        near = list(islice(around(default, rows, self.products.key, sums, self.bench.shared), self.most))
        fitting = [tile for tile in near if tile == default or fits(shape, default, tile, self.bench)]
        self.misfits += len(near) - len(fitting)
        return fitting


def fits(shape: ProductShape, default: Tile, tile: Tile, bench: Bench) -> bool:
    """Whether kernels of `tile` compile for the device, fit it, and spill no more than those of the default tile."""
    if bench.target is None:
        return True
    usage = _spilled_and_shared(replace(shape, tile=tile), bench.target)
    allowed = _spilled_and_shared(replace(shape, tile=default), bench.target)
    if usage is None or allowed is None:
        return allowed is None
    return usage[0] <= allowed[0] and usage[1] <= bench.shared


@cache
def _spilled_and_shared(shape: ProductShape, target: str) -> tuple[int, int] | None:
    """Bytes that a shape's kernels spill in all, and the most shared memory one takes; None if they do not compile."""
    from triton.errors import TritonError

    from moec.runtime.backends.triton.triton_compile import compile_kernels

    try:
        made = list(compile_kernels(shape, target))
    except (TritonError, RuntimeError):  # the compiler's passes raise RuntimeError
        return None
    return sum(kernel.spilled for kernel in made), max(kernel.shared for kernel in made)
