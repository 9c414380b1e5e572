"""Weights of a layer's guests: sent to the slots of other ranks before a pass, and their gradients back home after it.

A guest has an expert's weights in the compute dtype, for one step. Its home has the master, the gradient and the
optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from moec.runtime.weights.slots import Rows, exchange_rows


@dataclass(frozen=True, slots=True, eq=False)
class Guests:
    """The guests of a layer on one rank: of the parameters `indices`, whose dim 0 are this rank's experts.

    `table` int64 [2, ranks, slots of a rank], alike on every rank of `group`: the expert of each slot, the homes first,
    and shares of rows (`AssignSlots`). `homes`: those for which they were chosen.
    """

    table: Tensor
    rank: int
    homes: Tensor
    indices: Sequence[int]
    group: str
    site: str
    sends: Rows = field(init=False)
    """The own experts of which each rank has a guest, in the order of its slots."""
    receives: Rows = field(init=False)
    """The own slots whose experts are at home on each rank, in order."""

    def __post_init__(self) -> None:
        slots, own, ranks = self.slots.numpy(), self.own, range(len(self.slots))
        guests, place = slots[:, own:], np.argsort(slots[:, :own], axis=None)
        home = np.where(guests >= 0, place[guests] // own, -1)
        sends = [(place[guests[r][home[r] == self.rank]] % own).tolist() for r in ranks]
        receives = [(own + np.flatnonzero(home[self.rank] == r)).tolist() for r in ranks]
        object.__setattr__(self, "sends", sends)
        object.__setattr__(self, "receives", receives)

    @property
    def own(self) -> int:
        """The experts that are at home on a rank."""
        return int(self.homes.shape[1])

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
        received = exchange_rows(own, self.sends, self.receives, "all_to_all of guests", self.group, self.site)
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
        name = "all_to_all of guests' gradients"
        received = exchange_rows(parts, self.receives, self.sends, name, self.group, self.site)
        experts = [expert for of_rank in self.sends for expert in of_rank]
        for index, part, rows in zip(indices, parts, received, strict=True):
            own = part[: self.own].clone()
            for expert, row in zip(experts, rows, strict=True):
                own[expert] += row
            results[index] = own
        return results
