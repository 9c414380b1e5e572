"""Which part of a tensor a rank holds, and how parameters start: the same numbers however they are sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import Placement

from moec.codegen.plan import PlanParameter
from moec.passes.ir import Layout, Mesh, Shard, local_slices
from moec.runtime.job import philox

CHUNK = 1 << 16
"""Elements drawn at a time: their int64 temporaries stay in the cache."""


def dtensor_placements(layout: Layout, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """A parameter's layout in DTensor's words. The axes of `mesh` must cut each dim in the mesh's own order."""
    axes = mesh.mesh_dim_names or ()
    assert layout == layout.in_order_of(axes), f"a DTensor over {axes} cannot be {layout}"
    placed = (layout.get(axis) for axis in axes)
    return tuple(ShardPlacement(p.dim) if isinstance(p, Shard) else Replicate() for p in placed)


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

    Each element is drawn in fp32 by its index in the whole parameter: its value depends on neither the sharding nor the
    number of ranks, and no rank draws what it does not hold. On `meta` nothing is drawn.
    """
    index = local_slices(data.shape, data.layout, mesh, rank)
    local = [part.stop - part.start for part in index]
    if data.init.kind in ("ones", "zeros"):
        return torch.full(local, float(data.init.kind == "ones"), dtype=dtype, device=device)
    shard = torch.empty(local, dtype=dtype, device=device)
    if shard.device.type == "meta":
        return shard
    # Elements that lie side by side in the whole are drawn side by side: `run` of them, from each of `starts`.
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
    """Where each run of a part begins in the whole; the last of `index` is the dim along which runs are cut."""
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
