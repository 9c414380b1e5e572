"""A local mixture by rendered kernels: tokens gathered where they are read, and nothing kept of a row per choice.

The router's gradient comes out of the product with down's transpose, so that backward needs no expert's output
(SonicMoE, Guo et al. 2025, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.codegen.kernels import CombineShape
from moec.runtime.backends import torch_mixture
from moec.runtime.backends.torch_rows import refuse_out_of_range
from moec.runtime.backends.triton_experts import Work
from moec.runtime.backends.triton_launch import Kernels, dtype_name, kernels_of, no_fp64, too_many
from moec.runtime.backends.triton_rows import places_of


def mixture_mlp(
    x: Tensor, experts: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_experts, k, dim = up.shape[0], experts.shape[2], x.shape[2]
    if too_many(num_experts) or no_fp64(x.device, x.dtype):
        return torch_mixture.mixture_mlp(x, experts, weights, up, down, activation)
    refuse_out_of_range("mixture_mlp", experts, num_experts, -1)
    x, weights, up, down = x.contiguous(), weights.contiguous(), up.contiguous(), down.contiguous()
    counts, positions = places_of(x, experts, num_experts)
    num_rows = experts.numel()
    mixed, hidden = torch.empty_like(x), x.new_empty((num_rows, *up.shape[1:3]))
    if num_rows:
        combine = _combine(x, positions, weights)
        order = _order(combine, positions)
        work = Work.of(x, num_rows, counts, up, activation, k, order)
        activated, rows = x.new_empty((num_rows, up.shape[2])), x.new_empty((num_rows, dim))
        work.up.product("up", up.shape[2], x, order, up, hidden, activated)
        work.down.product("down", dim, activated, down, rows)
        grid = (num_rows // k, *combine.blocks(dim, "BLOCK_D"))
        combine.launch("combine", grid, rows, positions, weights, mixed)
    return mixed, counts, hidden, positions


def mixture_mlp_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    counts: Tensor,
    positions: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_experts, k, dim = up.shape[0], positions.shape[2], x.shape[2]
    if too_many(num_experts) or no_fp64(x.device, x.dtype):
        return torch_mixture.mixture_mlp_backward(grad, x, hidden, counts, positions, weights, up, down, activation)
    grad, x, hidden, weights, up, down = (t.contiguous() for t in (grad, x, hidden, weights, up, down))
    grad_x, grad_weights = torch.empty_like(x), torch.empty_like(weights)
    grad_up, grad_down = torch.empty_like(up), torch.empty_like(down)
    num_rows = positions.numel()
    if not num_rows:
        return grad_x, grad_weights, grad_up.zero_(), grad_down.zero_()

    _, parts, width, _ = up.shape
    combine = _combine(x, positions, weights)
    order = _order(combine, positions)
    work = Work.of(x, num_rows, counts, up, activation, k, order)
    grad_hidden, activated = torch.empty_like(hidden), x.new_empty((num_rows, width))
    num_parts = -(-width // work.down.shape.tile.columns)
    of_weights = x.new_empty((num_parts, num_rows), dtype=torch.promote_types(x.dtype, torch.float32))
    work.down.product(
        "down_backward", width, grad, down, order, weights, of_weights, hidden, grad_hidden, activated, more=(num_rows,)
    )
    combine.launch(
        "add_parts", combine.blocks(num_rows), of_weights, positions, grad_weights, num_rows, num_parts, num_rows
    )
    work.down.weights("down_weights", (dim, width), grad, activated, order, grad_down)
    del activated
    grad_rows = x.new_empty((num_rows, dim))
    work.up.product("up_backward", dim, grad_hidden, up, grad_rows)
    work.up.weights("up_weights", (parts * width, dim), grad_hidden, x, order, grad_up)
    combine.launch("add_rows", (num_rows // k, *combine.blocks(dim, "BLOCK_D")), grad_rows, positions, grad_x)
    return grad_x, grad_weights, grad_up, grad_down


def _combine(x: Tensor, positions: Tensor, weights: Tensor) -> Kernels:
    shape = CombineShape(k=positions.shape[2], dim=x.shape[2], dtype=dtype_name(x), weights=dtype_name(weights))
    return kernels_of(shape, x)


def _order(combine: Kernels, positions: Tensor) -> Tensor:
    """Which choice each row is, [R] int32; undefined beyond the rows that there are."""
    order = positions.new_empty(positions.numel(), dtype=torch.int32)
    combine.launch("invert", combine.blocks(positions.numel()), positions, order, positions.numel())
    return order
