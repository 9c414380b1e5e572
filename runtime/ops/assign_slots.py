"""The operator `assign_slots`: choices of experts to choices of slots (`passes/guests/assignment.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.passes.guests.assignment import Assigned, assigned, segments, slot_numbers
from moec.passes.ir.operator_schema import schema_of
from moec.passes.ir.ops import AssignSlots
from moec.runtime.backends.torch.torch_padded import rank_within
from moec.runtime.ops.dense_collectives import all_gather_single
from moec.runtime.ops.registry import check, define
from moec.runtime.ranks.groups import resolve
from moec.runtime.ranks.watch import Layer, collective

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _check(experts: Tensor, slots: Tensor, num_experts: int, group: str, site: str = "", layer: Layer = None) -> None:
    check(
        experts.dim() == 3 and experts.dtype == torch.int64,
        lambda: f"moec::assign_slots: experts must be int64 [B, S, k], not {experts.dtype} {list(experts.shape)}",
    )
    size = resolve(group).size()
    check(
        slots.dim() == 3 and slots.shape[:2] == (2, size) and slots.dtype == torch.int64 and slots.device.type == "cpu",
        lambda: (
            f"moec::assign_slots: slots must be int64 [2, {size}, S] on the host, not {slots.dtype} {list(slots.shape)}"
        ),
    )


def _fake(experts: Tensor, slots: Tensor, num_experts: int, group: str, site: str = "", layer: Layer = None) -> Results:
    _, ranks, of_rank = slots.shape
    return (
        torch.empty_like(experts),
        experts.new_empty((1, num_experts)),
        experts.new_empty((ranks, of_rank)),
        experts.new_empty((2, ranks), device="cpu"),
    )


def _assign_slots(
    experts: Tensor, slots: Tensor, num_experts: int, group: str, site: str = "", layer: Layer = None
) -> Results:
    counts = rows_of_experts(experts, num_experts)
    peers = resolve(group)
    gathered = counts.new_empty((peers.size(), num_experts))
    with collective("gather_counts", group, site, layer) as members:
        all_gather_single(gathered, counts, group=members)
    return counts_and_slots(experts, counts, gathered.cpu(), slots, peers.rank())


def rows_of_experts(experts: Tensor, num_experts: int) -> Tensor:
    """The rows of choices [B, S, k] by expert, int64 [1, num_experts]; choices of −1 have none."""
    return torch.bincount(experts.reshape(-1) + 1, minlength=num_experts + 1)[None, 1:].clone()


def counts_and_slots(experts: Tensor, counts: Tensor, gathered: Tensor, slots: Tensor, rank: int) -> Results:
    """The results of the operator on a rank, of the counts [ranks, E] of all ranks on the host."""
    all_counts, (of_slots, shares) = gathered.numpy(), slots.numpy()
    numbers = slot_numbers(of_slots, counts.shape[1])
    if of_slots.size == len(numbers):
        return _without_guests(experts, counts, all_counts, of_slots, numbers, rank)
    found = assigned(all_counts, of_slots, shares, numbers, rank)
    splits = torch.from_numpy(found.sent.sum(0)), torch.from_numpy(found.received.sum(1))
    received = torch.from_numpy(found.received).to(experts.device, non_blocking=True)
    return _placed(experts, found, numbers, rank), counts, received, torch.stack(splits)


def _without_guests(experts: Tensor, counts: Tensor, all_counts: Any, slots: Any, numbers: Any, rank: int) -> Results:
    """The results where each expert has one slot."""
    slot_of = torch.from_numpy(numbers.max(1)).to(experts.device, non_blocking=True)
    placed = torch.where(experts >= 0, slot_of[experts.clamp(min=0)], -1)
    received = np.ascontiguousarray(all_counts[:, slots[rank]])
    splits = torch.from_numpy(np.stack([all_counts[rank][slots].sum(1), received.sum(1)]))
    return placed, counts, torch.from_numpy(received).to(experts.device, non_blocking=True), splits


def _placed(experts: Tensor, found: Assigned, numbers: object, rank: int) -> Tensor:
    """The slot of each choice: the j-th row of an expert is in the first segment that ends behind it."""
    chosen, of_experts = experts.reshape(-1), segments(found.sent, numbers, rank)
    span = len(chosen) + 1
    ends = torch.from_numpy(of_experts.ends).to(experts.device, non_blocking=True)
    slot = torch.from_numpy(of_experts.slots).to(experts.device, non_blocking=True)
    ends = ends + span * torch.arange(len(ends), device=ends.device)[:, None]
    is_row = chosen >= 0
    keys = torch.where(is_row, chosen, 0) * span + rank_within(torch.where(is_row, chosen, len(ends)))
    at = torch.searchsorted(ends.flatten(), torch.where(is_row, keys, 0), right=True)
    return torch.where(is_row, slot.flatten()[at], -1).view(experts.shape)


assign_slots = define(schema_of(AssignSlots), fake=_fake, check=_check, kernel=_assign_slots, gives_integers=True)
"""Choose a slot for each choice of an expert: one of those on which `slots` puts the expert.

experts [B, S, k] int64, −1 for none; slots [2, n, S] int64 on CPU, alike on all ranks: the expert of each slot, −1 for
none, and its share of the expert's rows ->
  - placed [B, S, k] int64: r · S + s for slot s of rank r, −1 for none;
  - counts [1, E] int64: this rank's rows of each expert;
  - received [n, S] int64: the rows that each source sends for each of this rank's slots;
  - splits [2, n] int64 on CPU: the rows to send to, and to receive from, each peer.
"""
