"""Bytes that a grouped product moves between memory and L2: each tensor once, and again the parts that L2 lost."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from moec.codegen.kernels.model.model_device import DeviceModel
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.model.model_tiles import ExpertLayer, Schedule
from moec.codegen.kernels.product_shapes import GROUP
from moec.codegen.kernels.tiles import Kernel

REUSED_SHARE = 0.5
"""Assumed: the part of L2 for data that is read again; the rest holds data that is read once."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of rows and of matrices, read and written."""

    read: float
    written: float

    @property
    def moved(self) -> float:
        """The sum of both."""
        return self.read + self.written


def missed(size: float, device: DeviceModel) -> float:
    """The part of a set of `size` bytes that L2 does not keep until it is read again."""
    return max(0.0, 1 - REUSED_SHARE * device.l2_size / size) if size else 0.0


def gathered(layer: ExpertLayer, load: Load, device: DeviceModel) -> float:
    """Bytes read for all rows of the model's width: once each, or once per token and again where L2 lost the token."""
    rows = load.rows * layer.dim * layer.width
    if not layer.k:
        return rows
    tokens = rows / layer.k
    return tokens + (rows - tokens) * missed(tokens, device)


def row_product_traffic(
    kernel: Kernel, schedule: Schedule, layer: ExpertLayer, load: Load, device: DeviceModel, blocks: int
) -> Traffic:
    """The traffic of a product of rows with each expert's matrix. A library reads one tensor and writes another."""
    hidden, activated, rows = _row_bytes(layer, load)
    if schedule.by_library:
        reads = {"up": rows, "down": activated, "down_backward": rows, "up_backward": hidden}[kernel]
        writes = {"up": hidden, "down": rows, "down_backward": activated, "up_backward": rows}[kernel]
    else:
        inputs, outputs = gathered(layer, load, device), hidden + activated
        reads = {"up": inputs, "down": activated, "down_backward": inputs + hidden, "up_backward": hidden}[kernel]
        writes = {"up": outputs, "down": rows, "down_backward": outputs, "up_backward": rows}[kernel]
    parts = layer.parts if kernel.startswith("up") else 1
    columns = {"up": parts * layer.hidden, "down": layer.dim, "down_backward": layer.hidden, "up_backward": layer.dim}
    depth = {"up": layer.dim, "down": layer.hidden, "down_backward": layer.dim, "up_backward": parts * layer.hidden}
    matrix = parts * layer.hidden * layer.dim * layer.width
    repeated = _visits(load, schedule) * matrix * missed(matrix, device)
    reads += load.used_experts() * matrix + repeated
    reads += _rows_again(schedule, columns[kernel], depth[kernel], layer, load, device, blocks)
    return Traffic(reads, writes)


def weight_product_traffic(
    kernel: Kernel, schedule: Schedule, layer: ExpertLayer, load: Load, device: DeviceModel, blocks: int
) -> Traffic:
    """The traffic of a gradient of weights: a tile of the gradient reads all rows of its expert, in two strips."""
    hidden, activated, rows = _row_bytes(layer, load)
    gathered_rows = rows if schedule.by_library else gathered(layer, load, device)
    is_up = kernel == "up_weights"
    m, n = (layer.parts * layer.hidden, layer.dim) if is_up else (layer.dim, layer.hidden)
    first_reads = (hidden if is_up else activated) + gathered_rows
    # Tiles run along n first: the programs that run together read some strips of m and, usually, all of n.
    column_tiles = ceil(n / schedule.columns)
    parallel_row_tiles = max(1, ceil(device.sms * blocks / column_tiles))
    strips = min(m, parallel_row_tiles * schedule.rows) + min(n, device.sms * blocks * schedule.columns)
    turns = max(1, ceil(m / (parallel_row_tiles * schedule.rows)))
    bytes_of_row_column = load.rows / load.experts * layer.width
    repeated = load.rows * n * layer.width * (turns - 1) * missed(strips * bytes_of_row_column, device)
    matrices = layer.experts * m * n * layer.width
    return Traffic(first_reads + repeated, matrices)


def _row_bytes(layer: ExpertLayer, load: Load) -> tuple[float, float, float]:
    """Bytes of all pre-activations, of all activated rows, and of all rows of the model's width."""
    column_bytes = load.rows * layer.width
    return column_bytes * layer.parts * layer.hidden, column_bytes * layer.hidden, column_bytes * layer.dim


def _visits(load: Load, schedule: Schedule) -> float:
    """The number of times that groups of tiles read an expert's matrix again, over all experts."""
    return (load.tiles(schedule.rows) - load.used_experts()) / GROUP


def _rows_again(
    schedule: Schedule, columns: int, depth: int, layer: ExpertLayer, load: Load, device: DeviceModel, blocks: int
) -> float:
    """Bytes of rows that a group of tiles reads again for its later columns, because L2 lost them meanwhile."""
    parallel_column_tiles = max(1, device.sms * blocks // GROUP)
    turns = max(1.0, ceil(columns / schedule.columns) / parallel_column_tiles)
    strips = (GROUP * schedule.rows + min(columns, parallel_column_tiles * schedule.columns)) * depth * layer.width
    return load.rows * depth * layer.width * (turns - 1) * missed(strips, device)
