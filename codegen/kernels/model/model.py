"""A model of the grouped products: predicted time, and the resource that bounds it.

A product's time is the larger of two: that of its tiles on the multiprocessors, in waves, and that of its traffic with
memory. A tile takes a prologue, steps of depth and an epilogue. A step takes as long as the slowest of matrix units,
shared memory, L2 and latency; only other blocks of the same multiprocessor hide a prologue or an epilogue. A
`DeviceModel` has the constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

from moec.codegen.kernels.model.model_device import DeviceModel
from moec.codegen.kernels.model.model_libraries import passes_around, schedule_of_library
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.model.model_memory import row_product_traffic, weight_product_traffic
from moec.codegen.kernels.model.model_tiles import (
    ExpertLayer,
    Schedule,
    epilogue,
    estimated_blocks,
    prologue,
    step_of,
)
from moec.codegen.kernels.tile_rule import extents
from moec.codegen.kernels.tiles import GATHERING_KERNELS, ROW_KERNELS, Kernel, Tile, Way

EMPTY_CLOCKS = 500
"""Assumed: a program that finds no tile in the table and returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One kernel's time. `parts` add up to `seconds`; `flops` are the useful ones, `multiplied` includes padding.

    `seconds` is infinite, and `bound` "does not fit", where the tile's buffers exceed a block's shared memory.
    """

    seconds: float
    bound: str
    parts: Mapping[str, float]
    flops: float
    multiplied: float
    moved: float
    blocks: int
    launches: int = 1

    @property
    def padding_efficiency(self) -> float:
        """The useful part of the multiplications: rows, columns and depth are rounded up to tiles."""
        return self.flops / self.multiplied if self.multiplied else 1.0

    @property
    def tflops(self) -> float:
        """Useful 10¹² floating-point operations per second."""
        return self.flops / self.seconds / 1e12


def predict(
    kernel: Kernel,
    way: Way,
    layer: ExpertLayer,
    load: Load,
    device: DeviceModel,
    *,
    bulk: bool = False,
    blocks: int | None = None,
    rows_at_hand: bool = False,
) -> Prediction:
    """The time of one product of a layer's experts.

    `bulk`: products of rows in their persistent form with TMA. `blocks`: blocks per multiprocessor, where the compiled
    kernel says so. A library's product includes the passes around it; `rows_at_hand`: an earlier product left the
    gathered rows.
    """
    if isinstance(way, Tile):
        schedule = Schedule.of(way, bulk and kernel in ROW_KERNELS)
        return predict_schedule(kernel, schedule, layer, load, device, blocks=blocks)
    product = predict_schedule(kernel, schedule_of_library(kernel, layer, load), layer, load, device)
    seconds, moved, launches = passes_around(kernel, layer, load, device, rows_at_hand)
    total = product.seconds + seconds
    return Prediction(
        seconds=total,
        bound="passes" if seconds > product.seconds else product.bound,
        parts={**product.parts, "passes": seconds},
        flops=product.flops,
        multiplied=product.multiplied,
        moved=product.moved + moved,
        blocks=product.blocks,
        launches=1 + launches,
    )


def predict_schedule(
    kernel: Kernel,
    schedule: Schedule,
    layer: ExpertLayer,
    load: Load,
    device: DeviceModel,
    *,
    blocks: int | None = None,
) -> Prediction:
    """The time of a product that one kernel computes by this schedule."""
    blocks = estimated_blocks(kernel, schedule, layer, device) if blocks is None else blocks
    grid = _grid(kernel, schedule, layer, load)
    traffic = (weight_product_traffic if grid.is_of_weights else row_product_traffic)(
        kernel, schedule, layer, load, device, max(1, blocks)
    )
    if not blocks:
        return Prediction(
            seconds=inf,
            bound="does not fit",
            parts={},
            flops=grid.flops,
            multiplied=grid.multiplied,
            moved=traffic.moved,
            blocks=0,
        )
    times = _on_sms(kernel, schedule, layer, device, grid, blocks)
    memory = traffic.moved / device.memory_bandwidth
    on_sms = sum(times.parts.values())
    parts = dict(times.parts) | {"memory": max(0.0, memory - on_sms), "launch": device.launch}
    return Prediction(
        seconds=max(on_sms, memory) + device.launch,
        bound=_bound(times, memory, device.launch),
        parts=parts,
        flops=grid.flops,
        multiplied=grid.multiplied,
        moved=traffic.moved,
        blocks=blocks,
    )


def predict_pass(moved: float, device: DeviceModel) -> Prediction:
    """The time of a kernel that computes no product and moves `moved` bytes."""
    seconds = moved / (device.memory_bandwidth * device.row_efficiency)
    return Prediction(
        seconds=seconds + device.launch,
        bound="memory" if seconds > device.launch else "launch",
        parts={"memory": seconds, "launch": device.launch},
        flops=0,
        multiplied=0,
        moved=moved,
        blocks=0,
    )


@dataclass(frozen=True, slots=True)
class _Grid:
    """Expected tiles of a launch, the steps of all tiles and of the longest one, and programs without a tile."""

    is_of_weights: bool
    tiles: float
    steps: float
    longest: float
    empty: float
    flops: float
    multiplied: float


def _grid(kernel: Kernel, schedule: Schedule, layer: ExpertLayer, load: Load) -> _Grid:
    rows, columns, depth = extents(kernel, (layer.dim, layer.hidden), layer.gated)
    per_step = 2 * schedule.rows * schedule.columns * schedule.depth
    column_tiles = ceil(columns / schedule.columns)
    if depth is None:
        assert rows is not None
        tiles_per_expert = ceil(rows / schedule.rows) * column_tiles
        steps = tiles_per_expert * load.tiles(schedule.depth)
        longest = ceil(load.most_rows / schedule.depth)
        flops = 2 * load.rows * rows * columns
        return _Grid(True, tiles_per_expert * layer.experts, steps, longest, 0, flops, steps * per_step)
    # A cluster takes as many tiles of one expert's rows as it has blocks.
    row_tiles = load.tiles(schedule.rows * schedule.shared_columns) * schedule.shared_columns
    depth_steps, tiles = ceil(depth / schedule.depth), row_tiles * column_tiles
    empty = 0.0 if schedule.persistent else max(0.0, ceil(load.rows / schedule.rows) + load.experts - row_tiles)
    steps, flops = tiles * depth_steps, 2 * load.rows * columns * depth
    return _Grid(False, tiles, steps, depth_steps, empty * column_tiles, flops, steps * per_step)


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds on the multiprocessors by part, and the resource that bounds a step of depth."""

    parts: Mapping[str, float]
    step_bound: str


