"""One tile of a grouped product on one multiprocessor: its clocks, and the number of blocks that run at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from moec.codegen.kernels.model.model_device import DeviceModel
from moec.codegen.kernels.model.occupancy import blocks_per_sm
from moec.codegen.kernels.tiles import Kernel, Tile
from moec.passes.ir.value import DTYPE_BYTES

HALF = ("bf16", "fp16")
"""The dtypes that matrix units multiply; full precision uses the lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """The experts of a layer on one device. `k` 0: rows are already in the experts' order, nothing is gathered."""

    experts: int
    dim: int
    hidden: int
    gated: bool
    dtype: str
    k: int

    @property
    def parts(self) -> int:
        """2 with a gate and an up projection, else 1."""
        return 2 if self.gated else 1

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The tile and the buffers of a kernel, and whether its epilogue runs during other tiles' arithmetic.

    One tile of rows has `dots` products of columns / dots. `shared_columns` blocks read one tile of columns from L2
    together (a cluster's multicast); each expert's rows are then padded to as many tiles.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    buffers: int
    dots: int = 1
    shared_columns: int = 1
    persistent: bool = False
    hides_epilogue: bool = False
    by_library: bool = False

    @classmethod
    def of(cls, tile: Tile, bulk: bool = False) -> Schedule:
        """The schedule of a rendered kernel; `bulk`: persistent, with weights read by TMA."""
        return cls(
            rows=tile.rows,
            columns=tile.columns,
            depth=tile.depth,
            warps=tile.warps,
            buffers=tile.stages,
            persistent=bulk,
        )


OVERHEAD: dict[Kernel, float] = {
    "up": 105,
    "down": 40,
    "down_backward": 125,
    "down_weights": 60,
    "up_backward": 60,
    "up_weights": 60,
}
"""Registers of a thread beside the sums: addresses, operands in flight, the epilogue. From kernels compiled for
sm_90 by Triton 3.6 and 3.9; only an estimate for listings that compile nothing."""


def shared_memory(schedule: Schedule, layer: ExpertLayer) -> int:
    """Bytes of one block: the buffers; a persistent loop keeps its epilogue's tile beside them."""
    buffers = schedule.buffers * (schedule.rows + schedule.columns) * schedule.depth * layer.width
    return buffers + (schedule.rows * min(schedule.columns, 128) * layer.width if schedule.persistent else 0)


def registers(kernel: Kernel, schedule: Schedule, layer: ExpertLayer) -> int:
    """Estimated registers of a thread, in steps of 8 as they are allocated; at most 255."""
    sums = schedule.rows * schedule.columns * (2 if layer.dtype == "fp64" else 1) / (32 * schedule.warps)
    return min(255, 8 * ceil((sums + OVERHEAD[kernel]) / 8))


def estimated_blocks(kernel: Kernel, schedule: Schedule, layer: ExpertLayer, device: DeviceModel) -> int:
    """Blocks that fit one multiprocessor at a time, by estimated registers and memory; 0 if not even one does."""
    if schedule.by_library:
        return 1
    return blocks_per_sm(
        device.target, registers(kernel, schedule, layer), shared_memory(schedule, layer), schedule.warps
    )


@dataclass(frozen=True, slots=True)
class Step:
    """Clocks of one step of depth by each resource. `latency`: with this many buffers, and blocks side by side."""

    matrix: float
    shared: float
    l2: float
    latency: float

    @property
    def clocks(self) -> float:
        """The slowest resource decides."""
        return max(self.matrix, self.shared, self.l2, self.latency)

    @property
    def bound(self) -> str:
        """The name of the slowest resource."""
        clocks = {"matrix": self.matrix, "shared memory": self.shared, "L2": self.l2, "latency": self.latency}
        return max(clocks, key=lambda name: clocks[name])


def step_of(schedule: Schedule, layer: ExpertLayer, device: DeviceModel, active: float, blocks: int) -> Step:
    """One step while `active` multiprocessors share L2 and `blocks` blocks share a multiprocessor."""
    flops = 2 * schedule.rows * schedule.columns * schedule.depth
    operands = (schedule.rows + schedule.columns) * schedule.depth * layer.width
    from_l2 = (schedule.rows + schedule.columns / schedule.shared_columns) * schedule.depth * layer.width
    return Step(
        matrix=flops / _matrix_rate(schedule, layer, device),
        shared=(_operand_reads(schedule, layer, device) + operands) / device.shared_width,
        l2=from_l2 / min(device.l2_port, device.l2_bandwidth / device.clock / active),
        latency=device.load_latency / max(1, schedule.buffers - 1) / blocks,
    )


def _by_warpgroups(schedule: Schedule, layer: ExpertLayer, device: DeviceModel) -> bool:
    """Whether whole groups of 4 warps multiply 64 rows at a time, with both operands in shared memory."""
    large = schedule.rows >= 64 and schedule.warps % 4 == 0
    return device.target != "sm_80" and layer.dtype in HALF and large


def _matrix_rate(schedule: Schedule, layer: ExpertLayer, device: DeviceModel) -> float:
    """Floating-point operations per clock of one multiprocessor."""
    efficiency = device.library_efficiency if schedule.by_library else device.matrix_efficiency
    if layer.dtype in HALF and not _by_warpgroups(schedule, layer, device):
        efficiency *= device.small_tile_efficiency
    return device.matrix_flops[layer.dtype] * efficiency


def _operand_reads(schedule: Schedule, layer: ExpertLayer, device: DeviceModel) -> float:
    """Bytes that the matrix units read from shared memory in one step."""
    columns = schedule.columns / schedule.dots
    if _by_warpgroups(schedule, layer, device):
        # Each instruction multiplies 64 rows and at most 256 columns, 16 deep, and reads both operands.
        groups = schedule.warps // 4
        groups_per_row_block = max(1, groups // (schedule.rows // 64))
        width = min(256.0, columns / groups_per_row_block)
        instructions = schedule.rows / 64 * columns / width * schedule.dots * schedule.depth / 16
        return instructions * 16 * (64 + width) * layer.width
    # Warps lie as a grid over the tile: each row of warps reads all columns, each column of warps all rows.
    warp_rows = max(1, min(schedule.warps, schedule.rows // 16, round(sqrt(schedule.warps * schedule.rows / columns))))
    warp_columns = max(1, schedule.warps // warp_rows)
    return schedule.dots * (schedule.rows * warp_columns + columns * warp_rows) * schedule.depth * layer.width


GATHER_CLOCKS = 300
"""Assumed: the loads of a tile's row indices, which its first rows wait for."""

PERSISTENT_CLOCKS = 300
"""Assumed: the next tile's entry of the table; its first loads run during the last tile's epilogue."""

LIBRARY_CLOCKS = 1000
"""Assumed: a library's grouped product writes and fences new TMA descriptors whenever the expert changes."""


def prologue(schedule: Schedule, gathers: bool, device: DeviceModel) -> float:
    """Clocks before a tile's first product: start, addresses, and the first loads' latency."""
    if schedule.persistent:
        return PERSISTENT_CLOCKS + (LIBRARY_CLOCKS if schedule.by_library else 0)
    return device.tile_clocks + device.load_latency + (GATHER_CLOCKS if gathers else 0)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Per number of a tile's result (of `up`: per activated one): a lane's operations, numbers read and written."""

    operations: float
    read: float
    written: float


def epilogue_of(kernel: Kernel, layer: ExpertLayer) -> Epilogue:
    """The epilogue of a rendered kernel. Operations are counted in the template's text, roughly."""
    parts = layer.parts
    match kernel:
        case "up":
            return Epilogue(6 + 4 * parts, 0, parts + 1)
        case "down_backward":
            return Epilogue(8 + 4 * parts, parts, parts + 1)
    return Epilogue(4, 0, 1)


def epilogue(kernel: Kernel, schedule: Schedule, layer: ExpertLayer, device: DeviceModel) -> float:
    """Clocks after a tile's last product: the epilogue's arithmetic, then its reads and writes through L2."""
    if schedule.hides_epilogue:
        return 0.0
    work = Epilogue(4, 0, 1) if schedule.by_library else epilogue_of(kernel, layer)
    numbers = schedule.rows * schedule.columns / (layer.parts if kernel == "up" and not schedule.by_library else 1)
    arithmetic = numbers * work.operations / (device.lanes * device.lane_efficiency)
    traffic = numbers * (work.read + work.written) * layer.width / device.l2_port
    return arithmetic + traffic + (device.load_latency if work.read else 0)
