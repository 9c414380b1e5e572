"""`cluster { … }` and `device { … }`: what the model runs on."""

import math
from typing import Annotated, Literal

from moec.grammar.spec.base import (
    BlockLabel,
    Bytes,
    BytesPerSecond,
    Doc,
    FlopsPerSecond,
    Node,
    PositiveInt,
    Reference,
    Seconds,
    Word,
    at_least,
    at_most,
    more_than,
)

Share = Annotated[float, more_than(0), at_most(1)]


class Peak(Node):
    """`peak { … }`: dense arithmetic peaks by dtype."""

    word = "peak"
    form = "block"
    fp64: Annotated[FlopsPerSecond | None, Doc("peak in fp64")] = None
    fp32: Annotated[FlopsPerSecond | None, Doc("peak in fp32 (TF32 where that is what runs)")] = None
    fp16: Annotated[FlopsPerSecond | None, Doc("peak in fp16")] = None
    bf16: Annotated[FlopsPerSecond | None, Doc("peak in bf16, dense")] = None
    fp8: Annotated[FlopsPerSecond | None, Doc("peak in fp8, dense")] = None


class DeviceRates(Node):
    """`achieved { … }` of a device: what kernels reach of its peaks. Defaults are typical, not measured on a device."""

    word = "achieved"
    form = "block"
    products: Annotated[Share, Doc("share of the peak that a large product reaches")] = 0.70
    half_rows: Annotated[
        float,
        at_least(0),
        Doc("rows per expert at which an accelerator's grouped product runs at half the speed of a large one"),
    ] = 150.0
    attention: Annotated[Share, Doc("share of the peak that attention's forward reaches")] = 0.50
    attention_backward: Annotated[Share, Doc("share of the peak that attention's backward reaches")] = 0.40
    memory: Annotated[Share, Doc("share of the memory's bandwidth that element-wise kernels reach")] = 0.85
    optimizer: Annotated[
        Bytes,
        Doc(
            "time of an update by AdamW with clipping times `bandwidth`, for each parameter that a rank updates "
            "(default: measured on an H200)"
        ),
    ] = 58.0
    launch: Annotated[Seconds, Doc("time of the host to launch one kernel of an accelerator")] = 5e-6


class LevelRates(Node):
    """`achieved { … }` of a level: what collectives reach of its bandwidth. Defaults are typical, not measured."""

    word = "achieved"
    form = "block"
    ring: Annotated[
        Share, Doc("share of the bandwidth that all-gather, reduce-scatter and all-reduce reach with large messages")
    ] = 0.75
    all_to_all: Annotated[Share, Doc("share of the bandwidth that an all-to-all reaches with large messages")] = 0.70


_DEVICE_RATES, _LEVEL_RATES = DeviceRates(), LevelRates()


class Device(Node):
    """`device "name" { … }`: one accelerator or processor core."""

    word = "device"
    form = "block"
    labelled = True
    name: BlockLabel
    kind: Annotated[Literal["cpu", "cuda", "hip"], Doc("type of the torch device that runs it")]
    memory: Annotated[Bytes, Doc("capacity of the device's memory")]
    bandwidth: Annotated[BytesPerSecond, Doc("bandwidth of the device's memory")]
    peak: Annotated[Peak, Doc("arithmetic peaks")] = Peak()
    achieved: Annotated[DeviceRates | None, Doc("what kernels reach, where that was measured")] = None

    @property
    def rates(self) -> DeviceRates:
        """What kernels reach: as stated, or the defaults."""
        return self.achieved or _DEVICE_RATES


class Level(Node):
    """`level "name" { … }`: a set of equals joined by one network, innermost first."""

    word = "level"
    form = "block"
    labelled = True
    name: BlockLabel
    size: Annotated[
        PositiveInt, Doc("how many units of the level below (for the innermost level: ranks) form one unit")
    ]
    bandwidth: Annotated[BytesPerSecond | None, Doc("bandwidth per device, in one direction")] = None
    latency: Annotated[Seconds | None, Doc("latency of one message")] = None
    achieved: Annotated[LevelRates | None, Doc("what collectives reach, where that was measured")] = None

    @property
    def rates(self) -> LevelRates:
        """What collectives reach: as stated, or the defaults."""
        return self.achieved or _LEVEL_RATES


class Cluster(Node):
    """`cluster "name" { … }`, with `from` and `nodes` applied."""

    word = "cluster"
    form = "block"
    labelled = True
    name: BlockLabel
    device: Annotated[Device, Reference("device"), Doc("the device that every rank is")]
    levels: Annotated[tuple[Level, ...], Doc("levels of the network, the innermost first")]

    @property
    def ranks(self) -> int:
        """Number of ranks: the product of the level sizes."""
        return math.prod(level.size for level in self.levels)

    @property
    def is_calibrated(self) -> bool:
        """Whether the device, and every level of more than one unit, says what is achieved, and of what bandwidth."""
        levels = (level for level in self.levels if level.size > 1)
        return self.device.achieved is not None and all(level.achieved and level.bandwidth for level in levels)


class ClusterText(Node):
    """`cluster "name" { … }` as written: `from` and `nodes` are applied to give the `Cluster`."""

    word = "cluster"
    form = "block"
    labelled = True
    name: BlockLabel
    base: Annotated[str | None, Reference("cluster"), Word("from"), Doc("the cluster to start from")] = None
    nodes: Annotated[PositiveInt | None, Doc("multiplies the outermost level")] = None
    device: Annotated[str | None, Reference("device"), Doc("the device that every rank is")] = None
    levels: Annotated[tuple[Level, ...], Doc("levels of the network, the innermost first")] = ()
