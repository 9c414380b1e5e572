"""A local mixture by rendered kernels: they gather tokens when they read them, and save no copy of a token per choice.

The product with down's transpose gives the router's gradient, so that backward needs no expert's output
(SonicMoE, Guo et al. 2025, arXiv 2512.14080).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moec.runtime.backends.torch import torch_mixture
from moec.runtime.backends.torch.torch_experts import Gradients, new_biases, shapes_of
from moec.runtime.backends.torch.torch_rows import refuse_out_of_range
from moec.runtime.backends.triton.triton_experts import ExpertsLayer
from moec.runtime.backends.triton.triton_launch import no_fp64, too_many
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
    num_experts, k = up.shape[0], experts.shape[2]
    if too_many(num_experts) or no_fp64(x.device, x.dtype):
        plain = torch_mixture.mixture_mlp
        return plain(x, experts, weights, up, down, up_bias, down_bias, activation, clamp, alpha)
    refuse_out_of_range("mixture_mlp", experts, num_experts, -1)
    x, weights, up, down = x.contiguous(), weights.contiguous(), up.contiguous(), down.contiguous()
    queues = Queues.single(experts, num_experts)
    counts, positions = queues.totals.view(1, num_experts), queues.positions(experts.shape)
    num_rows = experts.numel()
    products = ExpertsLayer.of(x, up, up_bias, 1, (activation, clamp, alpha), k=k).forward(num_rows, counts, ways)
    if not num_rows:
        return torch.empty_like(x), counts, x.new_empty((0, *up.shape[1:3])), positions, products.table.saved
    places = Places.of(x, positions, weights)
    places.fill_order(products.table.order)
    hidden, activated = products.up(products.source(x), up, up_bias)
    rows = products.down(activated, down, down_bias, None)
    return places.combine(rows, weights), counts, hidden, positions, products.table.saved


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
    num_experts, k = up.shape[0], positions.shape[2]
    if too_many(num_experts) or no_fp64(x.device, x.dtype):
        plain, biases = torch_mixture.mixture_mlp_backward, (up_bias, down_bias)
        return plain(grad, x, hidden, counts, positions, table, weights, up, down, *biases, activation, clamp, alpha)
    grad, x, hidden, weights, up, down = (t.contiguous() for t in (grad, x, hidden, weights, up, down))
    grad_weights = torch.empty_like(weights)
    num_rows, grad_biases = positions.numel(), new_biases(up, shapes_of((up_bias, down_bias)))
    if not num_rows:
        return torch.empty_like(x), grad_weights, torch.zeros_like(up), torch.zeros_like(down), *grad_biases

    places = Places.of(x, positions, weights)
    products = ExpertsLayer.of(x, up, up_bias, 1, (activation, clamp, alpha), k=k).backward(num_rows, table, ways)
    grad_source = products.source(grad)
    grad_hidden, activated, parts = products.down_backward(grad_source, hidden, down, down_bias, weights)
    assert parts is not None
    places.add_parts(parts, grad_weights)
    grad_down = products.down_weights(grad_source, activated, down.shape)
    del grad_source, activated, parts
    grad_rows = products.up_backward(grad_hidden, up)
    grad_up = products.up_weights(grad_hidden, products.source(x), up.shape)
    if up_bias is not None:
        products.biases(grad_hidden, grad, weights, *grad_biases)
    return places.add_rows(grad_rows), grad_weights, grad_up, grad_down, *grad_biases


def mixture_mlp_backward_split(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    counts: Tensor,
    positions: Tensor,
    table: Tensor,
    weights: Tensor,
    *operands: Any,
) -> tuple[Tensor, Tensor, Callable[[], Gradients]]:
    up, down, up_bias, down_bias, *activation, ways = operands
    num_rows, k = positions.numel(), positions.shape[2]
    if not num_rows or too_many(up.shape[0]) or no_fp64(x.device, x.dtype):
        plain = torch_mixture.mixture_mlp_backward_split
        return plain(grad, x, hidden, counts, positions, table, weights, *operands)
    grad, x, hidden, weights, up, down = (t.contiguous() for t in (grad, x, hidden, weights, up, down))
    grad_weights, shapes = torch.empty_like(weights), shapes_of((up, down, up_bias, down_bias))
    places = Places.of(x, positions, weights)
    products = ExpertsLayer.of(x, up, up_bias, 1, tuple(activation), k=k).backward(num_rows, table, ways)
    grad_hidden, activated, parts = products.down_backward(products.source(grad), hidden, down, down_bias, weights)
    assert parts is not None
    places.add_parts(parts, grad_weights)
    grad_x = places.add_rows(products.up_backward(grad_hidden, up))
    return grad_x, grad_weights, partial(products.of_weights, grad, x, grad_hidden, activated, weights, shapes)
