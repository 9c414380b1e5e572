"""SwiGLU and its gradient in plain torch, in blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 2**18
"""Elements of a block. Smaller ones spend their time starting threads, larger ones fall out of cache (measured)."""


def swiglu(x: Tensor) -> Tensor:
    out = x.new_empty((*x.shape[:-2], x.shape[-1]))
    swiglu_into(out.view(-1, x.shape[-1]), x.reshape(-1, 2, x.shape[-1]))
    return out


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    width = x.shape[-1]
    grad_x = x.new_empty(x.shape)
    swiglu_backward_into(grad_x.view(-1, 2, width), None, grad.reshape(-1, width), x.reshape(-1, 2, width))
    return grad_x


def swiglu_into(out: Tensor, x: Tensor) -> None:
    """out [N, F] = silu(x[:, 0]) · x[:, 1], for x [N, 2, F]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    for block in _blocks(out):
        gate, up = x[block].to(dtype).unbind(1)
        torch.mul(F.silu(gate), up, out=out[block])


def swiglu_backward_into(grad_x: Tensor, out: Tensor | None, grad: Tensor, x: Tensor) -> None:
    """grad_x [N, 2, F], from grad [N, F] and x [N, 2, F].

    The forward's output as well, where `out` [N, F] is there to take it: it costs one product more.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    for block in _blocks(grad):
        gate, up = x[block].to(dtype).unbind(1)
        grad_out = grad[block].to(dtype)
        silu = F.silu(gate)
        if out is not None:
            torch.mul(silu, up, out=out[block])
        exact = grad_x[block] if grad_x.dtype == dtype else torch.empty_like(x[block], dtype=dtype)
        torch.mul(silu, grad_out, out=exact[:, 1])
        torch.ops.aten.silu_backward.grad_input(grad_out * up, gate, grad_input=exact[:, 0])
        if exact.dtype != grad_x.dtype:
            grad_x[block] = exact


def _blocks(x: Tensor) -> Iterator[slice]:
    """Row ranges of x [N, F]."""
    step = max(1, BLOCK // max(1, x.shape[1]))
    for start in range(0, x.shape[0], step):
        yield slice(start, start + step)
