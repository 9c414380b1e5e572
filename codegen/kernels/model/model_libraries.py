"""Products by a library: the tile that it uses, and the passes of our kernels around it."""

from __future__ import annotations

from dataclasses import replace

from moec.codegen.kernels.model.model_device import DeviceModel
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.model.model_memory import gathered
from moec.codegen.kernels.model.model_tiles import ExpertLayer, Schedule
from moec.codegen.kernels.tiles import GATHERING_KERNELS, Kernel, Ways

LARGE = Schedule(
    rows=128,
    columns=256,
    depth=64,
    warps=8,
    buffers=4,
    shared_columns=2,
    persistent=True,
    by_library=True,
)
"""CUTLASS's cooperative schedule in a cluster of two blocks: `torch.nn.functional.grouped_mm` on sm_90."""

MEDIUM = Schedule(
    rows=128,
    columns=128,
    depth=64,
    warps=8,
    buffers=6,
    persistent=True,
    hides_epilogue=True,
    by_library=True,
)
SMALL = replace(MEDIUM, rows=64, depth=128, buffers=4)
"""The ping-pong schedules: two tiles alternate, and the epilogue of one runs during the products of the other."""


def schedule_of_library(kernel: Kernel, layer: ExpertLayer, load: Load) -> Schedule:
    """The schedule that PyTorch's dispatch takes on sm_90 (aten/src/ATen/native/cuda/GroupMM.cu, 2026).

    It depends on the mean rows of an expert, or for gradients of weights on the rows of the gradient. quack is assumed
    to use the large tile.
    """
    rows = load.rows / load.experts
    if kernel.endswith("_weights"):
        rows = layer.parts * layer.hidden if kernel == "up_weights" else layer.dim
    return SMALL if rows <= 64 else MEDIUM if rows <= 128 else LARGE


def finds_rows_at_hand(kernel: Kernel, ways: Ways) -> bool:
    """Whether an earlier product left the gathered rows: both products that read the gradient read one copy."""
    return kernel == "down_weights" and isinstance(ways.down_backward, str)


def passes_around(
    kernel: Kernel, layer: ExpertLayer, load: Load, device: DeviceModel, rows_at_hand: bool
) -> tuple[float, float, int]:
    """Seconds, bytes and launches of our passes around a library's product: gathers, and the activation both ways."""
    column_bytes = load.rows * layer.width
    passes: list[float] = []
    if layer.k > 0 and kernel in GATHERING_KERNELS and not rows_at_hand:
        passes.append(gathered(layer, load, device) + column_bytes * layer.dim)
    if kernel == "up":
        passes.append(column_bytes * layer.hidden * (layer.parts + 1))
    if kernel == "down_backward":
        passes.append(column_bytes * layer.hidden * (1 + 2 * layer.parts + 1))
    moved = sum(passes)
    seconds = moved / (device.memory_bandwidth * device.row_efficiency) + len(passes) * device.launch
    return seconds, moved, len(passes)
