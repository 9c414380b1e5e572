"""Queues of experts and padded rows by rendered kernels: nothing is sorted, and nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.codegen.kernels_padded import PlacesShape, QueuesShape
from moec.runtime.backends import torch_padded
from moec.runtime.backends.torch_padded import places_of
from moec.runtime.backends.triton_launch import Kernels, dtype_name, kernels_of, too_many

# ---- queues ------------------------------------------------------------------------------------------


def count_queues(experts: Tensor, num_experts: int) -> Tensor:
    if too_many(num_experts):
        return torch_padded.count_queues(experts, num_experts)
    _, _, totals = _counted(experts.contiguous(), num_experts)
    return totals[:, None]


def queue_starts(counts: Tensor, groups: int) -> Tensor:
    batch, pieces, k, num_experts = counts.shape
    if too_many(num_experts):
        return torch_padded.queue_starts(counts, groups)
    counts, starts = counts.contiguous(), counts.new_empty(counts.shape)
    if counts.numel():
        groups = groups or batch
        kernels = kernels_of(QueuesShape(experts=num_experts, k=k), counts)
        grid = (groups, *kernels.blocks(num_experts, "WIDE_E"))
        kernels.launch("start", grid, counts, starts, batch // groups * pieces)
    return starts


def keep_choices(experts: Tensor, starts: Tensor, *how: int) -> Tensor:
    num_experts = starts.shape[3]
    if too_many(num_experts):
        return torch_padded.keep_choices(experts, starts, *how)
    capacity, _ = places_of(*experts.shape, num_experts, *how, 1)
    return _kept(experts.contiguous(), starts.contiguous(), capacity)


def largest_load(experts: Tensor, num_experts: int) -> Tensor:
    if too_many(num_experts):
        return torch_padded.largest_load(experts, num_experts)
    _, _, totals = _counted(experts.contiguous().view(1, -1, 1), num_experts)
    return totals.amax()


def _kept(experts: Tensor, starts: Tensor, capacity: int) -> Tensor:
    """Experts, -1 where as many as the capacity stand before."""
    kernels, by_block, _ = _counted(experts, starts.shape[3])
    kept = torch.empty_like(experts)
    arguments = (experts, by_block, starts, kept, experts.shape[1], by_block.shape[2], capacity)
    kernels.launch("keep", _grid(by_block), *arguments)
    return kept


def _counted(experts: Tensor, num_experts: int) -> tuple[Kernels, Tensor, Tensor]:
    """Of each queue's choices of each expert: those in earlier blocks [B·k, E, blocks], and all [B, k, E]."""
    batch, tokens, k = experts.shape
    kernels = kernels_of(QueuesShape(experts=num_experts, k=k), experts)
    blocks = kernels.blocks(tokens)
    by_block = experts.new_empty((batch * k, num_experts, *blocks), dtype=torch.int32)
    totals = experts.new_empty((batch, k, num_experts))
    kernels.launch("count", _grid(by_block), experts, by_block, tokens, *blocks)
    kernels.launch("scan", (batch * k, *kernels.blocks(num_experts, "BLOCK_E")), by_block, totals, *blocks)
    return kernels, by_block, totals


def _grid(by_block: Tensor) -> tuple[int]:
    """A program for each block of each queue."""
    return (by_block.shape[0] * by_block.shape[2],)


# ---- rows in places ----------------------------------------------------------------------------------


def permute_padded(x: Tensor, experts: Tensor, starts: Tensor, *how: int) -> tuple[Tensor, Tensor, Tensor]:
    num_experts = starts.shape[3]
    if not x.dtype.is_floating_point or too_many(num_experts):
        return torch_padded.permute_padded(x, experts, starts, *how)
    capacity, places = places_of(*experts.shape, num_experts, *how)
    return _placed(x, _kept(experts.contiguous(), starts.contiguous(), capacity), num_experts, places)


def permute_dynamic(x: Tensor, experts: Tensor, places: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if not x.dtype.is_floating_point or too_many(num_experts):
        return torch_padded.permute_dynamic(x, experts, places, num_experts)
    return _placed(x, experts.contiguous(), num_experts, int(places))


def _placed(x: Tensor, kept: Tensor, num_experts: int, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """The kept choices' rows in the places of their experts, in the order of their tokens: all in one queue."""
    x, k, dim = x.contiguous(), kept.shape[2], x.shape[2]
    num_choices, num_rows = kept.numel(), num_experts * places
    queues, by_block, totals = _counted(kept.view(1, -1, 1), num_experts)
    counts, positions = totals.view(1, num_experts), torch.empty_like(kept)
    queues.launch("place", _grid(by_block), kept, by_block, positions, num_choices, by_block.shape[2], places)
    rows = x.new_empty((num_experts, places, dim))
    kernels, tokens = _kernels(x, k), num_choices // k
    _, width = _programs(kernels, tokens, dim)
    zeros = kernels.blocks(num_rows, "ROWS")[0]
    kernels.launch("fill", (tokens + zeros, width), x, positions, counts, rows, tokens, num_rows, places)
    return rows, counts, positions


def permute_padded_backward(grad: Tensor, positions: Tensor) -> Tensor:
    grad, positions, dim = grad.contiguous(), positions.contiguous(), grad.shape[2]
    *shape, k = positions.shape
    grad_x, kernels = grad.new_empty((*shape, dim)), _kernels(grad, k)
    grid = _programs(kernels, positions.numel() // k, dim)
    kernels.launch("permute_padded_backward", grid, grad, positions, grad_x)
    return grad_x


def combine_padded(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    rows, positions, weights, dim = rows.contiguous(), positions.contiguous(), weights.contiguous(), rows.shape[2]
    *shape, k = positions.shape
    out, kernels = rows.new_empty((*shape, dim)), _kernels(rows, k)
    grid = _programs(kernels, positions.numel() // k, dim)
    kernels.launch("combine_padded", grid, rows, positions, weights, out)
    return out


def combine_padded_backward(grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    grad, rows, positions, weights = (t.contiguous() for t in (grad, rows, positions, weights))
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    k, num_rows = positions.shape[2], rows.shape[0] * rows.shape[1]
    kernels, tokens = _kernels(rows, k), positions.numel() // k
    taken = torch.zeros(num_rows, dtype=torch.int8, device=rows.device)
    kernels.launch("mark", kernels.blocks(positions.numel()), positions, taken, positions.numel())
    grid = (tokens + kernels.blocks(num_rows, "ROWS")[0],)
    tensors = (grad, rows, positions, weights, taken, grad_rows, grad_weights)
    kernels.launch("combine_padded_backward", grid, *tensors, tokens, num_rows)
    return grad_rows, grad_weights


def _kernels(x: Tensor, k: int) -> Kernels:
    return kernels_of(PlacesShape(k=k, dim=x.shape[2], dtype=dtype_name(x)), x)


def _programs(kernels: Kernels, tokens: int, dim: int) -> tuple[int, int]:
    """A program for each block of columns of each token."""
    return tokens, *kernels.blocks(dim, "BLOCK_D")
