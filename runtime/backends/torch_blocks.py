"""Element-wise work in blocks of rows, so that what lies between two steps of it stays in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

GRAIN = 2**15
"""torch gives each thread at least this many elements of an element-wise operation."""


def blocks(x: Tensor) -> Iterator[slice]:
    """Row ranges of x [N, width]: one grain a thread on CPU, all rows at once elsewhere.

    Blocks four times as large cost five times as much in backward of SwiGLU in bfloat16, two in float32: their
    temporaries are pages that the allocator returns and gets anew. Half as large ones leave a thread idle (measured).
    """
    step = x.shape[0]
    if x.device.type == "cpu":
        step = GRAIN * max(2, torch.get_num_threads()) // max(1, x.shape[1])
    step = max(1, step)
    for start in range(0, x.shape[0], step):
        yield slice(start, start + step)
