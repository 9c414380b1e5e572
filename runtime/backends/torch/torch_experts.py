"""Experts' feed-forwards in plain torch: one matrix product per expert, into slices of preallocated results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moec.passes.ir.row_table import table_length
from moec.runtime.backends.torch.torch_activations import activate, activate_backward
from moec.runtime.backends.torch.torch_bounded import Weigh
from moec.runtime.backends.torch.torch_memory import new_empty
from moec.runtime.backends.torch.torch_row_groups import longest, row_groups
from moec.runtime.backends.torch.torch_threads import each_expert


def expert_mlp(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    clamp: float | None = None,
    alpha: float | None = None,
    ways: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, up, down = rows.contiguous(), up.flatten(1, 2), down.contiguous()
    width = down.shape[2]
    groups = row_groups(counts, rows.shape[0])
    hidden = new_empty(rows, (rows.shape[0], up.shape[1] // width, width))
    out = new_empty(rows, rows.shape)

    def begin() -> Callable[[int], None]:
        activated = rows.new_empty((longest(groups), width))

        def compute(expert: int) -> None:
            group = groups[expert]
            if group.size:
                expert_hidden, expert_activated = hidden[group.span], activated[: group.size]
                project(group.gather(rows), up, up_bias, expert, expert_hidden.flatten(1))
                activate(expert_activated, expert_hidden, activation, clamp, alpha)
                expert_out = group.buffer_for(out)
                project(expert_activated, down, down_bias, expert, expert_out)
                if weights is not None:
                    expert_out.mul_(group.scale(weights, rows.dtype))
                group.scatter(expert_out, out)

        return compute

    each_expert([group.size for group in groups], 3 * rows.shape[1] * width, rows.device, begin)
    return out, hidden, unused_table(rows.shape[0], counts[0])


def expert_mlp_backward(
    grad: Tensor,
    rows: Tensor,
    hidden: Tensor,
    table: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    clamp: float | None = None,
    alpha: float | None = None,
    ways: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad, rows, down = grad.contiguous(), rows.contiguous(), down.contiguous()
    factor, width = up.shape[1:3]
    groups = row_groups(counts, rows.shape[0])
    grad_rows = new_empty(rows, rows.shape)
    grad_up, grad_down, grad_up_bias, grad_down_bias = new_gradients(up, down, up_bias, down_bias)
    grad_weights = rows.new_empty(0) if weights is None else weights.new_empty(weights.shape)
    up, flat_grad_up = up.flatten(1, 2), grad_up.flatten(1, 2)

    def begin() -> Callable[[int], None]:
        # Buffers for one expert, reused by the next, so that they stay in cache.
        activated, grad_activated = rows.new_empty((2, longest(groups), width))
        grad_hidden = rows.new_empty((longest(groups), factor, width))

        def compute(expert: int) -> None:
            group = groups[expert]
            if not group.size:
                grad_up[expert].zero_()
                grad_down[expert].zero_()
                return
            expert_activated, expert_grad_activated = activated[: group.size], grad_activated[: group.size]
            expert_grad_hidden, flat = grad_hidden[: group.size], grad_hidden[: group.size].flatten(1)
            expert_grad = group.gather(grad)
            torch.mm(expert_grad, down[expert], out=expert_grad_activated)
            weigh = None
            if weights is not None:
                scale, expert_grad_weights = group.scale(weights, rows.dtype), group.buffer_for(grad_weights)
                weigh = weighing(expert_grad_activated, expert_activated, scale, expert_grad_weights)
            chain = (expert_grad_hidden, expert_activated, expert_grad_activated, hidden[group.span])
            activate_backward(*chain, activation, clamp, alpha, weigh=weigh)
            if weights is not None:
                if down_bias is not None:
                    expert_grad_weights += (expert_grad * down_bias[expert]).sum(-1, dtype=weights.dtype)
                group.scatter(expert_grad_weights, grad_weights)
                expert_activated.mul_(scale)
            torch.mm(expert_grad.t(), expert_activated, out=grad_down[expert])
            torch.mm(flat.t(), group.gather(rows), out=flat_grad_up[expert])
            if up_bias is not None:
                sum_rows(expert_grad_hidden, grad_up_bias[expert])
                sum_rows(expert_grad if weights is None else expert_grad * scale, grad_down_bias[expert])
            expert_grad_rows = group.buffer_for(grad_rows)
            torch.mm(flat, up[expert], out=expert_grad_rows)
            group.scatter(expert_grad_rows, grad_rows)

        return compute

    each_expert([group.size for group in groups], 3 * rows.shape[1] * width, rows.device, begin)
    return grad_rows, grad_up, grad_down, grad_up_bias, grad_down_bias, grad_weights


def project(rows: Tensor, weights: Tensor, biases: Tensor | None, expert: int, out: Tensor) -> None:
    """out [N, O], of rows [N, I], weights [E, O, I], and biases, E times O numbers."""
    if biases is None:
        torch.mm(rows, weights[expert].t(), out=out)
    else:
        torch.addmm(biases[expert].flatten(), rows, weights[expert].t(), out=out)


def unused_table(num_rows: int, counts: Tensor) -> Tensor:
    """The table of rows that operators return, zero: plain torch orders rows in backward by other results."""
    return counts.new_zeros(table_length(num_rows, counts.shape[0]), dtype=torch.int32)


def new_gradients(
    up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised gradients of both weights, and `new_biases`."""
    return new_empty(up, up.shape), new_empty(down, down.shape), *new_biases(up, up_bias, down_bias)


def new_biases(up: Tensor, up_bias: Tensor | None, down_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zeros for the biases' gradients; of shape [0] where there is no bias."""
    grad_up_bias, grad_down_bias = (up.new_zeros(0 if bias is None else bias.shape) for bias in (up_bias, down_bias))
    return grad_up_bias, grad_down_bias


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """The sum of rows [N, …] into out […], added up in at least float32."""
    out.copy_(rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)))


def weighing(grad: Tensor, activated: Tensor, scale: Tensor, grad_weights: Tensor) -> Weigh:
    """Makes a `Weigh`: writes the weights' gradient [N], sum(grad · activated), then scales grad [N, F] by them."""

    def weigh(block: slice, buffer: Tensor) -> None:
        torch.mul(grad[block], activated[block], out=buffer)
        grad_weights[block] = buffer.sum(dim=-1, dtype=grad_weights.dtype)
        grad[block].mul_(scale[block])

    return weigh
