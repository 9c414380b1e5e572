"""Shapes of parameters and buffers for `repr`: whole, and on this rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def shapes(tensor: Tensor) -> str:
    """`[8, 128, 64] float32`, `[8, 128, 64] float32, here [4, 128, 64]`; communicates nothing, reads no value."""
    text = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            part = tensor.to_local()
        text += f", here {list(part.shape)}" * (part.shape != tensor.shape)
    return text + ", frozen" * (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)


def tensor_lines(module: nn.Module) -> str:
    """A line for each parameter and buffer of the module itself: `weight: [64, 64] float32`."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return "\n".join(f"{name}: {shapes(tensor)}" for name, tensor in tensors if tensor is not None)
