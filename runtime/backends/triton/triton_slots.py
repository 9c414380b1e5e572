"""Choices of slots by rendered kernels: the host waits for splits alone."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.codegen.kernels.kernel_shape import complaint
from moec.codegen.kernels.row_shapes import SlotsShape
from moec.passes.guests.split import PASSES
from moec.runtime.backends.torch import torch_slots
from moec.runtime.backends.torch.torch_slots import Assignment
from moec.runtime.backends.triton.triton_launch import kernels_of
from moec.runtime.backends.triton.triton_queues import Queues


def assign_slots(experts: Tensor, gathered: Tensor, slots: Tensor, rank: int) -> Assignment:
    """As on the host, which computes it where there are no guests, where slots have shares, and where kernels do not
    exist for so many experts or ranks."""
    ranks, num_experts = gathered.shape
    of_slots, shares = slots
    shape = SlotsShape(experts=num_experts, ranks=ranks, slots=of_slots.shape[1])
    if of_slots.numel() == num_experts or shares.numpy().any() or complaint(shape) is not None:
        return torch_slots.assign_slots(experts, gathered, slots, rank)
    kernels, counts = kernels_of(shape, gathered), gathered.contiguous()
    table = of_slots.to(gathered.device, non_blocking=True).contiguous()
    numbers, quotas, sent, ends, of_segments = (counts.new_empty((num_experts, ranks)) for _ in range(5))
    totals, keys, order = (counts.new_empty(num_experts) for _ in range(3))
    received = counts.new_zeros(of_slots.shape)

    def launch(kernel: str, grid: tuple[int], *arguments: object) -> None:
        kernels.launch(kernel, grid, *arguments, **shape.options(kernel, ""))

    launch("number", (num_experts,), counts, table, numbers, totals, keys, quotas)
    launch("split", (1,), numbers, totals, keys, order, quotas, PASSES)
    launch("fill", (num_experts,), counts, quotas, numbers, sent, ends, of_segments, received, rank)
    positions = Queues.single(experts, num_experts).positions(experts.shape)
    at = torch.searchsorted(ends.view(-1), positions, right=True)
    placed = torch.where(positions < 0, -1, of_segments.view(-1)[at])
    return placed, received, torch.stack([sent.sum(0), received.sum(1)]).cpu()
