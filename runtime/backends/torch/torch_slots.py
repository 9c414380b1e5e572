"""Choices of slots, and the rows that ranks send each other for them, which the host computes
(`passes/guests/assignment.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.passes.guests.assignment import Assigned, assigned, segments, slot_numbers
from moec.runtime.backends.torch.torch_rows import stable_order

Assignment = tuple[Tensor, Tensor, Tensor]
"""Choices of slots [B, S, k], the rows that each source sends to each slot [ranks, slots of a rank], and the splits
[2, ranks] on CPU."""


def assign_slots(experts: Tensor, gathered: Tensor, slots: Tensor, rank: int) -> Assignment:
    """The slots of the choices of `rank`. `gathered` [ranks, E]: rows of each rank's choices; the host waits for it."""
    all_counts, (of_slots, shares) = gathered.cpu().numpy(), slots.numpy()
    numbers = slot_numbers(of_slots, all_counts.shape[1])
    if of_slots.size == len(numbers):
        return _without_guests(experts, all_counts, of_slots, numbers, rank)
    found = assigned(all_counts, of_slots, shares, numbers, rank)
    splits = torch.from_numpy(found.sent.sum(0)), torch.from_numpy(found.received.sum(1))
    received = torch.from_numpy(found.received).to(experts.device, non_blocking=True)
    return _placed(experts, found, numbers, rank), received, torch.stack(splits)


def _without_guests(experts: Tensor, all_counts: Any, slots: Any, numbers: Any, rank: int) -> Assignment:
    """The results where each expert has one slot."""
    slot_of = torch.from_numpy(numbers.max(1)).to(experts.device, non_blocking=True)
    placed = torch.where(experts >= 0, slot_of[experts.clamp(min=0)], -1)
    received = np.ascontiguousarray(all_counts[:, slots[rank]])
    splits = torch.from_numpy(np.stack([all_counts[rank][slots].sum(1), received.sum(1)]))
    return placed, torch.from_numpy(received).to(experts.device, non_blocking=True), splits


def _placed(experts: Tensor, found: Assigned, numbers: Any, rank: int) -> Tensor:
    """The slot of each choice: the rows of an expert, in order, fill its segments."""
    choices, (lengths, of_segments) = experts.reshape(-1), segments(found.sent, numbers, rank)
    by_expert = stable_order(choices.where(choices >= 0, len(numbers)), len(numbers) + 1)
    rows = int(lengths.sum())
    repeats, slots = (
        torch.from_numpy(array.flatten()).to(experts.device, non_blocking=True) for array in (lengths, of_segments)
    )
    placed = torch.full_like(choices, -1)
    placed[by_expert[:rows]] = slots.repeat_interleave(repeats, output_size=rows)
    return placed.view(experts.shape)
