"""Rows sorted by expert, and their weighted sums, by rendered kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.codegen.kernels import CombineShape, PermuteShape, accumulator
from moec.runtime.backends import torch_rows
from moec.runtime.backends.torch_rows import refuse_out_of_range
from moec.runtime.backends.triton_launch import Kernels, dtype_name, kernels_of, too_many


def permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if not x.dtype.is_floating_point or too_many(num_experts):
        return torch_rows.permute(x, experts, num_experts)
    x, experts, k, dim = x.contiguous(), experts.contiguous(), experts.shape[2], x.shape[-1]
    num_choices = experts.numel()
    refuse_out_of_range("permute", experts, num_experts)
    rows, counts = x.new_empty((num_choices, dim)), experts.new_zeros((1, num_experts))
    positions = torch.empty_like(experts)
    if num_choices:
        kernels = kernels_of(PermuteShape(experts=num_experts, k=k, dim=dim, dtype=dtype_name(x)), x)
        _rank(kernels, experts, counts, positions)
        kernels.launch("copy", (num_choices // k, *kernels.blocks(dim, "BLOCK_D")), x, positions, rows)
    return rows, counts, positions


def places_of(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """counts [1, num_experts] and positions [B, S, k] as `permute` gives them; −1 for a choice of −1."""
    experts, k = experts.contiguous(), experts.shape[2]
    counts, positions = experts.new_zeros((1, num_experts)), torch.empty_like(experts)
    if experts.numel():
        kernels = kernels_of(PermuteShape(experts=num_experts, k=k, dim=x.shape[-1], dtype=dtype_name(x)), x)
        _rank(kernels, experts, counts, positions)
    return counts, positions


def _rank(kernels: Kernels, experts: Tensor, counts: Tensor, positions: Tensor) -> None:
    num_choices = experts.numel()
    grid = kernels.blocks(num_choices)
    by_block = experts.new_empty((counts.shape[1], *grid), dtype=torch.int32)
    kernels.launch("count", grid, experts, by_block, num_choices, *grid)
    kernels.launch("scan", (counts.shape[1],), by_block, counts, *grid)
    kernels.launch("rank", grid, experts, by_block, counts, positions, num_choices, *grid)


def permute_backward(grad: Tensor, positions: Tensor) -> Tensor:
    grad, positions, dim = grad.contiguous(), positions.contiguous(), grad.shape[1]
    *tokens, k = positions.shape
    grad_x = grad.new_empty((*tokens, dim))
    dtype = dtype_name(grad)
    kernels = kernels_of(CombineShape(k=k, dim=dim, dtype=dtype, weights=accumulator(dtype)), grad)
    grid = (positions.numel() // k, *kernels.blocks(dim, "BLOCK_D"))
    kernels.launch("add_rows", grid, grad, positions, grad_x)
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
