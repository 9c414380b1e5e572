"""Experts with a capacity by rendered kernels: queues, and rows in their places."""

from __future__ import annotations

from torch import Tensor

from moec.codegen.kernels.row_shapes import QueuesShape
from moec.runtime.backends.torch import torch_padded
from moec.runtime.backends.torch.torch_padded import places_of
from moec.runtime.backends.triton.triton_launch import kernels_of, too_many
from moec.runtime.backends.triton.triton_queues import Queues
from moec.runtime.backends.triton.triton_rows import Places


def count_queues(experts: Tensor, num_experts: int) -> Tensor:
    if too_many(num_experts):
        return torch_padded.count_queues(experts, num_experts)
    return Queues.of(experts, num_experts).totals[:, None]


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
    capacity, _ = places_of(*experts.shape, num_experts, *how)
    return Queues.of(experts, num_experts).keep(starts, capacity)


def largest_load(experts: Tensor, num_experts: int) -> Tensor:
    if too_many(num_experts):
        return torch_padded.largest_load(experts, num_experts)
    return Queues.single(experts, num_experts).totals.amax()


def permute_padded(x: Tensor, experts: Tensor, starts: Tensor, *how: int) -> tuple[Tensor, Tensor, Tensor]:
    num_experts = starts.shape[3]
    if not x.dtype.is_floating_point or too_many(num_experts):
        return torch_padded.permute_padded(x, experts, starts, *how)
    _, places = places_of(*experts.shape, num_experts, *how)
    return _placed(x, keep_choices(experts, starts, *how), num_experts, places)


def permute_dynamic(x: Tensor, experts: Tensor, places: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if not x.dtype.is_floating_point or too_many(num_experts):
        return torch_padded.permute_dynamic(x, experts, places, num_experts)
    return _placed(x, experts, num_experts, int(places))


def _placed(x: Tensor, experts: Tensor, num_experts: int, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copies the kept choices' rows to the places of their experts, in token order, by one queue of all choices."""
    queues = Queues.single(experts, num_experts)
    positions, counts = queues.positions(experts.shape, places), queues.totals.view(1, num_experts)
    rows = x.new_empty((num_experts, places, x.shape[2]))
    Places.of(x, positions).fill(x, rows, counts)
    return rows, counts, positions


def permute_padded_backward(grad: Tensor, positions: Tensor) -> Tensor:
    return Places.of(grad, positions).add_rows(grad)


def combine_padded(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    return Places.of(rows, positions, weights).combine(rows, weights)


def combine_padded_backward(grad: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return Places.of(rows, positions, weights).combine_backward(grad, rows, weights, spare=True)
