"""Gated activations, SwiGLU and GeGLU, and their gradients in plain torch, in blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moec.runtime.backends.torch_blocks import blocks

Weigh = Callable[[slice, Tensor], None]
"""Given a block of rows, and room [rows, F] for a product."""

_OF_GATE: Mapping[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "swiglu": (torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input),
    "geglu": (torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input),
}
"""What each does to the gate, and that function's gradient; both compute in at least float32, and round."""


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
    for block in blocks(out):
        gate, up = x[block].unbind(1)
        own = out[block]
        activate(gate, out=own)
        own.mul_(up)


def gated_backward_into(
    grad_x: Tensor, out: Tensor | None, grad: Tensor, x: Tensor, kind: str, weigh: Weigh | None = None
) -> None:
    """grad_x [N, 2, F], from grad [N, F] and x [N, 2, F].

    The forward's output as well, where `out` [N, F] is there to take it: it costs one product more. `weigh` is called
    with each block of rows before their gradient is used.
    """
    activate, differentiate = _OF_GATE[kind]
    for block in blocks(grad):
        gate, up = x[block].unbind(1)
        grad_gate, grad_up = grad_x[block].unbind(1)
        activate(gate, out=grad_up)
        if out is not None:
            torch.mul(grad_up, up, out=out[block])
        if weigh is not None:
            weigh(block, grad_gate)
        grad_up.mul_(grad[block])
        torch.mul(grad[block], up, out=grad_gate)
        differentiate(grad_gate, gate, grad_input=grad_gate)
