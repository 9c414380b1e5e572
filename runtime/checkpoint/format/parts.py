"""A rank's part of a tensor: a chunk of the tensor's grid, which several ranks may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from moec.runtime.checkpoint.format.grid import Box, chunk_box, chunk_number
from moec.runtime.checkpoint.format.reading import Block
from moec.runtime.checkpoint.format.shards import HostTensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
ALIGNMENT = 64
"""Each copy begins at a multiple of this many bytes, so that elements of every dtype are aligned."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class UnevenError(ValueError):
    """A tensor is not an even grid of chunks."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a tensor of global `shape`: the chunk with indices `chunk` of an even grid.

    The grid has `cuts[dim]` chunks along each dim. `replicas` ranks have this chunk; this rank is number `replica` of
    them. `local` has the chunk's elements, in any memory layout and on any device.
    """

    shape: tuple[int, ...]
    cuts: tuple[int, ...]
    chunk: tuple[int, ...]
    replica: int
    replicas: int
    local: Tensor

    @property
    def box(self) -> Box:
        """The elements that the part has."""
        return chunk_box(self.shape, self.cuts, self.chunk)

    @property
    def chunk_number(self) -> int:
        return chunk_number(self.cuts, self.chunk)

    @property
    def dtype(self) -> str:
        """The dtype's name in safetensors."""
        return DTYPE_NAMES[self.local.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.local.element_size()

    def writes_chunk(self, tensor_number: int) -> bool:
        """Whether this rank writes the chunk. The ranks that have a chunk take turns from tensor to tensor."""
        return (tensor_number + self.chunk_number) % self.replicas == self.replica


def part_of(tensor: Tensor, rank: int = 0, world_size: int = 1) -> Part:
    """This rank's part of a DTensor. A plain tensor is one chunk that every rank has.

    Raises `UnevenError` for DTensors with partial sums or chunks of different sizes, and dtypes that safetensors lacks.
    """
    if tensor.dtype not in DTYPE_NAMES:
        raise UnevenError(f"its dtype is {tensor.dtype}")
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Part(shape, (1,) * len(shape), (0,) * len(shape), rank, world_size, tensor.detach())
    cuts, chunk, replica, replicas = [1] * len(shape), [0] * len(shape), 0, 1
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    for axis, (placement, coordinate) in enumerate(zip(tensor.placements, coordinates, strict=True)):
        size = mesh.size(axis)
        if type(placement) is Shard:
            dim = placement.dim % len(shape)
            cuts[dim], chunk[dim] = cuts[dim] * size, chunk[dim] * size + coordinate
        elif type(placement) is Replicate:
            replica, replicas = replica * size + coordinate, replicas * size
        else:
            raise UnevenError(f"its placement on a mesh axis is {placement}")
    if any(dim % cut for dim, cut in zip(shape, cuts, strict=True)):
        raise UnevenError(f"{list(shape)} is cut into {cuts} parts of different sizes")
    return Part(shape, tuple(cuts), tuple(chunk), replica, replicas, tensor.to_local().detach())


def copy_block(block: Block, content: memoryview, dtype: torch.dtype, target: Tensor) -> None:
    """Copies what a reader wants of a block of elements of `dtype` into `target`, its part of the tensor."""
    flat = torch.frombuffer(content, dtype=dtype)
    for copy in block.copies:
        box = flat[copy.first : copy.first + math.prod(copy.shape)].view(copy.shape)
        target[copy.target].copy_(box[copy.source])


def host_copies(tensors: Mapping[str, Tensor]) -> list[HostTensor]:
    """Copies of tensors in host memory, all in one allocation.

    numpy asks for huge pages for it (`MADV_HUGEPAGE`): with 4 kB pages the page faults take longer than the copy.
    """
    starts = [0, *accumulate(_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors.values())]
    whole = torch.from_numpy(np.empty(starts[-1], dtype=np.uint8))
    copies = []
    for start, (name, tensor) in zip(starts, tensors.items(), strict=False):
        part = whole[start : start + tensor.numel() * tensor.element_size()]
        if part.numel():
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        copies.append(HostTensor(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), memoryview(part.numpy().data)))
    return copies


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
