"""Tensors that persistent products read in blocks, by TMA descriptors, and how many programs they have.

Descriptors are made on the host: those made in a kernel need an allocator that Triton keeps in a context variable,
which autograd's threads do not inherit.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from moec.runtime.backends.triton.triton_launch import ALIGNED

INTERPRETED = 3
"""Multiprocessors of the interpreter: programs that take several tiles each."""


def described(x: Tensor, block: tuple[int, ...]) -> Any:
    """A contiguous tensor as a matrix [R, columns], or as matrices [E, rows, columns], read in blocks of this shape.

    Elements of a block beyond the end of an axis are zero.
    """
    if len(block) == 2:
        shape = [x.shape[0], prod(x.shape[1:])]
    elif block[0] == 1:  # one matrix per expert: the parts of a gated `up` are one below the other
        shape = [x.shape[0], prod(x.shape[1:-1]), x.shape[-1]]
    else:
        shape = [x.shape[0] * x.shape[1], x.shape[2], x.shape[3]]
    return _descriptor(x if x.data_ptr() % ALIGNED == 0 else x.clone(), shape, block)


def described_as(base: Any, block: tuple[int, ...]) -> Any:
    """A descriptor of a mock tensor, for compiling: the kernel is the same for all shapes."""
    return _descriptor(base, [64] * len(block), block)


def _descriptor(base: Any, shape: list[int], block: tuple[int, ...]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, shape, [prod(shape[axis + 1 :]) for axis in range(len(shape))], list(block))


@cache
def programs_at(device: torch.device, resident: int) -> int:
    """The programs that fill a device if `resident` of them fit a multiprocessor."""
    if device.type != "cuda":
        return INTERPRETED * resident
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * resident
