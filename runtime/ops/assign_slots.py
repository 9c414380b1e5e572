"""The operator `assign_slots`: choices of experts to choices of slots (`passes/guests/assignment.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.passes.ir.operator_schema import schema_of
from moec.passes.ir.ops import AssignSlots
from moec.runtime.backends import select
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
    return counts_and_slots(experts, counts, gathered, slots, peers.rank())


def rows_of_experts(experts: Tensor, num_experts: int) -> Tensor:
    """The rows of choices [B, S, k] by expert, int64 [1, num_experts]; choices of −1 have none."""
    rows: Tensor = select(experts.device.type).count_queues(experts.reshape(1, -1, 1), num_experts)
    return rows.view(1, num_experts)


def counts_and_slots(experts: Tensor, counts: Tensor, gathered: Tensor, slots: Tensor, rank: int) -> Results:
    """The results of the operator on a rank, of the counts [ranks, E] of all ranks."""
    placed, received, splits = select(experts.device.type).assign_slots(experts, gathered, slots, rank)
    return placed, counts, received, splits


assign_slots = define(schema_of(AssignSlots), fake=_fake, check=_check, kernel=_assign_slots, gives_integers=True)
"""Choose a slot for each choice of an expert: one of those on which `slots` puts the expert.

experts [B, S, k] int64, −1 for none; slots [2, n, S] int64 on CPU, alike on all ranks: the expert of each slot, −1 for
none, and its share of the expert's rows ->
  - placed [B, S, k] int64: r · S + s for slot s of rank r, −1 for none;
  - counts [1, E] int64: this rank's rows of each expert;
  - received [n, S] int64: the rows that each source sends for each of this rank's slots;
  - splits [2, n] int64 on CPU: the rows to send to, and to receive from, each peer.
"""
