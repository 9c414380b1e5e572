"""Rotary positions in plain torch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def rope(x: Tensor, positions: Tensor | None, theta: float) -> Tensor:
    return _rotate(x, positions, theta, 1)


def rope_backward(grad: Tensor, positions: Tensor | None, theta: float) -> Tensor:
    """The transpose of a rotation is the rotation by the opposite angle."""
    return _rotate(grad, positions, theta, -1)


def _rotate(x: Tensor, positions: Tensor | None, theta: float, direction: int) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = _tables(x.shape[1], x.shape[3], theta, dtype, x.device)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    first, second = x.to(dtype).chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    return out.to(x.dtype)


@lru_cache(maxsize=16)
def _tables(
    length: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position · theta^(-2i / head dim): [length, 1, head dim / 2] each.

    The order of operations is that of Hugging Face's Llama, so that float32 tables are equal bit for bit.
    """
    with torch.inference_mode(False):
        exponents = torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim
        frequencies = 1.0 / theta**exponents
        angles = torch.outer(torch.arange(length, dtype=dtype, device=device), frequencies)[:, None]
        return angles.cos(), angles.sin()
