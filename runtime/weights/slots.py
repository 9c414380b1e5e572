"""Slots of experts: where each rank of a group has which expert."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_SHARES = 1 << 31
"""The largest share of a slot: times rows it has to fit 64 bits."""


def slots_in_order(ranks: int, experts: int) -> Tensor:
    """The slots [ranks, experts of a rank] where every expert is in its first home: rank r has experts r·E/n to
    (r + 1)·E/n."""
    return torch.arange(experts, device="cpu").view(ranks, experts // ranks)


def table_of(slots: Tensor) -> Tensor:
    """The table of these slots without shares: rows are split by the step's own counts."""
    return torch.stack([slots, torch.zeros_like(slots)])


def with_homes(table: Tensor, homes: Tensor) -> Tensor:
    """The table with other `homes` [ranks, experts of a rank]. Guests stay, but for those that are at home on their
    rank then, and experts keep their shares."""
    (slots, shares), own = table, homes.shape[1]
    guests, of_guests = slots[:, own:], shares[:, own:]
    at_home = (guests[:, :, None] == homes[:, None]).any(2)
    of_homes = torch.zeros_like(homes.flatten())
    of_homes[slots[:, :own].flatten()] = shares[:, :own].flatten()
    of_homes.index_add_(0, guests[at_home], of_guests[at_home])
    slots = torch.cat([homes, torch.where(at_home, -1, guests)], 1)
    return torch.stack([slots, torch.cat([of_homes[homes], torch.where(at_home, 0, of_guests)], 1)])


def slots_complaint(table: Tensor, ranks: int, experts: int, guests: int, *, moves: bool = False) -> str:
    """Why slots with shares cannot be those of a layer with so many guests of a rank; empty where they can. `moves`:
    whether its experts may have other homes than the first ones."""
    own = experts // ranks
    if table.dtype != torch.int64 or table.shape != (2, ranks, own + guests):
        return f"are {table.dtype} {list(table.shape)}, not int64 {[2, ranks, own + guests]}"
    slots, shares = table
    if bool(((shares < 0) | (shares > MOST_SHARES)).any()):
        return "have shares below 0, or too large ones"
    at_home = slots[:, :own].flatten().sort().values if moves else slots[:, :own].flatten()
    if not torch.equal(at_home, torch.arange(experts)):
        return f"do not begin with the homes of all {experts} experts" + (", in order" if not moves else "")
    if bool(((slots < -1) | (slots >= experts)).any()):
        return f"name an expert that is not among 0 to {experts - 1}, nor -1 for none"
    for rank, row in enumerate(slots.tolist()):
        taken = [expert for expert in row if expert >= 0]
        if twice := sorted({expert for expert in taken if taken.count(expert) > 1}):
            return f"have expert {twice[0]} twice on rank {rank} of the group"
    given = torch.zeros(experts, dtype=torch.int64).index_add_(0, slots.clamp(min=0).flatten(), shares.flatten())
    if bool(shares.any()) and not bool(given.all()):
        return f"give no slot a share of expert {int(given.argmin())}"
    return ""
