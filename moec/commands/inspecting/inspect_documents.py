"""The documents of `moec inspect` with `--params`, `--memory` and `--kernels`."""

from __future__ import annotations

from typing import Literal

from moec.commands.console.output import document


@document
class CountedElements:
    """Parameters by number of elements."""

    total: int
    active: int
    """Those that compute one token."""
    per_rank: int
    """On the rank with the most."""


@document
class CountedLayers(CountedElements):
    """One of several equal layers."""

    layers: list[int]
    """The numbers of the equal layers."""
    parts: dict[str, CountedElements]
    """By the part's name: attention, experts, gate."""


@document
class ParametersDocument(CountedElements):
    """The parameters of a file or a plan."""

    name: str
    notation: str
    """Experts, choices per token and shared experts of the mixtures, as `8E-2K-0S`."""
    ranks: int
    outside: dict[str, CountedElements]
    """Of what is in no layer, by its name: embedding, norm, head."""
    layers: list[CountedLayers]


@document
class MemoryDevice:
    """The device of the cluster."""

    name: str
    memory: float
    """Bytes."""


@document
class MemoryMoment:
    """A rank's memory at one event of a training step."""

    event: str
    """`forward of layer 3`."""
    total: float
    """Bytes."""
    bytes: dict[str, float]
    """By what they hold: parameters, activations, gradients."""


@document
class LayersMemory:
    """The memory of one of several equal layers, in bytes."""

    layers: list[int]
    """The numbers of the equal layers."""
    parameters: float
    copies: float
    """Weights in the compute dtype."""
    gradients: float
    optimizer: float
    kept_for_backward: dict[str, float]
    """By what it holds."""


@document
class MemoryDocument:
    """The memory of the rank with the most rows over a training step; of a pipeline, with the highest peak."""

    plan: str
    device: MemoryDevice
    peak: MemoryMoment
    largest_skew: float | None
    """The busiest rank's rows over the mean with which the plan still fits; null where every load fits."""
    moments: list[MemoryMoment]
    layers: list[LayersMemory]


@document
class CompiledKernel:
    """What Triton made of a kernel."""

    registers: int
    """Per thread."""
    spilled: int
    """Bytes per thread."""
    shared: int
    """Bytes of shared memory per program."""
    blocks: int
    """Programs that fit on a multiprocessor at once."""


@document
class KernelBound:
    """The least that a kernel computes and moves."""

    flops: float
    bytes: float


@document
class KernelTime:
    """The predicted time of a kernel."""

    seconds: float | None
    """Null for a tile that does not fit."""
    bound: str
    """What takes longest."""
    parts: dict[str, float | None]
    """Seconds by what takes them."""
    flops: float
    """With those of rows that only fill tiles."""
    useful: float
    """The fraction of the FLOPs that are of rows with a token."""
    bytes: float


@document
class KernelEntry:
    """One kernel of a block."""

    kernel: str
    direction: Literal["forward", "backward"]
    line: str | None
    """Its line in the `.moe` file."""
    way: str | None
    """The tile or library of a grouped product."""
    compiled: CompiledKernel | None
    """Null for a library's product."""
    least: KernelBound | None
    """Null for small kernels."""
    predicted: KernelTime | None
    """Null for a device without a model."""


@document
class DirectionTime:
    """All kernels of a block in one direction, one after the other."""

    seconds: float | None
    flops: float
    """Those of rows with a token: 6 times rows, dim and hidden forward if gated, else 4; twice as many backward."""


@document
class BlockKernels:
    """The kernels of a block."""

    layer: str
    """Its name in the Program, `layer_0`."""
    ways: str | None
    """The ways of the grouped products; null without experts."""
    source: str | None
    """Where they come from: a rule, measured tiles."""
    why: str | None
    rows: int
    """Of all experts on a rank."""
    forward: DirectionTime
    backward: DirectionTime
    kernels: list[KernelEntry]


@document
class KernelsDocument:
    """The kernels of a rank, compiled for the plan's device."""

    plan: str
    device: str
    tokens: int
    """Of a rank's micro-batch."""
    target: str | None
    """`sm_90`; null where plain torch runs everything."""
    model: str | None
    """Where predicted times come from."""
    layers: list[BlockKernels]
