"""`swiglu` with a clamp or an alpha, and its gradient, in plain torch: in at least float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_blocks import blocks

Weigh = Callable[[slice, Tensor], None]
"""A function of a block of rows, and a buffer [rows, F] for a product."""


def activate_bounded(out: Tensor, hidden: Tensor, clamp: float | None = None, alpha: float | None = None) -> None:
    """out [N, F], for hidden [N, 2, F]: `g · sigmoid(alpha · g) · (up + 1)` of clamped gate and up (`kind_of`)."""
    for block in blocks(out):
        gate, up = _bounded(hidden[block], clamp, alpha)
        out[block] = gate.mul(_scaled(gate, alpha).sigmoid_()).mul_(up)


def activate_bounded_backward(
    grad_hidden: Tensor,
    activated: Tensor | None,
    grad: Tensor,
    hidden: Tensor,
    clamp: float | None = None,
    alpha: float | None = None,
    *,
    weigh: Weigh | None = None,
) -> None:
    """grad_hidden [N, 2, F], from grad [N, F] and hidden [N, 2, F]; the rest as in `activate_backward`.

    The gradient at a clamp is 1, as in torch; beyond it 0.
    """
    for block in blocks(grad):
        hidden_block = hidden[block]
        gate, up = _bounded(hidden_block, clamp, alpha)
        grad_gate, grad_up = grad_hidden[block].unbind(1)
        sigmoid = _scaled(gate, alpha).sigmoid_()
        active = gate * sigmoid
        if activated is not None:
            activated[block] = active * up
        if weigh is not None:
            weigh(block, grad_gate)
        grad_block = grad[block].to(gate.dtype)
        grad_up_wide = active.mul_(grad_block)
        slope = _scaled(gate, alpha).mul_(1 - sigmoid).add_(1).mul_(sigmoid)
        grad_gate_wide = slope.mul_(up).mul_(grad_block)
        if clamp is not None:
            grad_gate_wide.masked_fill_(hidden_block[:, 0] > clamp, 0)
            grad_up_wide.masked_fill_(hidden_block[:, 1].abs() > clamp, 0)
        grad_gate.copy_(grad_gate_wide)
        grad_up.copy_(grad_up_wide)


def _bounded(hidden: Tensor, clamp: float | None, alpha: float | None) -> tuple[Tensor, Tensor]:
    """The clamped gate, and the clamped up, plus 1 with an alpha."""
    gate, up = hidden.to(torch.promote_types(hidden.dtype, torch.float32)).unbind(1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate, up if alpha is None else up + 1


def _scaled(gate: Tensor, alpha: float | None) -> Tensor:
    return gate.clone() if alpha is None else gate * alpha
