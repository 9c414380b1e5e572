"""A local mixture in plain torch: each expert gathers its tokens, so that no copy of a token per choice is kept."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from moec.runtime.backends.torch_experts import (
    activate,
    activate_backward,
    new_biases,
    project,
    sum_rows,
    weighing,
)
from moec.runtime.backends.torch_rows import inverse, refuse_out_of_range, stable_order, sums_of


def mixture_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_experts, k, (dim, width) = up.shape[0], experts.shape[2], down.shape[1:]
    refuse_out_of_range("mixture_mlp", experts, num_experts, -1)
    choices = experts.reshape(-1)
    buckets = torch.bincount(choices + 1, minlength=num_experts + 1)
    dropped, *sizes = buckets.tolist()
    # What is dropped stands after all others, and then nowhere.
    order = stable_order(choices.where(choices >= 0, num_experts) if dropped else choices, num_experts + 1)
    chosen = inverse(order)
    num_rows = choices.numel() - dropped

    tokens, up, down = order.div(k, rounding_mode="floor"), up.flatten(1, 2), down.contiguous()
    flat = x.reshape(-1, dim)
    hidden = x.new_empty((choices.numel(), up.shape[1] // width, width))
    hidden[num_rows:] = 0
    out = x.new_empty((num_rows, dim))
    own_rows, activated = (x.new_empty((max(sizes, default=0), each)) for each in (dim, width))
    for expert, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0))):
        if stop > start:
            own, own_activated = hidden[start:stop], activated[: stop - start]
            rows = torch.index_select(flat, 0, tokens[start:stop], out=own_rows[: stop - start])
            project(rows, up, up_bias, expert, own.flatten(1))
            activate(own_activated, own, activation)
            project(own_activated, down, down_bias, expert, out[start:stop])
    positions = (chosen.where(chosen < num_rows, -1) if dropped else chosen).view(experts.shape)
    mixed = sums_of(out, positions.view(-1, k), weights.reshape(-1, k), dropped > 0).view(x.shape)
    return mixed, buckets[None, 1:].clone(), hidden, positions


def mixture_mlp_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    counts: Tensor,
    positions: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    k, (dim, width), factor = positions.shape[2], down.shape[1:], up.shape[1]
    sizes: list[int] = counts[0].tolist()
    num_rows = sum(sizes)
    chosen, dropped = positions.reshape(-1), num_rows < positions.numel()
    # What was dropped is written where nobody looks.
    places = chosen.where(chosen >= 0, num_rows) if dropped else chosen
    order = chosen.new_empty(num_rows + 1)
    order = order.scatter_(0, places, torch.arange(chosen.numel(), device=chosen.device))[:num_rows]
    tokens = order.div(k, rounding_mode="floor")
    # As forward rounded them; besides, a product of two dtypes takes 15 times as long (measured, bfloat16 and float32).
    scale = weights.reshape(-1).index_select(0, order).to(x.dtype)[:, None]

    grad, flat = grad.reshape(-1, dim), x.reshape(-1, dim)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    grad_down = torch.empty(down.shape, dtype=down.dtype, device=down.device)
    of_up_bias, of_down_bias = new_biases(up, up_bias, down_bias)
    up, by_expert = up.flatten(1, 2), grad_up.flatten(1, 2)
    # Summed as they come: an expert has a token once, so that the order of a token's sum is that of its experts.
    grad_x = torch.zeros(flat.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    of_weights = weights.new_zeros(num_rows + 1)
    # What one expert needs at a time, reused by the next, so that it stays in cache.
    longest = max(sizes, default=0)
    rows, grads = x.new_empty((2, longest, dim))
    activated, grad_activated = x.new_empty((2, longest, width))
    grad_hidden = x.new_empty((longest, factor, width))
    for expert, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0))):
        size, where = stop - start, slice(start, stop)
        if not size:
            grad_up[expert].zero_()
            grad_down[expert].zero_()
            continue
        own_activated, own_grad_activated, own_scale = activated[:size], grad_activated[:size], scale[where]
        own_grad = torch.index_select(grad, 0, tokens[where], out=grads[:size])
        torch.mm(own_grad, down[expert], out=own_grad_activated)
        weigh = weighing(own_grad_activated, own_activated, own_scale, of_weights[where])
        own_grad_hidden = grad_hidden[:size]
        activate_backward(own_grad_hidden, own_activated, own_grad_activated, hidden[where], activation, weigh)
        if down_bias is not None:
            products = torch.mul(own_grad, down_bias[expert], out=rows[:size])
            of_weights[where] += products.sum(-1, dtype=of_weights.dtype)
        torch.mm(own_grad.mul_(own_scale).t(), own_activated, out=grad_down[expert])
        if up_bias is not None:
            sum_rows(own_grad_hidden, of_up_bias[expert])
            sum_rows(own_grad, of_down_bias[expert])
        flat_grad = own_grad_hidden.flatten(1)
        own_rows = torch.index_select(flat, 0, tokens[where], out=rows[:size])
        torch.mm(flat_grad.t(), own_rows, out=by_expert[expert])
        # The room of the token's gradients, which were used.
        grad_rows = torch.mm(flat_grad, up[expert], out=own_grad)
        grad_x.index_add_(0, tokens[where], grad_rows.to(grad_x.dtype))
    of_weights = of_weights[places].view(weights.shape)
    return grad_x.to(x.dtype).view(x.shape), of_weights, grad_up, grad_down, of_up_bias, of_down_bias
