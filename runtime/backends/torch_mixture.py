"""A local mixture in plain torch: each expert gathers its tokens, so that no copy of a token per choice is kept."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from moec.runtime.backends.torch_experts import activate, activate_backward, new_biases, project, sum_rows
from moec.runtime.backends.torch_gated import Weigh
from moec.runtime.backends.torch_rows import inverse, refuse_out_of_range, stable_order, sums_of, weighted_sums_of


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
    out = x.new_empty((num_rows + 1, dim))
    out[num_rows:], hidden[num_rows:] = 0, 0
    own_rows, activated = (x.new_empty((max(sizes, default=0), each)) for each in (dim, width))
    for expert, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0))):
        if stop > start:
            own, own_activated = hidden[start:stop], activated[: stop - start]
            rows = torch.index_select(flat, 0, tokens[start:stop], out=own_rows[: stop - start])
            project(rows, up, up_bias, expert, own.flatten(1))
            activate(own_activated, own, activation)
            project(own_activated, down, down_bias, expert, out[start:stop])
    mixed = weighted_sums_of(out, chosen.clamp_max(num_rows).view(-1, k), weights.reshape(-1, k)).view(x.shape)
    positions = chosen.where(chosen < num_rows, -1) if dropped else chosen
    return mixed, buckets[None, 1:].clone(), hidden, positions.view(experts.shape)


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
    chosen = positions.reshape(-1).where(positions.reshape(-1) >= 0, num_rows)
    order = chosen.new_empty(num_rows + 1)
    order = order.scatter_(0, chosen, torch.arange(chosen.numel(), device=chosen.device))[:num_rows]
    tokens = order.div(k, rounding_mode="floor")
    dtype = torch.promote_types(x.dtype, torch.float32)
    scale = weights.reshape(-1).index_select(0, order).to(dtype)[:, None]

    grad, flat = grad.reshape(-1, dim), x.reshape(-1, dim)
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    grad_down = torch.empty(down.shape, dtype=down.dtype, device=down.device)
    of_up_bias, of_down_bias = new_biases(up, up_bias, down_bias)
    up, by_expert = up.flatten(1, 2), grad_up.flatten(1, 2)
    grad_rows, of_weights = x.new_empty((num_rows + 1, dim)), weights.new_zeros(num_rows + 1)
    grad_rows[num_rows] = 0
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
        weigh = _weighing(own_grad_activated, own_activated, own_scale, of_weights[where])
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
        torch.mm(flat_grad, up[expert], out=grad_rows[where])
    grad_x = sums_of(grad_rows, chosen.view(-1, k)).view(x.shape)
    return grad_x, of_weights[chosen].view(weights.shape), grad_up, grad_down, of_up_bias, of_down_bias


def _weighing(grad: Tensor, activated: Tensor, scale: Tensor, of_weights: Tensor) -> Weigh:
    """Weighs the gradient [N, F] of rows; before that, its product with them is the gradient of their weights [N]."""

    def weigh(block: slice, room: Tensor) -> None:
        torch.mul(grad[block], activated[block], out=room)
        of_weights[block] = room.sum(dim=-1, dtype=of_weights.dtype)
        grad[block].mul_(scale[block])

    return weigh
