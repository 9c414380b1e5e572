"""Weights of a layer's guests: sent to the slots of other ranks before a pass, and their gradients back home after it.

A guest has an expert's weights in the compute dtype, for one step. Its home has the master, the gradient and the
optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moec.runtime.weights.guest_routes import Routes


@dataclass(frozen=True, slots=True, eq=False)
class Guests:
    """The guests of a layer on one rank: of the parameters `indices`, whose dim 0 are this rank's experts.

    `table` int64 [2, ranks, slots of a rank], alike on every rank of `group`: the expert of each slot, the homes first,
    and shares of rows (`AssignSlots`). `homes` [ranks, experts of a rank]: those for which they were chosen.
    """

    table: Tensor
    rank: int
    homes: Tensor
    indices: Sequence[int]
    group: str
    site: str
    routes: Routes = field(init=False)

    def __post_init__(self) -> None:
        routes = Routes(self.slots.numpy(), self.own, self.rank, self.group, self.site)
        object.__setattr__(self, "routes", routes)

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
        results, own = list(weights), [weights[index].contiguous() for index in self.indices]
        taken = {expert.slots[self.rank] for expert in self.routes.here}
        slots = [part.new_empty((self.num_slots, *part.shape[1:])) for part in own]
        for index, part, of_slots in zip(self.indices, own, slots, strict=True):
            of_slots[: self.own] = part
            for slot in {*range(self.own, self.num_slots)}.difference(taken):
                of_slots[slot].zero_()
            results[index] = of_slots
        self.routes.to_guests(own, slots)
        return results

    def returned(
        self, gradients: Sequence[Tensor | None], needed: Sequence[bool], zeros: Callable[[int, int], Tensor]
    ) -> list[Tensor | None]:
        """The gradients of this rank's own experts, to which those of their guests are added.

        Each gradient has this rank's slots along dim 0. Only those that are `needed` are sent, also where this rank has
        none: `zeros` makes one, of a parameter and a number of slots.
        """
        results, indices = list(gradients), [index for index in self.indices if needed[index]]
        if not indices:
            return results
        parts = [zeros(i, self.num_slots) if (g := gradients[i]) is None else g.contiguous() for i in indices]
        own = [part[: self.own].clone(memory_format=torch.contiguous_format) for part in parts]
        self.routes.to_homes(parts, own)
        for index, part in zip(indices, own, strict=True):
            results[index] = part
        return results
