"""`swiglu` with a clamp or an alpha, and its gradient, in plain torch: in at least float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_blocks import blocks

Weigh = Callable[[slice, Tensor], None]
"""Given a block of rows, and room [rows, F] for a product."""


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
        own = hidden[block]
        gate, up = _bounded(own, clamp, alpha)
        grad_gate, grad_up = grad_hidden[block].unbind(1)
        share = _scaled(gate, alpha).sigmoid_()
        active = gate * share
        if activated is not None:
            activated[block] = active * up
        if weigh is not None:
            weigh(block, grad_gate)
        given = grad[block].to(gate.dtype)
        of_up = active.mul_(given)
        slope = _scaled(gate, alpha).mul_(1 - share).add_(1).mul_(share)
        of_gate = slope.mul_(up).mul_(given)
        if clamp is not None:
            of_gate.masked_fill_(own[:, 0] > clamp, 0)
            of_up.masked_fill_(own[:, 1].abs() > clamp, 0)
        grad_gate.copy_(of_gate)
        grad_up.copy_(of_up)


def _bounded(hidden: Tensor, clamp: float | None, alpha: float | None) -> tuple[Tensor, Tensor]:
    """The clamped gate, and the clamped up, plus 1 with an alpha."""
    gate, up = hidden.to(torch.promote_types(hidden.dtype, torch.float32)).unbind(1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate, up if alpha is None else up + 1


def _scaled(gate: Tensor, alpha: float | None) -> Tensor:
    return gate.clone() if alpha is None else gate * alpha
