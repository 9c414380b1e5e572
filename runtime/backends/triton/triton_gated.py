"""Gated activations of dense feed-forwards by rendered kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.codegen.kernels.shapes import GatedShape
from moec.passes.ir.activations import PARAMETERS
from moec.runtime.backends.triton.triton_launch import Kernels, dtype_name, kernels_of


def gated(x: Tensor, activation: str, *parameters: float | None) -> Tensor:
    out = x.new_empty((*x.shape[:-2], x.shape[-1]))
    if out.numel():
        kernels = _kernels(x, activation, *parameters)
        kernels.launch("gated", _grid(kernels, out), x.contiguous(), out)
    return out


def gated_backward(grad: Tensor, x: Tensor, activation: str, *parameters: float | None) -> Tensor:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if grad.numel():
        kernels = _kernels(x, activation, *parameters)
        kernels.launch("gated_backward", _grid(kernels, grad), grad.contiguous(), x.contiguous(), grad_x)
    return grad_x


def _kernels(x: Tensor, activation: str, *parameters: float | None) -> Kernels:
    numbers = dict(zip(PARAMETERS, parameters, strict=False))
    return kernels_of(GatedShape(hidden=x.shape[-1], activation=activation, dtype=dtype_name(x), **numbers), x)


def _grid(kernels: Kernels, out: Tensor) -> tuple[int, int]:
    return out.numel() // out.shape[-1], *kernels.blocks(out.shape[-1])
