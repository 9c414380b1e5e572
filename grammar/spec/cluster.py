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
)


class Peak(Node):
    """`peak { … }`: dense arithmetic peaks by dtype."""

    word = "peak"
    form = "block"
    fp64: Annotated[FlopsPerSecond | None, Doc("peak in fp64")] = None
    fp32: Annotated[FlopsPerSecond | None, Doc("peak in fp32 (TF32 where that is what runs)")] = None
    fp16: Annotated[FlopsPerSecond | None, Doc("peak in fp16")] = None
    bf16: Annotated[FlopsPerSecond | None, Doc("peak in bf16, dense")] = None
    fp8: Annotated[FlopsPerSecond | None, Doc("peak in fp8, dense")] = None


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
