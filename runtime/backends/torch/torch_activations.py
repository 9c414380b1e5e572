"""Activations and their gradients in plain torch; gated ones in blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moec.passes.ir.activations import ACTIVATIONS
from moec.runtime.backends.torch.torch_blocks import blocks
from moec.runtime.backends.torch.torch_bounded import Weigh, activate_bounded, activate_bounded_backward


def _relu(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.clamp_min(x, 0, out=out)


def _relu_backward(grad: Tensor, x: Tensor, *, grad_input: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.threshold_backward.grad_input(grad, x, 0, grad_input=grad_input)
    return result


def _relu2(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.clamp_min(x, 0, out=out).square_()


def _relu2_backward(grad: Tensor, x: Tensor, *, grad_input: Tensor) -> Tensor:
    positive = torch.clamp_min(x, 0, out=None if grad_input is grad else grad_input)
    return torch.mul(positive, grad, out=grad_input).mul_(2)


def _identity(x: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(x)


def _identity_backward(grad: Tensor, x: Tensor, *, grad_input: Tensor) -> Tensor:
    return grad_input.copy_(grad)


FUNCTIONS: Mapping[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": (torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input),
    "gelu": (torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input),
    "relu": (_relu, _relu_backward),
    "relu2": (_relu2, _relu2_backward),
    "identity": (_identity, _identity_backward),
}
"""`function(x, out=…)` and `gradient(grad, x, grad_input=…)` of each `Function` of `passes/ir/activations.py`.

Both compute in at least float32 and round once. `grad_input` may be `grad`.
"""


def activate(out: Tensor, hidden: Tensor, activation: str, *parameters: float | None) -> None:
    """out [N, F], for hidden [N, G, F]; `parameters` as in `kind_of`."""
    if any(parameter is not None for parameter in parameters):
        activate_bounded(out, hidden, *parameters)
        return
    kind = ACTIVATIONS[activation]
    function, _ = FUNCTIONS[kind.function.name]
    if not kind.gated:
        function(hidden[:, 0], out=out)
        return
    for block in blocks(out):
        gate, up = hidden[block].unbind(1)
        activated = out[block]
        function(gate, out=activated)
        activated.mul_(up)


def activate_backward(
    grad_hidden: Tensor,
    activated: Tensor | None,
    grad: Tensor,
    hidden: Tensor,
    activation: str,
    *parameters: float | None,
    weigh: Weigh | None = None,
) -> None:
    """grad_hidden [N, G, F], from grad [N, F] and hidden [N, G, F].

    `activated` [N, F], if given, receives the forward's output: recomputing it is cheaper than saving it. `weigh` is
    called with each block of rows after they are activated and before their gradient is used; it needs `activated`.
    """
    if any(parameter is not None for parameter in parameters):
        activate_bounded_backward(grad_hidden, activated, grad, hidden, *parameters, weigh=weigh)
        return
    kind = ACTIVATIONS[activation]
    function, gradient = FUNCTIONS[kind.function.name]
    if not kind.gated:
        x, grad_x = hidden[:, 0], grad_hidden[:, 0]
        if activated is not None:
            function(x, out=activated)
        if weigh is not None:
            weigh(slice(0, grad.shape[0]), grad_x)
        gradient(grad, x, grad_input=grad_x)
        return
    for block in blocks(grad):
        gate, up = hidden[block].unbind(1)
        grad_gate, grad_up = grad_hidden[block].unbind(1)
        function(gate, out=grad_up)
        if activated is not None:
            torch.mul(grad_up, up, out=activated[block])
        if weigh is not None:
            weigh(block, grad_gate)
        grad_up.mul_(grad[block])
        torch.mul(grad[block], up, out=grad_gate)
        gradient(grad_gate, gate, grad_input=grad_gate)


def gated(x: Tensor, activation: str, *parameters: float | None) -> Tensor:
    width = x.shape[-1]
    out = x.new_empty((*x.shape[:-2], width))
    activate(out.view(-1, width), x.reshape(-1, 2, width), activation, *parameters)
    return out


def gated_backward(grad: Tensor, x: Tensor, activation: str, *parameters: float | None) -> Tensor:
    width = x.shape[-1]
    grad_x = x.new_empty(x.shape)
    rows = grad.reshape(-1, width), x.reshape(-1, 2, width)
    activate_backward(grad_x.view(-1, 2, width), None, *rows, activation, *parameters)
    return grad_x
