"""A rank's part of a parameter, and its initial values, which do not depend on the sharding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import Placement

from moec.codegen.plan import PlanParameter
from moec.passes.ir import Layout, Mesh, Shard, State, local_slices
from moec.runtime import philox
from moec.runtime.errors import JobError

CHUNK = 1 << 16
"""Elements drawn at a time: their int64 temporaries stay in the cache."""


def require_executable(parameters: Mapping[str, PlanParameter]) -> None:
    """Raises `JobError` where a gradient or an optimizer state has another layout than its weight: ZeRO 1 and 2.

    Nothing scatters gradients or gathers weights after an update yet.
    """
    for name, data in parameters.items():
        for what, layout in (("gradient", data.gradient), ("optimizer state", data.optimizer_state)):
            if layout != data.layout:
                raise JobError(
                    "MOE0700",
                    f"the {what} of {name} is {layout} and its weight {data.layout}; a later version of moec runs this",
                    "compile the .moe file again with this moec",
                )


def dtensor_placements(layout: Layout, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """A parameter's layout as DTensor placements. Raises `JobError` unless dims are cut in the mesh's order."""
    axes = mesh.mesh_dim_names or ()
    if layout != layout.in_order_of(axes):
        raise JobError(
            "MOE0700",
            f"a parameter lies as {layout} on a mesh of {', '.join(axes)}; a later version of moec runs this",
            "compile the .moe file again with this moec",
        )
    placed = (layout.get(axis) for axis in axes)
    return tuple(ShardPlacement(p.dim) if isinstance(p, Shard) else Replicate() for p in placed)


def initial_state(state: State, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """The initial value of a state, whole: zeros or ones."""
    shape = [dim for dim in state.shape if isinstance(dim, int)]
    return torch.full(shape, float(state.init.kind == "ones"), dtype=dtype, device=device)


def initial_shard(
    name: str,
    data: PlanParameter,
    mesh: Mesh,
    rank: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """`rank`'s part of a new parameter, on `device` (the CPU), in `dtype`.

    Each element is drawn in fp32 from its index in the whole parameter: its value depends on neither the sharding nor
    the number of ranks. A rank draws only its part. On `meta` nothing is drawn.
    """
    index = local_slices(data.shape, data.layout, mesh, rank)
    local = [part.stop - part.start for part in index]
    if data.init.kind in ("ones", "zeros"):
        return torch.full(local, float(data.init.kind == "ones"), dtype=dtype, device=device)
    shard = torch.empty(local, dtype=dtype, device=device)
    if shard.device.type == "meta":
        return shard
    # A part consists of runs, contiguous in the whole parameter: `run` elements from each of `starts`.
    cut = max((dim for dim, part in enumerate(index) if part.stop - part.start < data.shape[dim]), default=0)
    run = math.prod(local[cut:])
    runs, key = shard.view(-1, run), philox.key_of(seed, name)
    starts = _starts(index[: cut + 1], data.shape, shard.device)
    together = max(1, CHUNK // run)
    for row in range(0, len(runs), together):
        for column in range(0, run, CHUNK):
            length = min(CHUNK, run - column)
            drawn = _drawn(starts[row : row + together] + column, length, key)
            runs[row : row + together, column : column + length] = drawn * data.init.std
    return shard


def _starts(index: Sequence[slice], shape: Sequence[int], device: torch.device) -> Tensor:
    """Where each run of a part begins in the whole parameter; the last slice of `index` cuts the runs."""
    starts = torch.tensor([index[-1].start * math.prod(shape[len(index) :])], device=device)
    for dim in reversed(range(len(index) - 1)):
        steps = torch.arange(index[dim].start, index[dim].stop, device=device) * math.prod(shape[dim + 1 :])
        starts = (steps[:, None] + starts).flatten()
    return starts


def _drawn(starts: Tensor, length: int, key: tuple[int, int]) -> Tensor:
    """`length` numbers from each of `starts` on: `[len(starts), length]`."""
    counters = torch.arange(length // philox.WORDS + 2, device=starts.device)
    drawn = philox.normal((starts // philox.WORDS)[:, None] + counters, key).flatten(1)
    offsets = (starts % philox.WORDS)[:, None] + torch.arange(length, device=starts.device)
    return drawn.gather(1, offsets)
