"""Which part of a tensor a rank holds, and how parameters start: the same numbers however they are sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moec.codegen.plan import ParameterData
from moec.passes.ir import Layout, Mesh, Shard
from moec.runtime import philox

CHUNK = 1 << 16
"""Elements drawn at a time: their int64 temporaries stay in the cache."""


def local_slices(shape: Sequence[int], layout: Layout, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """The index of `rank`'s part of a tensor of global `shape`; dims are cut evenly, by the outermost axis first."""
    bounds = [(0, size) for size in shape]
    for axis, _ in mesh.axes:
        placement = layout.get(axis)
        if isinstance(placement, Shard):
            start, stop = bounds[placement.dim]
            piece = (stop - start) // mesh.size(axis)
            first = start + piece * mesh.coordinate(rank, axis)
            bounds[placement.dim] = (first, first + piece)
    return tuple(slice(start, stop) for start, stop in bounds)


def initial_shard(
    name: str,
    data: ParameterData,
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
    index = local_slices(data.shape, Layout.parse(data.layout), mesh, rank)
    local = [part.stop - part.start for part in index]
    if data.init in ("ones", "zeros"):
        return torch.full(local, float(data.init == "ones"), dtype=dtype, device=device)
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
            runs[row : row + together, column : column + length] = drawn * data.std
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
