"""One tile of a grouped product on one multiprocessor: its clocks, and how many blocks of it run side by side."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from moec.codegen.kernels.model_device import DeviceModel
from moec.codegen.kernels.tiles import Kernel, Tile
from moec.passes.ir.value import DTYPE_BYTES


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
class Loop:
    """How a kernel walks over a product: its tile, its buffers, and what it hides behind other tiles' arithmetic.

    `dots` products of columns / dots are made from one tile of rows. `shared_columns` blocks read one tile of columns
    from L2 together (a cluster's multicast); each expert's rows are then padded to as many tiles.
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
    library: bool = False

    @classmethod
    def of(cls, tile: Tile, bulk: bool = False) -> Loop:
        """The loop of a rendered kernel; `bulk`: persistent, with weights read by TMA."""
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
"""Registers of a thread beside the sums: addresses, operands on their way, the epilogue. From kernels compiled for
sm_90 by Triton 3.6 and 3.9; only an estimate for listings that compile nothing."""


def shared_memory(loop: Loop, layer: ExpertLayer) -> int:
    """Bytes of one block: the buffers; a persistent loop keeps its epilogue's tile beside them."""
    buffers = loop.buffers * (loop.rows + loop.columns) * loop.depth * layer.width
    return buffers + (loop.rows * min(loop.columns, 128) * layer.width if loop.persistent else 0)


def registers(kernel: Kernel, loop: Loop, layer: ExpertLayer) -> int:
    """Estimated registers of a thread, in steps of 8 as they are allocated; at most 255."""
    sums = loop.rows * loop.columns * (2 if layer.dtype == "fp64" else 1) / (32 * loop.warps)
    return min(255, 8 * ceil((sums + OVERHEAD[kernel]) / 8))


def blocks_per_sm(kernel: Kernel, loop: Loop, layer: ExpertLayer, device: DeviceModel) -> int:
    """Estimated blocks that fit one multiprocessor at the same time; 0 if not even one does."""
    if loop.library:
        return 1
    shared = shared_memory(loop, layer)
    if shared > device.shared_memory_block:
        return 0
    threads = 32 * loop.warps
    by_registers = device.registers // (8 * ceil(registers(kernel, loop, layer) / 8) * threads)
    by_memory = device.shared_memory // (shared + 1024)
    return max(1, min(by_registers, by_memory, 2048 // threads, 32))


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
        named = {"matrix": self.matrix, "shared memory": self.shared, "L2": self.l2, "latency": self.latency}
        return max(named, key=lambda name: named[name])


def step_of(loop: Loop, layer: ExpertLayer, device: DeviceModel, active: float, blocks: int) -> Step:
    """One step while `active` multiprocessors share L2 and `blocks` blocks share a multiprocessor."""
    flops = 2 * loop.rows * loop.columns * loop.depth
    operands = (loop.rows + loop.columns) * loop.depth * layer.width
    from_l2 = (loop.rows + loop.columns / loop.shared_columns) * loop.depth * layer.width
    return Step(
        matrix=flops / _matrix_rate(loop, layer, device),
        shared=(_operand_reads(loop, layer, device) + operands) / device.shared_width,
        l2=from_l2 / min(device.l2_port, device.l2_bandwidth / device.clock / active),
        latency=device.load_latency / max(1, loop.buffers - 1) / blocks,
    )


def _wide(loop: Loop, layer: ExpertLayer, device: DeviceModel) -> bool:
    """Whether whole groups of 4 warps multiply 64 rows at a time, with both operands in shared memory."""
    half = layer.dtype in ("bf16", "fp16")
    return device.family != "ampere" and half and loop.rows >= 64 and loop.warps % 4 == 0


def _matrix_rate(loop: Loop, layer: ExpertLayer, device: DeviceModel) -> float:
    """Floating-point operations per clock of one multiprocessor."""
    efficiency = device.library_efficiency if loop.library else device.matrix_efficiency
    if not _wide(loop, layer, device):
        efficiency *= device.small_tile_efficiency
    return device.matrix_flops[layer.dtype] * efficiency


def _operand_reads(loop: Loop, layer: ExpertLayer, device: DeviceModel) -> float:
    """Bytes that the matrix units read from shared memory in one step."""
    columns = loop.columns / loop.dots
    if _wide(loop, layer, device):
        # Each instruction multiplies 64 rows and at most 256 columns, 16 deep, and reads both operands.
        groups = loop.warps // 4
        beside = max(1, groups // (loop.rows // 64))
        width = min(256.0, columns / beside)
        instructions = loop.rows / 64 * columns / width * loop.dots * loop.depth / 16
        return instructions * 16 * (64 + width) * layer.width
    # Warps lie as a grid over the tile: each row of warps reads all columns, each column of warps all rows.
    down = max(1, min(loop.warps, loop.rows // 16, round((loop.warps * loop.rows / columns) ** 0.5)))
    across = max(1, loop.warps // down)
    return loop.dots * (loop.rows * across + columns * down) * loop.depth * layer.width


GATHER_CLOCKS = 300
"""Assumed: the loads of a tile's row indices, which its first rows wait for."""

PERSISTENT_CLOCKS = 300
"""Assumed: the next tile's entry of the table; its first loads are under way during the last tile's epilogue."""


LIBRARY_CLOCKS = 1000
"""Assumed: a library's grouped product writes and fences new TMA descriptors whenever the expert changes."""


def prologue(loop: Loop, gathers: bool, device: DeviceModel) -> float:
    """Clocks before a tile's first product: start, addresses, and the first loads' latency."""
    if loop.persistent:
        return PERSISTENT_CLOCKS + (LIBRARY_CLOCKS if loop.library else 0)
    return device.tile_clocks + device.load_latency + (GATHER_CLOCKS if gathers else 0)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Per number of a tile's result (of `up`: per activated one): a lane's operations, numbers read and written."""

    operations: float
    read: float
    written: float


def epilogue_of(kernel: Kernel, layer: ExpertLayer) -> Epilogue:
    """What a rendered kernel does with its sums. Operations are counted in the template's text, roughly."""
    parts = layer.parts
    match kernel:
        case "up":
            return Epilogue(6 + 4 * parts, 0, parts + 1)
        case "down_backward":
            return Epilogue(8 + 4 * parts, parts, parts + 1)
    return Epilogue(4, 0, 1)


def epilogue(kernel: Kernel, loop: Loop, layer: ExpertLayer, device: DeviceModel) -> float:
    """Clocks after a tile's last product: the epilogue's arithmetic, then its reads and writes through L2."""
    if loop.hides_epilogue:
        return 0.0
    each = Epilogue(4, 0, 1) if loop.library else epilogue_of(kernel, layer)
    numbers = loop.rows * loop.columns / (layer.parts if kernel == "up" and not loop.library else 1)
    arithmetic = numbers * each.operations / (device.lanes * device.lane_efficiency)
    traffic = numbers * (each.read + each.written) * layer.width / device.l2_port
    return arithmetic + traffic + (device.load_latency if each.read else 0)
