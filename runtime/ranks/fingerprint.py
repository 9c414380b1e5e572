"""A hash of tensors, by which ranks compare them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""The integer dtype that views the bits of elements, by their bytes; elements of 16 bytes are viewed as two."""
_GOLDEN, _MIX = -7046029254386353131, -4658895280553007687
"""Odd constants of SplitMix64 (Steele et al. 2014), as signed numbers."""


def fingerprint(tensors: Sequence[Tensor | None], *, values: bool = True) -> int:
    """A hash below 2^62 of shapes and elements.

    With `values` it waits for the device; without, it hashes shapes only.
    """
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        total = (total * 31 + hash((tuple(tensor.shape), tensor.element_size()))) % (1 << 62)
        if values and tensor.numel():
            bits = tensor.detach().contiguous().view(-1).view(INT_DTYPES[tensor.element_size()]).to(torch.int64)
            mixed = (bits + torch.arange(1, bits.numel() + 1, device=bits.device) * _GOLDEN) * _MIX
            mixed = (mixed ^ (mixed >> 29)) * _GOLDEN
            total = (total * 31 + int((mixed ^ (mixed >> 32)).sum())) % (1 << 62)
    return total