def _on_sms(
    kernel: Kernel, schedule: Schedule, layer: ExpertLayer, device: DeviceModel, grid: _Grid, blocks: int
) -> _Times:
    if not grid.tiles:
        return _Times({"empty": grid.empty * EMPTY_CLOCKS / (device.sms * blocks) / device.clock}, "launch")
    tiles_per_sm = grid.tiles / device.sms
    resident = min(blocks, ceil(tiles_per_sm))
    step = step_of(schedule, layer, device, min(device.sms, grid.tiles), resident)
    gathers = layer.k > 0 and kernel in GATHERING_KERNELS and not schedule.by_library
    prologue_clocks = prologue(schedule, gathers, device) / resident
    epilogue_clocks = epilogue(kernel, schedule, layer, device) / resident
    mean = grid.steps / grid.tiles * step.clocks + prologue_clocks + epilogue_clocks
    idle = max(
        (ceil(tiles_per_sm) - tiles_per_sm) * mean,
        grid.longest * step.clocks + prologue_clocks + epilogue_clocks - tiles_per_sm * mean,
        0.0,
    )
    useful_share = grid.flops / grid.multiplied if grid.multiplied else 1.0
    steps = grid.steps / device.sms
    clocks = {
        "padding": steps * step.matrix * (1 - useful_share),
        step.bound: steps * (step.clocks - step.matrix),
        "prologue": tiles_per_sm * prologue_clocks,
        "epilogue": tiles_per_sm * epilogue_clocks,
        "waves": idle,
        "empty": grid.empty * EMPTY_CLOCKS / (device.sms * blocks),
    }
    clocks["matrix"] = clocks.get("matrix", 0.0) + steps * step.matrix * useful_share
    return _Times({name: clock / device.clock for name, clock in clocks.items()}, step.bound)


def _bound(times: _Times, memory: float, launch: float) -> str:
    """What bounds a kernel: memory, the launch, or the largest part on the multiprocessors."""
    on_sms = sum(times.parts.values())
    if launch > max(on_sms, memory):
        return "launch"
    if memory > on_sms:
        return "memory"
    steps = times.parts.get("matrix", 0.0)
    if times.step_bound != "matrix":
        steps += times.parts.get(times.step_bound, 0.0)
    parts = {name: times.parts.get(name, 0.0) for name in ("padding", "prologue", "epilogue", "waves", "empty")}
    largest = max(parts, key=lambda name: parts[name])
    return largest if parts[largest] > steps else times.step_bound
