"""The properties of devices in the model of the kernels: rates, sizes and latencies, each with its source.

`model_calibration.py` fits the constants named in `FREE` to measured kernels; every other constant stays as it is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "tuned"
"""The files that moec ships by device: `h200.json`, an H200's tiles for shapes with other tiles than the rule's, and
`h200.model.json`, constants fitted to measured kernels."""

FREE = (
    "matrix_efficiency",
    "library_efficiency",
    "l2_bandwidth",
    "memory_bandwidth",
    "load_latency",
    "tile_clocks",
    "lane_efficiency",
)
"""The constants that measurements of kernels determine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """One device. Bandwidths are bytes per second, `clock` is in Hz, latencies are in clocks, launches in seconds.

    `target` is the compile target. `matrix_flops` are the operations per clock and multiprocessor of the unit that
    multiplies matrices of a dtype. `matrix_efficiency` is the part of it that our kernels reach where nothing else
    bounds them, and `library_efficiency` that of vendors' libraries.
    """

    name: str
    target: str
    sms: int
    clock: float
    matrix_flops: Mapping[str, int]
    matrix_efficiency: float
    library_efficiency: float
    small_tile_efficiency: float
    lanes: int
    lane_efficiency: float
    shared_width: int
    l2_size: int
    l2_bandwidth: float
    l2_port: int
    memory_bandwidth: float
    row_efficiency: float
    load_latency: float
    tile_clocks: float
    launch: float
    host_launch: float
    calibration: str | None = field(default=None, compare=False)

    def with_constants(self, constants: Mapping[str, float], calibration: str) -> DeviceModel:
        """This device with other values of the constants in `FREE`; `calibration` names their source."""
        assert set(constants) <= set(FREE), constants
        changed: dict[str, float] = dict(constants)
        return replace(self, **changed, calibration=calibration)  # type: ignore[arg-type]

    @property
    def origin(self) -> str:
        """Whether measurements determined the free constants."""
        return self.calibration or "not calibrated: constants of data sheets, and assumed ones"


SOURCES: Mapping[str, str] = {
    "sms": "data sheet",
    "clock": "assumed: under the load of matrix products, below the boost clock of the data sheet",
    "matrix_flops": "data sheet's dense peak over multiprocessors and boost clock; fp32 and fp64 without matrix units",
    "matrix_efficiency": "assumed: 0.9 of the libraries' rate",
    "library_efficiency": "H200: 790 TFLOP/s measured (bf16, 8192 cubed, random data); others: same fraction",
    "small_tile_efficiency": "assumed: on Hopper, tiles below 64 rows take `mma.sync`, about 0.6 of `wgmma`",
    "lanes": "data sheet: fp32 lanes of a multiprocessor",
    "lane_efficiency": "assumed: part of the lanes that an epilogue keeps busy",
    "shared_width": "CUDA programming guide: 32 banks of 4 bytes a clock",
    "l2_size": "data sheet",
    "l2_bandwidth": "assumed: dense Triton products of 128 x 256 tiles (85 FLOP per byte) pass 600 TFLOP/s on H100",
    "l2_port": "published micro-benchmarks: at most 64 bytes a clock between L2 and one multiprocessor",
    "memory_bandwidth": "H200: 4.3 TB/s measured for a copy (0.9 of the data sheet); others 0.9 of the data sheet",
    "row_efficiency": "assumed: part of a copy's bandwidth that kernels reach that move rows",
    "load_latency": "assumed: clocks from a load's issue to its use under load",
    "tile_clocks": "assumed: start of a block, its entry of the table, its addresses",
    "launch": "assumed: gap between two kernels of a CUDA graph",
    "host_launch": "measured: about 0.3 ms of Python and launches for a pass of about 14 kernels",
}
"""The source of every constant."""

HOPPER = DeviceModel(
    name="h100",
    target="sm_90",
    sms=132,
    clock=1.6e9,
    matrix_flops={"bf16": 4096, "fp16": 4096, "fp32": 256, "fp64": 128},
    matrix_efficiency=0.82,
    library_efficiency=0.913,
    small_tile_efficiency=0.6,
    lanes=128,
    lane_efficiency=0.5,
    shared_width=128,
    l2_size=50 * 2**20,
    l2_bandwidth=7.0e12,
    l2_port=64,
    memory_bandwidth=3.0e12,
    row_efficiency=0.8,
    load_latency=1000,
    tile_clocks=1200,
    launch=2e-6,
    host_launch=22e-6,
)

DEVICES: Mapping[str, DeviceModel] = {
    "h100": HOPPER,
    "h200": replace(HOPPER, name="h200", l2_size=60 * 2**20, memory_bandwidth=4.3e12),
    "a100": replace(
        HOPPER,
        name="a100",
        target="sm_80",
        sms=108,
        clock=1.3e9,
        matrix_flops={"bf16": 2048, "fp16": 2048, "fp32": 128, "fp64": 64},
        small_tile_efficiency=1.0,
        lanes=64,
        l2_size=40 * 2**20,
        l2_bandwidth=4.5e12,
        memory_bandwidth=1.83e12,
    ),
    "b200": replace(
        HOPPER,
        name="b200",
        target="sm_100",
        sms=148,
        clock=1.7e9,
        matrix_flops={"bf16": 8192, "fp16": 8192, "fp32": 256, "fp64": 128},
        l2_size=126 * 2**20,
        l2_bandwidth=10e12,
        memory_bandwidth=6.9e12,
    ),
}
"""The devices with a model, by their names in the library."""


def complaint(name: str) -> str | None:
    """The reason that a device has no predictions; None if it has."""
    if name in DEVICES:
        return None
    return f"moec cannot predict times for the device {name}: it has timing models for {', '.join(DEVICES)}"
