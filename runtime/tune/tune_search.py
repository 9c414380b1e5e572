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
from moec.codegen.kernels.tiles import KERNELS, ROW_KERNELS, Kernel, Tile, Ways
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
    """The result for one shape: milliseconds over `rows` rows, and the number of ways that ran.

    `misfits` do not fit the device, or spill more than the default; `wrong` ways gave other numbers.
    """

    products: PlanProducts
    rows: int
    default: Ways
    default_ms: float
    best: Ways
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
    """Measures, for each height of tiles and each product, the `most` tiles around the default."""
    trial = _Trial(products, bench, most)
    layer, default = trial.layer, trial.default
    report(f"{products.key}: {layer.rows:,} rows; by default {default}")
    best = default
    for rows in trial.heights():
        tuned = trial.best_of(rows)
        if tuned is not None and trial.time(tuned) < trial.time(best):
            best = tuned
        report(f"  up to {rows} rows a tile: {trial.time(best):.3f} ms with {best}")
    # The minimum of many noisy times is biased low, so both are measured again.
    default_ms = best_ms = layer.milliseconds(default)
    if best != default:
        best_ms = layer.milliseconds(best)
    if best_ms >= default_ms * (1 - NOISE):
        best, best_ms = default, default_ms
    return Tuned(products, layer.rows, default, default_ms, best, best_ms, len(trial.times), trial.misfits, trial.wrong)


class _Trial:
    """For one height of tiles: the best tile of each product, one after the other."""

    def __init__(self, products: PlanProducts, bench: Bench, most: int) -> None:
        self.products, self.bench, self.most = products, bench, most
        self.layer = TunedLayer(products, bench.device)
        self.default = self.layer.default()
        self.exact = self.layer.results(self.default)
        self.times: dict[Ways, float] = {}
        self.misfits = self.wrong = 0

    def heights(self) -> tuple[int, ...]:
        """Rows of a tile of row products to try, the default's first."""
        tile = next((tile for tile in map(self.default.tile, ROW_KERNELS) if tile is not None), None)
        return () if tile is None else heights(tile)

    def best_of(self, rows: int) -> Ways | None:
        """The fastest ways of this height; of ties, those nearest to the default. None if no tile fits."""
        fitting: dict[Kernel, list[Tile]] = {}
        for kernel in KERNELS:
            tile = self.default.tile(kernel)
            if tile is not None:
                fitting[kernel] = self._fitting(kernel, tile, rows if kernel in ROW_KERNELS else None)
        if not all(fitting.values()):
            return None
        best = replace(self.default, **{kernel: tiles[0] for kernel, tiles in fitting.items()})
        for kernel, tiles in fitting.items():
            best = min((best.with_way(kernel, tile) for tile in tiles), key=self.time)
        return best

    def time(self, ways: Ways) -> float:
        """Milliseconds; infinite for ways that do not run or give other numbers than the default."""
        if ways not in self.times:
            self.times[ways] = self._measured(ways)
        return self.times[ways]

    def _measured(self, ways: Ways) -> float:
        from triton.errors import TritonError

        try:
            results = self.layer.results(ways)
        except TritonError:  # a launch needs more shared memory than the device has
            self.misfits += 1
            return math.inf
        if not agree(results, self.exact, self.products.key.dtype):
            self.wrong += 1
            return math.inf
        del results
        return self.layer.milliseconds(ways)

    def _fitting(self, kernel: Kernel, default: Tile, rows: int | None) -> list[Tile]:
        shape = self.products.down if kernel.startswith("down") else self.products.up
        near = list(islice(around(kernel, default, rows, self.products.key, self.bench.shared), self.most))
        fitting = [tile for tile in near if tile == default or fits(shape, kernel, default, tile, self.bench)]
        self.misfits += len(near) - len(fitting)
        return fitting


def fits(shape: ProductShape, kernel: Kernel, default: Tile, tile: Tile, bench: Bench) -> bool:
    """Whether a kernel of `tile` compiles for the device, fits it, and spills no more than with the default tile."""
    if bench.target is None:
        return True
    usage, allowed = (
        _spilled_and_shared(shape.with_tile(kernel, one), kernel, bench.target) for one in (tile, default)
    )
    if usage is None or allowed is None:
        return allowed is None
    return usage[0] <= allowed[0] and usage[1] <= bench.shared


@cache
def _spilled_and_shared(shape: ProductShape, kernel: Kernel, target: str) -> tuple[int, int] | None:
    """Bytes that a shape's kernel spills, and the shared memory that it takes; None if it does not compile."""
    from triton.errors import TritonError

    from moec.runtime.backends.triton.triton_compile import compile_kernels

    try:
        (made,) = compile_kernels(shape, target, (kernel,))
    except (TritonError, RuntimeError):  # the compiler's passes raise RuntimeError
        return None
    return made.spilled, made.shared
