"""`cluster { … }` and `device { … }`: what the model runs on."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moec.grammar.spec.base import BlockLabel, Bytes, BytesPerSecond, FlopsPerSecond, Form, Node, Reference, Seconds


class Peak(Node):
    """`peak { … }`: dense arithmetic peaks by dtype."""

    word: ClassVar[str] = "peak"
    form: ClassVar[Form] = "block"
    fp64: Annotated[FlopsPerSecond | None, Field(gt=0, description="peak in fp64")] = None
    fp32: Annotated[FlopsPerSecond | None, Field(gt=0, description="peak in fp32 (TF32 where that is what runs)")] = (
        None
    )
    fp16: Annotated[FlopsPerSecond | None, Field(gt=0, description="peak in fp16")] = None
    bf16: Annotated[FlopsPerSecond | None, Field(gt=0, description="peak in bf16, dense")] = None
    fp8: Annotated[FlopsPerSecond | None, Field(gt=0, description="peak in fp8, dense")] = None


class Device(Node):
    """`device "name" { … }`: one accelerator or processor core."""

    word: ClassVar[str] = "device"
    form: ClassVar[Form] = "block"
    labelled: ClassVar[bool] = True
    name: BlockLabel
    kind: Annotated[Literal["cpu", "cuda", "hip"], Field(description="which torch device runs it")]
    memory: Annotated[Bytes, Field(gt=0, description="capacity")]
    bandwidth: Annotated[BytesPerSecond, Field(gt=0, description="of its memory")]
    peak: Annotated[Peak, Field(description="arithmetic peaks")] = Peak()


class Level(Node):
    """`level "name" { … }`: a set of equals joined by one network, innermost first."""

    word: ClassVar[str] = "level"
    form: ClassVar[Form] = "block"
    labelled: ClassVar[bool] = True
    name: BlockLabel
    size: Annotated[int, Field(ge=1, description="how many of the level below it joins")]
    bandwidth: Annotated[BytesPerSecond | None, Field(gt=0, description="per device, one direction")] = None
    latency: Annotated[Seconds | None, Field(ge=0, description="of one message")] = None


class Cluster(Node):
    """`cluster "name" { … }`, with `from` and `nodes` applied."""

    word: ClassVar[str] = "cluster"
    form: ClassVar[Form] = "block"
    labelled: ClassVar[bool] = True
    name: BlockLabel
    device: Annotated[Device, Reference("device"), Field(description="what every rank is")]
    levels: Annotated[tuple[Level, ...], Field(description="from the innermost out")]

    @property
    def ranks(self) -> int:
        """Number of ranks: the product of the level sizes."""
        return math.prod(level.size for level in self.levels)


class ClusterText(Node):
    """`cluster "name" { … }` as written: `from` and `nodes` are applied to give the `Cluster`."""

    word: ClassVar[str] = "cluster"
    form: ClassVar[Form] = "block"
    labelled: ClassVar[bool] = True
    name: BlockLabel
    base: Annotated[str | None, Reference("cluster"), Field(alias="from", description="the cluster to start from")] = (
        None
    )
    nodes: Annotated[int | None, Field(ge=1, description="multiplies the outermost level")] = None
    device: Annotated[str | None, Reference("device"), Field(description="what every rank is")] = None
    levels: Annotated[tuple[Level, ...], Field(description="from the innermost out")] = ()
