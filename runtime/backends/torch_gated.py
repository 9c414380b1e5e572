"""Gated activations, SwiGLU and GeGLU, and their gradients in plain torch, in blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.runtime.backends.torch_blocks import blocks

_OF_GATE: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    "swiglu": (F.silu, torch.ops.aten.silu_backward.grad_input),
    "geglu": (F.gelu, torch.ops.aten.gelu_backward.grad_input),
}
"""What each does to the gate, and that function's gradient."""


def swiglu(x: Tensor) -> Tensor:
    return _gated(x, "swiglu")


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return _gated_backward(grad, x, "swiglu")


def geglu(x: Tensor) -> Tensor:
    return _gated(x, "geglu")


def geglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return _gated_backward(grad, x, "geglu")


def _gated(x: Tensor, kind: str) -> Tensor:
    out = x.new_empty((*x.shape[:-2], x.shape[-1]))
    gated_into(out.view(-1, x.shape[-1]), x.reshape(-1, 2, x.shape[-1]), kind)
    return out


def _gated_backward(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    width = x.shape[-1]
    grad_x = x.new_empty(x.shape)
    gated_backward_into(grad_x.view(-1, 2, width), None, grad.reshape(-1, width), x.reshape(-1, 2, width), kind)
    return grad_x


def gated_into(out: Tensor, x: Tensor, kind: str) -> None:
    """out [N, F] = f(x[:, 0]) · x[:, 1], for x [N, 2, F]; f is silu for `swiglu`, the exact gelu for `geglu`."""
    activate, _ = _OF_GATE[kind]
    dtype = torch.promote_types(x.dtype, torch.float32)
    for block in blocks(out):
        gate, up = x[block].to(dtype).unbind(1)
        torch.mul(activate(gate), up, out=out[block])


def gated_backward_into(grad_x: Tensor, out: Tensor | None, grad: Tensor, x: Tensor, kind: str) -> None:
    """grad_x [N, 2, F], from grad [N, F] and x [N, 2, F].

    The forward's output as well, where `out` [N, F] is there to take it: it costs one product more.
    """
    activate, differentiate = _OF_GATE[kind]
    dtype = torch.promote_types(x.dtype, torch.float32)
    for block in blocks(grad):
        gate, up = x[block].to(dtype).unbind(1)
        grad_out = grad[block].to(dtype)
        active = activate(gate)
        if out is not None:
            torch.mul(active, up, out=out[block])
        exact = grad_x[block] if grad_x.dtype == dtype else torch.empty_like(x[block], dtype=dtype)
        torch.mul(active, grad_out, out=exact[:, 1])
        differentiate(grad_out * up, gate, grad_input=exact[:, 0])
        if exact.dtype != grad_x.dtype:
            grad_x[block] = exact
