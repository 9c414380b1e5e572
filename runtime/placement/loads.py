"""The rows that experts of a model got in the last steps: what placements are chosen by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moec.passes.ir import OutputKey
from moec.runtime.ops.dense_collectives import all_gather_single
from moec.runtime.placement.place import Place
from moec.runtime.ranks.groups import STAGE
from moec.runtime.ranks.watch import collective
from moec.runtime.refused_derivatives import unwrapped


class Loads(NamedTuple):
    """The rows of each rank's tokens by expert [ranks, experts], by layer, of so many steps."""

    counts: Mapping[int, Tensor]
    steps: int

    def of(self, place: Place) -> Any:
        """Those of a step and one group of ranks [ranks of ep, experts]."""
        rows = self.counts[place.number].numpy()[np.array(place.groups)]
        return rows.sum(0) // (self.steps * len(place.groups))


def sum_of(several: Sequence[Loads]) -> Loads:
    """The loads of all these steps."""
    first, *_ = several
    counts = {number: torch.stack([loads.counts[number] for loads in several]).sum(0) for number in first.counts}
    return Loads(counts, sum(loads.steps for loads in several))


class CountedLoads:
    """Counts the rows of one rank's tokens, until they are gathered."""

    def __init__(self, places: Sequence[Place], ranks: int, job: str, device: torch.device) -> None:
        self._places, self._ranks, self._job, self._device = places, ranks, job, device
        self._rows = dict[int, Tensor]()
        self.steps = 0
        """The steps that have ended since loads were gathered last."""

    def add(self, results: Mapping[OutputKey, Any]) -> None:
        """Adds the rows of a forward pass in training."""
        for place in self._places:
            counts = results.get(("counts", place.number, None))
            if counts is not None:
                earlier = self._rows.get(place.number)
                self._rows[place.number] = unwrapped(counts if earlier is None else earlier + counts)

    def gathered(self) -> Loads:
        """The loads of all ranks. A collective of all ranks."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
        flat = torch.cat([self._rows.get(p.number, nothing.expand(p.shape.experts)).flatten() for p in self._places])
        gathered = flat.new_empty((self._ranks, flat.numel()))
        with collective("gather_loads", self._job + STAGE, "the placement of experts") as peers:
            all_gather_single(gathered.view(-1), flat, group=peers)
        parts = torch.split(gathered.cpu(), [p.shape.experts for p in self._places], 1)
        return Loads({place.number: part for place, part in zip(self._places, parts, strict=True)}, self.steps)

    def clear(self) -> None:
        """Begins to count again."""
        self._rows.clear()
        self.steps = 0
