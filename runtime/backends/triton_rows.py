"""Rows sorted by expert, and their weighted sums, by rendered kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.codegen.kernels import CombineShape, PermuteShape
from moec.runtime.backends import torch_rows
from moec.runtime.backends.triton_launch import dtype_name, kernels_of, too_many


def permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if not x.dtype.is_floating_point or too_many(num_experts):
        return torch_rows.permute(x, experts, num_experts)
    x, experts, k, dim = x.contiguous(), experts.contiguous(), experts.shape[2], x.shape[-1]
    num_choices = experts.numel()
    _refuse_out_of_range(experts, num_experts)
    rows, counts = x.new_empty((num_choices, dim)), experts.new_zeros((1, num_experts))
    positions = torch.empty_like(experts)
    if num_choices:
        kernels = kernels_of(PermuteShape(experts=num_experts, k=k, dim=dim, dtype=dtype_name(x)), x)
        grid = kernels.blocks(num_choices)
        by_block = experts.new_empty((num_experts, *grid), dtype=torch.int32)
        kernels.launch("count", grid, experts, by_block, num_choices, *grid)
        kernels.launch("scan", (num_experts,), by_block, counts, *grid)
        kernels.launch("rank", grid, experts, by_block, counts, positions, num_choices, *grid)
        kernels.launch("copy", (num_choices // k, *kernels.blocks(dim, "BLOCK_D")), x, positions, rows)
    return rows, counts, positions


def permute_backward(grad: Tensor, positions: Tensor) -> Tensor:
    grad, positions, dim = grad.contiguous(), positions.contiguous(), grad.shape[1]
    *tokens, k = positions.shape
    grad_x = grad.new_empty((*tokens, dim))
    # How many experts there are is the forward's; its backward reads places alone.
    kernels = kernels_of(PermuteShape(experts=1, k=k, dim=dim, dtype=dtype_name(grad)), grad)
    grid = (positions.numel() // k, *kernels.blocks(dim, "BLOCK_D"))
    kernels.launch("permute_backward", grid, grad, positions, grad_x)
    return grad_x


def combine(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    if rows.shape[0] != positions.numel():
        message = f"moec::combine: {rows.shape[0]} rows for {positions.numel()} positions"
        raise RuntimeError(message)
    rows, positions, weights = rows.contiguous(), positions.contiguous(), weights.contiguous()
    *tokens, k = positions.shape
    out = rows.new_empty((*tokens, rows.shape[1]))
    kernels = kernels_of(_combine_shape(rows, weights), rows)
    grid = (positions.numel() // k, *kernels.blocks(rows.shape[1], "BLOCK_D"))
    kernels.launch("combine", grid, rows, positions, weights, out)
    return out


def combine_backward(grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    grad, rows, positions, weights = (t.contiguous() for t in (grad, rows, positions, weights))
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    kernels = kernels_of(_combine_shape(rows, weights), rows)
    grid = (positions.numel() // positions.shape[2],)
    kernels.launch("combine_backward", grid, grad, rows, positions, weights, grad_rows, grad_weights)
    return grad_rows, grad_weights


def _combine_shape(rows: Tensor, weights: Tensor) -> CombineShape:
    return CombineShape(k=weights.shape[2], dim=rows.shape[1], dtype=dtype_name(rows), weights=dtype_name(weights))


def _refuse_out_of_range(experts: Tensor, num_experts: int) -> None:
    """Only where looking costs no synchronisation."""
    if experts.device.type == "cpu" and experts.numel():
        least, most = (int(bound) for bound in experts.aminmax())
        if least < 0 or most >= num_experts:
            message = f"moec::permute: experts must be from 0 to {num_experts - 1}, not {least} to {most}"
            raise RuntimeError(message)
