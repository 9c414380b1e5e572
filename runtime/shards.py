"""Which part of a tensor a rank holds, and how parameters start: the same numbers however they are sharded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moec.codegen.plan import ParameterData
from moec.passes.ir import Layout, Mesh, Shard

INIT_BLOCK = 1 << 16
"""Elements drawn from one seed, at least one index of dim 0: so small that a shard draws little it does not hold."""


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
    name: str, data: ParameterData, mesh: Mesh, rank: int, *, seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`rank`'s part of a new parameter, on the CPU, in `dtype`.

    Drawn in float32 block by block along dim 0, each block from a seed of its own (name, block), so that what a
    parameter starts as depends on neither the sharding nor the number of ranks, and no rank draws the whole.
    """
    rows, *rest = local_slices(data.shape, Layout.parse(data.layout), mesh, rank)
    local = (rows.stop - rows.start, *(s.stop - s.start for s in rest))
    if data.init in ("ones", "zeros"):
        return torch.full(local, float(data.init == "ones"), dtype=dtype)
    shard = torch.empty(local, dtype=dtype)
    per_block = max(1, INIT_BLOCK // math.prod(data.shape[1:]))
    generator = torch.Generator()
    for block in range(rows.start // per_block, -(-rows.stop // per_block)):
        first, last = block * per_block, min((block + 1) * per_block, data.shape[0])
        generator.manual_seed(_block_seed(seed, name, block))
        drawn = torch.empty((last - first, *data.shape[1:])).normal_(0.0, data.std, generator=generator)
        low, high = max(first, rows.start), min(last, rows.stop)
        shard[low - rows.start : high - rows.start] = drawn[(slice(low - first, high - first), *rest)]
    return shard


def _block_seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
