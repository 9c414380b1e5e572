"""A local mixture in plain torch: experts gather their tokens, so that no copy of a token per choice is saved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_activations import activate, activate_backward
from moec.runtime.backends.torch.torch_batches import batches_of, largest
from moec.runtime.backends.torch.torch_experts import new_gradients, project, sum_rows, unused_table, weighing
from moec.runtime.backends.torch.torch_memory import new_empty
from moec.runtime.backends.torch.torch_rows import (
    choices_of_rows,
    inverse,
    refuse_out_of_range,
    stable_order,
    token_sums,
)
from moec.runtime.backends.torch.torch_threads import each_expert


def mixture_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    clamp: float | None = None,
    alpha: float | None = None,
    ways: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_experts, k, (dim, width) = up.shape[0], experts.shape[2], down.shape[1:]
    refuse_out_of_range("mixture_mlp", experts, num_experts, -1)
    choices = experts.reshape(-1)
    buckets = torch.bincount(choices + 1, minlength=num_experts + 1)
    dropped, *sizes = buckets.tolist()
    # Dropped choices sort after all others; then their positions become −1.
    order = stable_order(choices.where(choices >= 0, num_experts) if dropped else choices, num_experts + 1)
    chosen = inverse(order)
    num_rows = choices.numel() - dropped

    tokens, up, down = order.div(k, rounding_mode="floor"), up.flatten(1, 2), down.contiguous()
    flat, factor = x.reshape(-1, dim), up.shape[1] // width
    hidden, out = new_empty(x, (choices.numel(), factor, width)), new_empty(x, (num_rows, dim))
    hidden[num_rows:] = 0
    batches = batches_of(sizes, width)

    def begin() -> Callable[[int], None]:
        rows, activated_buffer = x.new_empty((largest(batches), dim)), x.new_empty((largest(batches), width))

        def compute(number: int) -> None:
            batch = batches[number]
            batch_rows = torch.index_select(flat, 0, tokens[batch.rows], out=rows[: batch.size])
            batch_hidden, activated, batch_out = hidden[batch.rows], activated_buffer[: batch.size], out[batch.rows]
            projected = batch_hidden.flatten(1)
            for expert, expert_rows in batch.experts():
                project(batch_rows[expert_rows], up, up_bias, expert, projected[expert_rows])
            activate(activated, batch_hidden, activation, clamp, alpha)
            for expert, expert_rows in batch.experts():
                project(activated[expert_rows], down, down_bias, expert, batch_out[expert_rows])

        return compute

    each_expert([batch.cost for batch in batches], 3 * dim * width, x.device, begin)
    positions = (chosen.where(chosen < num_rows, -1) if dropped else chosen).view(experts.shape)
    mixed = token_sums(out, positions, weights, dropped > 0)
    return mixed, buckets[None, 1:].clone(), hidden, positions, unused_table(choices.numel(), buckets[1:])


def mixture_mlp_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    counts: Tensor,
    positions: Tensor,
    table: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    clamp: float | None = None,
    alpha: float | None = None,
    ways: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (dim, width), factor = down.shape[1:], up.shape[1]
    sizes: list[int] = counts[0].tolist()
    tokens, scale = _tokens_of_rows(positions, weights, sum(sizes), x.dtype)

    grad, flat = grad.reshape(-1, dim), x.reshape(-1, dim)
    grad_up, grad_down, grad_up_bias, grad_down_bias = new_gradients(up, down, up_bias, down_bias)
    up, flat_grad_up = up.flatten(1, 2), grad_up.flatten(1, 2)
    grad_rows, grad_weights = new_empty(x, (sum(sizes), dim)), weights.new_zeros(sum(sizes) + 1)
    batches = batches_of(sizes, width)

    def begin() -> Callable[[int], None]:
        buffers = _buffers(x, largest(batches), dim, factor, width)

        def compute(number: int) -> None:
            batch = batches[number]
            batch_tokens, batch_scale = tokens[batch.rows], scale[batch.rows]
            batch_grad_weights = grad_weights[batch.rows]
            rows, batch_grad, activated, grad_activated, grad_hidden = (buffer[: batch.size] for buffer in buffers)
            torch.index_select(grad, 0, batch_tokens, out=batch_grad)
            for expert, expert_rows in batch.experts():
                torch.mm(batch_grad[expert_rows], down[expert], out=grad_activated[expert_rows])
            weigh = weighing(grad_activated, activated, batch_scale, batch_grad_weights)
            chain = (grad_hidden, activated, grad_activated, hidden[batch.rows])
            activate_backward(*chain, activation, clamp, alpha, weigh=weigh)
            if down_bias is not None:
                for expert, expert_rows in batch.experts():
                    products = torch.mul(batch_grad[expert_rows], down_bias[expert], out=rows[expert_rows])
                    batch_grad_weights[expert_rows].add_(products.sum(-1, dtype=grad_weights.dtype))
            batch_grad.mul_(batch_scale)
            torch.index_select(flat, 0, batch_tokens, out=rows)
            flat_grad, batch_grad_rows = grad_hidden.flatten(1), grad_rows[batch.rows]
            for expert, expert_rows in batch.experts():
                torch.mm(batch_grad[expert_rows].t(), activated[expert_rows], out=grad_down[expert])
                torch.mm(flat_grad[expert_rows].t(), rows[expert_rows], out=flat_grad_up[expert])
                torch.mm(flat_grad[expert_rows], up[expert], out=batch_grad_rows[expert_rows])
                if up_bias is not None:
                    sum_rows(grad_hidden[expert_rows], grad_up_bias[expert])
                    sum_rows(batch_grad[expert_rows], grad_down_bias[expert])

        return compute

    each_expert([batch.cost for batch in batches], 3 * dim * width, x.device, begin)
    grad_x = token_sums(grad_rows, positions, None, sum(sizes) < positions.numel())
    grad_weights = grad_weights[positions]  # dropped choices, −1, read the gradient 0 at the last index
    return grad_x, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias


def _buffers(x: Tensor, rows: int, dim: int, factor: int, width: int) -> tuple[Tensor, ...]:
    """Memory for one batch of `rows` rows, reused by the next batch, so that it stays in cache.

    Two `[rows, dim]`, two `[rows, width]`, and one `[rows, factor, width]`.
    """
    return (*x.new_empty((2, rows, dim)), *x.new_empty((2, rows, width)), x.new_empty((rows, factor, width)))


def _tokens_of_rows(positions: Tensor, weights: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row's token [R] and weight [R, 1], from the row and the weight of each choice, both [B, S, k]."""
    order = choices_of_rows(positions.reshape(-1), num_rows)
    # Rounded as in forward; also, a product of two dtypes takes 15 times as long (measured, bfloat16 and float32).
    scale = weights.reshape(-1).index_select(0, order).to(dtype)[:, None]
    return order.div(positions.shape[2], rounding_mode="floor"), scale
