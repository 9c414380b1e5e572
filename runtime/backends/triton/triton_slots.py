"""Choices of slots by rendered kernels: the host waits for splits alone."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.codegen.kernels.row_shapes import MOST_RANKS, SlotsShape
from moec.passes.guests.split import PASSES
from moec.runtime.backends.torch import torch_slots
from moec.runtime.backends.torch.torch_slots import InSlots
from moec.runtime.backends.triton.triton_launch import kernels_of, too_many
from moec.runtime.backends.triton.triton_queues import Queues


def assign_slots(experts: Tensor, gathered: Tensor, slots: Tensor, rank: int) -> InSlots:
    """As on the host, which computes it for slots without guests, or with shares."""
    ranks, num_experts = gathered.shape
    of_slots, shares = slots
    if too_many(num_experts) or ranks > MOST_RANKS or of_slots.numel() == num_experts or shares.numpy().any():
        return torch_slots.assign_slots(experts, gathered, slots, rank)
    shape = SlotsShape(experts=num_experts, ranks=ranks, slots=of_slots.shape[1])
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
