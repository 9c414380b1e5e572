"""The search for one shape's ways: each product is timed alone; the result is kept if the whole layer is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moec.codegen.kernels.plan_kernels import PlanProducts
from moec.codegen.kernels.stored_tiles import Entry, Measured
from moec.codegen.kernels.tiles import KERNELS, ROW_KERNELS, Kernel, Way, Ways
from moec.runtime.tune.tune_layer import TunedLayer
from moec.runtime.tune.tune_trial import Bench, Trial

NOISE = 0.02
"""The tuned layer must be faster than the default one by more than this fraction of its time, or the default stays."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result for one shape. `default_ms` and `best_ms`: a whole layer, forward and backward, of `rows` rows.

    `times` has the milliseconds of each product alone in each way that ran and agreed. `misfits` ways do not fit the
    device, or spill more than the default; `wrong` ways gave other numbers.
    """

    products: PlanProducts
    rows: int
    default: Ways
    default_ms: float
    best: Ways
    best_ms: float
    times: Mapping[tuple[Kernel, Way], float]
    misfits: int
    wrong: int

    @property
    def entry(self) -> Entry:
        """The entry of `tiles.json`."""
        measured = Measured(rows=self.rows, default_ms=round(self.default_ms, 4), ms=round(self.best_ms, 4))
        return Entry.of(self.products.key, self.best, measured)

    def tried(self, kernel: Kernel) -> int:
        """The number of ways of a product that ran and agreed."""
        return sum(1 for measured, _ in self.times if measured == kernel)


def search(products: PlanProducts, bench: Bench, max_tiles: int, report: Say) -> Tuned:
    """Measures each product in the `max_tiles` ways around the default, those of rows at each height of tiles."""
    layer = TunedLayer(products, bench.device)
    trial = Trial(products, layer, bench, max_tiles)
    default = trial.default
    report(f"{products.key}: {layer.rows:,} rows; by default {default}")
    best = _with_fastest_rows(trial, report)
    for kernel in KERNELS:
        if kernel not in ROW_KERNELS:
            best = best.with_way(kernel, trial.fastest(kernel, default, None))
            report(f"  {kernel}: {trial.time(kernel, best):.3f} ms with {best.of(kernel)}")
    # Products were timed alone, and the least of many noisy times is too low: the layer as a whole decides.
    default_ms = best_ms = layer.milliseconds(default)
    if best != default:
        best_ms = layer.milliseconds(best)
    if best_ms >= default_ms * (1 - NOISE):
        best, best_ms = default, default_ms
    times = trial.measured_times()
    return Tuned(products, layer.rows, default, default_ms, best, best_ms, times, trial.misfits, trial.wrong)


def _with_fastest_rows(trial: Trial, report: Say) -> Ways:
    """The ways whose products of rows take the least time in all; their tiles have equal rows."""
    best, best_time = trial.default, sum(trial.time(kernel, trial.default) for kernel in ROW_KERNELS)
    for rows in trial.heights():
        ways = trial.at_height(rows)
        if ways is None:
            continue
        for kernel in ROW_KERNELS:
            ways = ways.with_way(kernel, trial.fastest(kernel, ways, rows))
        milliseconds = sum(trial.time(kernel, ways) for kernel in ROW_KERNELS)
        if milliseconds < best_time:
            best, best_time = ways, milliseconds
        report(f"  {rows} rows a tile: {milliseconds:.3f} ms with {ways}")
    return best
