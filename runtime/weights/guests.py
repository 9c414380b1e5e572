"""Weights of a layer's guests: sent to the slots of other ranks before a pass, and their gradients back home after it.

A guest has an expert's weights in the compute dtype, for one step. Its home has the master, the gradient and the
optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moec.runtime.ranks.watch import collective

Rows = list[list[int]]
"""For each rank of the group, indices of experts or of slots."""


MOST_SHARES = 1 << 31
"""The largest share of a slot: times rows it has to fit 64 bits."""


def homes(ranks: int, experts: int) -> Tensor:
    """The slots [ranks, experts of a rank] of a layer without guests: rank r has experts r·E/n to (r + 1)·E/n."""
    return torch.arange(experts, device="cpu").view(ranks, experts // ranks)


def with_shares(slots: Tensor) -> Tensor:
    """The table of these slots, whose rows are split by the step's own counts."""
    return torch.stack([slots, torch.zeros_like(slots)])


def slots_complaint(table: Tensor, ranks: int, experts: int, guests: int) -> str:
    """Why slots with shares cannot be those of a layer with so many guests of a rank; empty where they can."""
    own = experts // ranks
    if table.dtype != torch.int64 or table.shape != (2, ranks, own + guests):
        return f"are {table.dtype} {list(table.shape)}, not int64 {[2, ranks, own + guests]}"
    slots, shares = table
    if bool(((shares < 0) | (shares > MOST_SHARES)).any()):
        return "have shares below 0, or too large ones"
    if not torch.equal(slots[:, :own].cpu(), homes(ranks, experts)):
        return f"do not begin with each rank's own {own} experts"
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


@dataclass(frozen=True, slots=True, eq=False)
class Guests:
    """The guests of a layer on one rank: of the parameters `indices`, whose dim 0 are this rank's experts.

    `table` int64 [2, ranks, slots of a rank], alike on every rank of `group`: the expert of each slot, each rank's own
    in order first, and shares of rows (`AssignSlots`).
    """

    table: Tensor
    rank: int
    own: int
    indices: Sequence[int]
    group: str
    site: str
    sends: Rows = field(init=False)
    """The own experts of which each rank has a guest, in the order of its slots."""
    receives: Rows = field(init=False)
    """The own slots whose experts are at home on each rank, in order."""

    def __post_init__(self) -> None:
        slots, own, ranks = self.slots.numpy(), self.own, range(len(self.slots))
        guests = slots[:, own:]
        home = np.where(guests >= 0, guests // own, -1)
        sends = [(guests[r][home[r] == self.rank] % own).tolist() for r in ranks]
        receives = [(own + np.flatnonzero(home[self.rank] == r)).tolist() for r in ranks]
        object.__setattr__(self, "sends", sends)
        object.__setattr__(self, "receives", receives)

    @property
    def slots(self) -> Tensor:
        """The expert of each slot [ranks, slots of a rank], −1 for none."""
        return self.table[0]

    @property
    def num_slots(self) -> int:
        """The slots of a rank."""
        return int(self.table.shape[2])

    def hosted(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The weights with those of guests behind this rank's own: dim 0 are its slots. Empty slots are zeros."""
        results, own = list(weights), [weights[index] for index in self.indices]
        taken = [slot for slots in self.receives for slot in slots]
        empty = sorted({*range(self.own, self.num_slots)}.difference(taken))
        received = self._exchanged(own, self.sends, self.receives, "all_to_all of guests")
        for index, part, rows in zip(self.indices, own, received, strict=True):
            slots = part.new_empty((self.num_slots, *part.shape[1:]))
            slots[: self.own] = part
            for slot in empty:
                slots[slot].zero_()
            for slot, row in zip(taken, rows, strict=True):
                slots[slot].copy_(row)
            results[index] = slots
        return results

    def returned(
        self, gradients: Sequence[Tensor | None], needed: Sequence[bool], zeros: Callable[[int, int], Tensor]
    ) -> list[Tensor | None]:
        """The gradients of this rank's own experts, to which those of their guests are added in the order of ranks.

        Each gradient has this rank's slots along dim 0. Only those that are `needed` are sent, also where this rank has
        none: `zeros` makes one, of a parameter and a number of slots.
        """
        results, indices = list(gradients), [index for index in self.indices if needed[index]]
        if not indices:
            return results
        parts = [zeros(i, self.num_slots) if (g := gradients[i]) is None else g for i in indices]
        received = self._exchanged(parts, self.receives, self.sends, "all_to_all of guests' gradients")
        experts = [expert for of_rank in self.sends for expert in of_rank]
        for index, part, rows in zip(indices, parts, received, strict=True):
            own = part[: self.own].clone()
            for expert, row in zip(experts, rows, strict=True):
                own[expert] += row
            results[index] = own
        return results

    def _exchanged(self, parts: Sequence[Tensor], sends: Rows, receives: Rows, name: str) -> list[list[Tensor]]:
        """Rows of each part from all ranks, in the order of ranks; one collective. Few rows, each of many elements: one
        copy of each."""
        sizes = [part[0].numel() for part in parts]
        sent = [row for rows in sends for row in rows]
        flat = parts[0].new_empty((len(sent), sum(sizes)))
        for row, line in zip(sent, flat, strict=True):
            for part, piece in zip(parts, torch.split(line, sizes), strict=True):
                piece.view(part.shape[1:]).copy_(part[row])
        got = flat.new_empty((sum(map(len, receives)), sum(sizes)))
        with collective(name, self.group, self.site) as peers:
            dist.all_to_all_single(got, flat, [len(r) for r in receives], [len(r) for r in sends], group=peers)
        pieces = [torch.split(line, sizes) for line in got]
        return [[piece[index].view(part.shape[1:]) for piece in pieces] for index, part in enumerate(parts)]
