"""Rotary positions in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Rotation:
    """The attributes of the op `Rope`, whose docstring describes them."""

    theta: float
    start: int
    width: int
    interleaved: bool
    frequencies: tuple[float, ...]
    factor: float


def rope(
    x: Tensor,
    positions: Tensor | None,
    theta: float,
    start: int = 0,
    width: int = 0,
    interleaved: bool = False,
    frequencies: Sequence[float] = (),
    factor: float = 1.0,
) -> Tensor:
    return _rotate(x, positions, _Rotation(theta, start, width, interleaved, tuple(frequencies), factor), 1)


def rope_backward(
    x: Tensor,
    positions: Tensor | None,
    theta: float,
    start: int = 0,
    width: int = 0,
    interleaved: bool = False,
    frequencies: Sequence[float] = (),
    factor: float = 1.0,
) -> Tensor:
    """The transpose of a rotation is the rotation by the opposite angle; x is the gradient."""
    return _rotate(x, positions, _Rotation(theta, start, width, interleaved, tuple(frequencies), factor), -1)


def _rotate(x: Tensor, positions: Tensor | None, rotation: _Rotation, direction: int) -> Tensor:
    width, dtype = rotation.width or x.shape[3] - rotation.start, torch.promote_types(x.dtype, torch.float32)
    cos, sin = rope_tables(x.shape[1], width, rotation.theta, dtype, x.device, rotation.frequencies, rotation.factor)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    return turned(x, cos, sin, rotation.start, rotation.interleaved, direction)


def turned(x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool, direction: int) -> Tensor:
    """Heads `[B, S, H, head dim]` of which pairs of dims from `start` on turn, by the tables of `rope_tables`."""
    width = 2 * cos.shape[-1]
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    for kept_dims in (slice(0, start), slice(start + width, x.shape[3])):
        if kept_dims.start < kept_dims.stop:
            out[..., kept_dims] = x[..., kept_dims]
    turned_dims = slice(start, start + width)
    first, second = _pairs(x[..., turned_dims].to(cos.dtype), interleaved)
    out_first, out_second = _pairs(out[..., turned_dims], interleaved)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    return out.to(x.dtype)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second dim of every pair."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


@lru_cache(maxsize=16)
def rope_tables(
    length: int,
    width: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
    frequencies: tuple[float, ...] = (),
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position · frequency, times `factor`: [length, 1, width / 2] each.

    Frequencies that are not given are theta^(-2i / width). The order of operations is that of Hugging Face's Llama, so
    that float32 tables are equal bit for bit.
    """
    with torch.inference_mode(False):
        if frequencies:
            pair_frequencies = torch.tensor(frequencies, dtype=dtype, device=device)
        else:
            exponents = torch.arange(0, width, 2, dtype=dtype, device=device) / width
            pair_frequencies = 1.0 / theta**exponents
        angles = torch.outer(torch.arange(length, dtype=dtype, device=device), pair_frequencies)[:, None]
        return angles.cos().mul_(factor), angles.sin().mul_(factor)
