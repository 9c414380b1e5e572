"""Reuses the memory of large CPU tensors, which the C library would return to the kernel when a tensor is freed."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE = 2**22
"""Bytes. From 32 MB on, glibc takes a block from the kernel anew each time, page by page; smaller ones it keeps, but it
gives the end of its heap back where much of that is free, and then takes it again.

Of a layer of 256 tokens, dim 512 and 16 experts of 1,024, whose gradients are 96 MB in float32, that was 31 of 117 ms.
Of one of 2,048 tokens and 64 experts of 256 in bfloat16, the blocks of 4 to 32 MB were 7 % (measured).
glibc's own thresholds can be raised (mallopt), but then blocks that are aligned, as torch's are, are not found again
until several more of their size have been taken (measured, glibc 2.36: 795 MB instead of 283).
"""

SLACK = 1.25
"""A block is reused for tensors up to this many times smaller: the rows that a rank receives vary by step."""


class Pool:
    """Blocks in use, and free blocks to reuse; together never more bytes than the maximum in use at one time."""

    def __init__(self) -> None:
        self.in_use = self.waiting = 0
        """Bytes."""
        self._max_in_use = 0
        self._free: list[Tensor] = []
        """Free blocks, the longest unused first."""
        self._returned: deque[Tensor] = deque()
        """Blocks of freed tensors. A tensor may be freed while a block is taken: `append` is atomic and never waits."""
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor. Its memory is reused once no tensor refers to it."""
        numel = math.prod(shape)
        with self._lock:
            block = self._take(numel * dtype.itemsize)
        buffer = block.numpy().data
        # Torch frees the buffer with the last tensor on its memory.
        weakref.finalize(buffer, self._returned.append, block).atexit = False
        return torch.frombuffer(buffer, dtype=dtype, count=numel).view(*shape)

    def release(self) -> None:
        """Frees the blocks that are not in use."""
        with self._lock:
            self._collect()
            self._free.clear()
            self.waiting, self._max_in_use = 0, self.in_use

    def _take(self, size: int) -> Tensor:
        self._collect()
        fitting = (block for block in self._free if size <= block.numel() <= SLACK * size)
        block = min(fitting, key=Tensor.numel, default=None)
        if block is None:
            while self._free and self.in_use + self.waiting + size > self._max_in_use:
                self.waiting -= self._free.pop(0).numel()
            block = torch.empty(size, dtype=torch.uint8)
        else:
            self._free = [free for free in self._free if free is not block]
            self.waiting -= block.numel()
        self.in_use += block.numel()
        self._max_in_use = max(self._max_in_use, self.in_use)
        return block

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._free.append(block)
            self.in_use -= block.numel()
            self.waiting += block.numel()


POOL = Pool()


def new_empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """`like.new_empty(shape)`, from the pool where it is large and on CPU."""
    if like.device.type != "cpu" or math.prod(shape) * like.dtype.itemsize < LARGE:
        return like.new_empty(shape)
    return POOL.empty(shape, like.dtype)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x [N, D] by indices [R]: [R, D]."""
    return torch.index_select(x, 0, indices, out=new_empty(x, (indices.shape[0], x.shape[1])))
