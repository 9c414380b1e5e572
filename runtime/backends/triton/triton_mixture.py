"""A local mixture by rendered kernels: they gather tokens when they read them, and save no copy of a token per choice.

The product with down's transpose gives the router's gradient, so that backward needs no expert's output
(SonicMoE, Guo et al. 2025, arXiv 2512.14080).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.runtime.backends.torch import torch_mixture
from moec.runtime.backends.torch.torch_experts import new_biases
from moec.runtime.backends.torch.torch_rows import refuse_out_of_range
from moec.runtime.backends.triton.triton_experts import ExpertsLayer
from moec.runtime.backends.triton.triton_launch import no_fp64, present, too_many
from moec.runtime.backends.triton.triton_queues import Queues
from moec.runtime.backends.triton.triton_rows import Places


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
    num_experts, k, dim = up.shape[0], experts.shape[2], x.shape[2]
    if too_many(num_experts) or no_fp64(x.device, x.dtype):
        plain = torch_mixture.mixture_mlp
        return plain(x, experts, weights, up, down, up_bias, down_bias, activation, clamp, alpha)
    refuse_out_of_range("mixture_mlp", experts, num_experts, -1)
    x, weights, up, down = x.contiguous(), weights.contiguous(), up.contiguous(), down.contiguous()
    queues = Queues.of_all(experts, num_experts)
    counts, positions = queues.totals.view(1, num_experts), queues.positions(experts.shape)
    num_rows = experts.numel()
    hidden = x.new_empty((num_rows, *up.shape[1:3]))
    work = ExpertsLayer.of(x, up, up_bias, 1, (activation, clamp, alpha), k=k).forward(num_rows, counts, ways)
    if not num_rows:
        return torch.empty_like(x), counts, hidden, positions, work.table.saved
    places = Places.of(x, positions, weights)
    places.fill_order(work.table.order)
    activated, rows = x.new_empty((num_rows, up.shape[2])), x.new_empty((num_rows, dim))
    work.up.product("up", up.shape[2], x, *work.order, up, *present(up_bias), hidden, activated)
    work.down.product("down", dim, activated, down, *present(down_bias), rows)
    return places.combine(rows, weights), counts, hidden, positions, work.table.saved


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
    num_experts, k, dim = up.shape[0], positions.shape[2], x.shape[2]
    if too_many(num_experts) or no_fp64(x.device, x.dtype):
        plain, biases = torch_mixture.mixture_mlp_backward, (up_bias, down_bias)
        return plain(grad, x, hidden, counts, positions, table, weights, up, down, *biases, activation, clamp, alpha)
    grad, x, hidden, weights, up, down = (t.contiguous() for t in (grad, x, hidden, weights, up, down))
    grad_weights, grad_up, grad_down = torch.empty_like(weights), torch.empty_like(up), torch.empty_like(down)
    num_rows, of_biases = positions.numel(), new_biases(up, up_bias, down_bias)
    if not num_rows:
        return torch.empty_like(x), grad_weights, grad_up.zero_(), grad_down.zero_(), *of_biases

    _, parts, width, _ = up.shape
    places = Places.of(x, positions, weights)
    work = ExpertsLayer.of(x, up, up_bias, 1, (activation, clamp, alpha), k=k).backward(num_rows, table, ways)
    grad_hidden, activated = torch.empty_like(hidden), x.new_empty((num_rows, width))
    of_weights = x.new_empty((work.down.parts, num_rows), dtype=torch.promote_types(x.dtype, torch.float32))
    matrices, made = (down, *present(down_bias)), (hidden, grad_hidden, activated)
    work.down.product(
        "down_backward", width, grad, *matrices, *work.order, weights, of_weights, *made, more=(num_rows,)
    )
    places.add_parts(of_weights, grad_weights)
    work.down.weights("down_weights", (dim, width), grad, activated, *work.order, grad_down)
    del activated, made
    grad_rows = x.new_empty((num_rows, dim))
    work.up.product("up_backward", dim, grad_hidden, up, grad_rows)
    work.up.weights("up_weights", (parts * width, dim), grad_hidden, x, *work.order, grad_up)
    if up_bias is not None:
        of_up, of_down = of_biases
        work.up.bias("up_bias", parts * width, grad_hidden, of_up)
        work.down.bias("down_bias", dim, grad, *work.order, weights, of_down)
    return places.add_rows(grad_rows), grad_weights, grad_up, grad_down, *of_biases
