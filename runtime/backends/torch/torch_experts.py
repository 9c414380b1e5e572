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
                own_hidden, own_activated = hidden[group.where], activated[: group.size]
                project(group.gather(rows), up, up_bias, expert, own_hidden.flatten(1))
                activate(own_activated, own_hidden, activation, clamp, alpha)
                own_out = group.room(out)
                project(own_activated, down, down_bias, expert, own_out)
                if weights is not None:
                    own_out.mul_(group.scale(weights, rows.dtype))
                group.scatter(own_out, out)

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
    grad_up, grad_down, of_up_bias, of_down_bias = new_gradients(up, down, up_bias, down_bias)
    of_weights = rows.new_empty(0) if weights is None else weights.new_empty(weights.shape)
    up, by_expert = up.flatten(1, 2), grad_up.flatten(1, 2)

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
            own_activated, own_grad_activated = activated[: group.size], grad_activated[: group.size]
            own_grad_hidden, flat = grad_hidden[: group.size], grad_hidden[: group.size].flatten(1)
            own_grad = group.gather(grad)
            torch.mm(own_grad, down[expert], out=own_grad_activated)
            weigh = None
            if weights is not None:
                scale, own_of_weights = group.scale(weights, rows.dtype), group.room(of_weights)
                weigh = weighing(own_grad_activated, own_activated, scale, own_of_weights)
            own_hidden = hidden[group.where]
            activate_backward(
                own_grad_hidden, own_activated, own_grad_activated, own_hidden, activation, clamp, alpha, weigh=weigh
            )
            if weights is not None:
                if down_bias is not None:
                    own_of_weights += (own_grad * down_bias[expert]).sum(-1, dtype=weights.dtype)
                group.scatter(own_of_weights, of_weights)
                own_activated.mul_(scale)
            torch.mm(own_grad.t(), own_activated, out=grad_down[expert])
            torch.mm(flat.t(), group.gather(rows), out=by_expert[expert])
            if up_bias is not None:
                sum_rows(own_grad_hidden, of_up_bias[expert])
                sum_rows(own_grad if weights is None else own_grad * scale, of_down_bias[expert])
            own_grad_rows = group.room(grad_rows)
            torch.mm(flat, up[expert], out=own_grad_rows)
            group.scatter(own_grad_rows, grad_rows)

        return compute

    each_expert([group.size for group in groups], 3 * rows.shape[1] * width, rows.device, begin)
    return grad_rows, grad_up, grad_down, of_up_bias, of_down_bias, of_weights


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
    """Memory for the gradients of both weights, and `new_biases`."""
    return new_empty(up, up.shape), new_empty(down, down.shape), *new_biases(up, up_bias, down_bias)


def new_biases(up: Tensor, up_bias: Tensor | None, down_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zeros for the biases' gradients; of shape [0] where there is no bias."""
    of_up, of_down = (up.new_zeros(0 if bias is None else bias.shape) for bias in (up_bias, down_bias))
    return of_up, of_down


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """The sum of rows [N, …] into out […], added up in at least float32."""
    out.copy_(rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)))


def weighing(grad: Tensor, activated: Tensor, scale: Tensor, of_weights: Tensor) -> Weigh:
    """Makes a `Weigh`: writes the weights' gradient [N], sum(grad · activated), then scales grad [N, F] by them."""

    def weigh(block: slice, room: Tensor) -> None:
        torch.mul(grad[block], activated[block], out=room)
        of_weights[block] = room.sum(dim=-1, dtype=of_weights.dtype)
        grad[block].mul_(scale[block])

    return weigh
