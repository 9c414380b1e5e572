"""A local mixture in plain torch: each expert gathers its tokens, so that no copy of a token per choice is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moec.runtime.backends.torch.torch_activations import activate, activate_backward
from moec.runtime.backends.torch.torch_experts import new_gradients, project, sum_rows, unused_table, weighing
from moec.runtime.backends.torch.torch_memory import new_empty
from moec.runtime.backends.torch.torch_rows import choices_of_rows, inverse, refuse_out_of_range, stable_order, sums_of
from moec.runtime.backends.torch.torch_threads import InTurn, each_expert


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
    flat = x.reshape(-1, dim)
    hidden = new_empty(x, (choices.numel(), up.shape[1] // width, width))
    hidden[num_rows:] = 0
    out = new_empty(x, (num_rows, dim))
    tokens_of, hidden_of, out_of = _by_expert(sizes, tokens, hidden, out)

    def begin() -> Callable[[int], None]:
        longest = max(sizes, default=0)
        rows, activated = x.new_empty((longest, dim)), x.new_empty((longest, width))

        def compute(expert: int) -> None:
            if size := sizes[expert]:
                own_rows = torch.index_select(flat, 0, tokens_of[expert], out=rows[:size])
                project(own_rows, up, up_bias, expert, hidden_of[expert].flatten(1))
                activate(activated[:size], hidden_of[expert], activation, clamp, alpha)
                project(activated[:size], down, down_bias, expert, out_of[expert])

        return compute

    each_expert(sizes, 3 * dim * width, x.device, begin)
    positions = (chosen.where(chosen < num_rows, -1) if dropped else chosen).view(experts.shape)
    mixed = sums_of(out, positions.view(-1, k), weights.reshape(-1, k), dropped > 0).view(x.shape)
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
    grad_up, grad_down, of_up_bias, of_down_bias = new_gradients(up, down, up_bias, down_bias)
    up, by_expert = up.flatten(1, 2), grad_up.flatten(1, 2)
    # An expert has a token at most once, so adding expert by expert sums each token in the order of its experts.
    grad_x = torch.zeros(flat.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    of_weights = weights.new_zeros(sum(sizes) + 1)
    tokens_of, hidden_of, scale_of, weights_of = _by_expert(sizes, tokens, hidden, scale, of_weights)
    longest, sums, spare = max(sizes, default=0), InTurn(), []

    def begin() -> Callable[[int], None]:
        rows, room_of_grad, activated, grad_activated, grad_hidden = _buffers(x, longest, dim, factor, width)
        spare.append(room_of_grad)

        def compute(expert: int) -> None:
            size, own_tokens = sizes[expert], tokens_of[expert]
            if not size:
                grad_up[expert].zero_()
                grad_down[expert].zero_()
                sums.put(expert, lambda: None)
                return
            own_activated, own_grad_activated = activated[:size], grad_activated[:size]
            own_grad_hidden, flat_grad = grad_hidden[:size], grad_hidden[:size].flatten(1)
            room = spare.pop() if spare else x.new_empty((longest, dim))
            own_grad = torch.index_select(grad, 0, own_tokens, out=room[:size])
            torch.mm(own_grad, down[expert], out=own_grad_activated)
            weigh = weighing(own_grad_activated, own_activated, scale_of[expert], weights_of[expert])
            own = (own_grad_hidden, own_activated, own_grad_activated, hidden_of[expert])
            activate_backward(*own, activation, clamp, alpha, weigh=weigh)
            if down_bias is not None:
                products = torch.mul(own_grad, down_bias[expert], out=rows[:size])
                weights_of[expert].add_(products.sum(-1, dtype=of_weights.dtype))
            torch.mm(own_grad.mul_(scale_of[expert]).t(), own_activated, out=grad_down[expert])
            if up_bias is not None:
                sum_rows(own_grad_hidden, of_up_bias[expert])
                sum_rows(own_grad, of_down_bias[expert])
            own_rows = torch.index_select(flat, 0, own_tokens, out=rows[:size])
            torch.mm(flat_grad.t(), own_rows, out=by_expert[expert])
            grad_rows = torch.mm(flat_grad, up[expert], out=own_grad)

            def add() -> None:
                grad_x.index_add_(0, own_tokens, grad_rows.to(grad_x.dtype))
                spare.append(room)

            sums.put(expert, add)

        return compute

    each_expert(sizes, 3 * dim * width, x.device, begin)
    of_weights = of_weights[positions]  # dropped choices, −1, read the gradient 0 at the last index
    return grad_x.to(x.dtype).view(x.shape), of_weights, grad_up, grad_down, of_up_bias, of_down_bias


def _buffers(x: Tensor, rows: int, dim: int, factor: int, width: int) -> tuple[Tensor, ...]:
    """Memory for one expert of so many rows, used again by the next, so that it stays in cache.

    Two `[rows, dim]`, two `[rows, width]`, and one `[rows, factor, width]`.
    """
    return (*x.new_empty((2, rows, dim)), *x.new_empty((2, rows, width)), x.new_empty((rows, factor, width)))


def _tokens_of_rows(positions: Tensor, weights: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row's token [R] and weight [R, 1], from the row and the weight of each choice, both [B, S, k]."""
    order = choices_of_rows(positions.reshape(-1), num_rows)
    # Rounded as in forward; also, a product of two dtypes takes 15 times as long (measured, bfloat16 and float32).
    scale = weights.reshape(-1).index_select(0, order).to(dtype)[:, None]
    return order.div(positions.shape[2], rounding_mode="floor"), scale


def _by_expert(sizes: list[int], *tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """The rows of each expert, of tensors whose first rows lie by expert."""
    return (torch.split(tensor[: sum(sizes)], sizes) for tensor in tensors)
