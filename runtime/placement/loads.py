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
        """Those of a step and one group of ranks [ranks of ep, experts], rounded down."""
        rows = self.counts[place.number].numpy()[np.array(place.groups)]
        return rows.sum(0) // (self.steps * len(place.groups))

    def plus(self, other: Loads) -> Loads:
        """The loads of the steps of both."""
        counts = {number: rows + other.counts[number] for number, rows in self.counts.items()}
        return Loads(counts, self.steps + other.steps)


class CountedLoads:
    """Counts the rows of one rank's tokens, until they are gathered."""

    def __init__(self, places: Sequence[Place], ranks: int, job: str, device: torch.device) -> None:
        self._places, self._ranks, self._job, self._device = places, ranks, job, device
        self.rows, self._of_step = dict[int, Tensor](), dict[int, Tensor]()
        self.steps = 0
        """The steps that have ended since loads were gathered last."""

    def add(self, results: Mapping[OutputKey, Any]) -> None:
        """Adds the rows of a forward pass in training."""
        for place in self._places:
            counts = results.get(("counts", place.number, None))
            if counts is not None:
                _add(self._of_step, place.number, unwrapped(counts))

    def begin_step(self) -> None:
        """Forgets passes of no step: those of one that an exception has ended, and of the script's own."""
        self._of_step.clear()

    def end_step(self) -> None:
        """Counts the passes of a step."""
        self.steps += 1
        for number, counts in self._of_step.items():
            _add(self.rows, number, counts)
        self._of_step.clear()

    def gathered(self) -> Loads:
        """The loads of all ranks. A collective of all ranks."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
        flat = torch.cat([self.rows.get(p.number, nothing.expand(p.shape.experts)).flatten() for p in self._places])
        gathered = flat.new_empty((self._ranks, flat.numel()))
        with collective("gather_loads", self._job + STAGE, "the placement of experts") as peers:
            all_gather_single(gathered.view(-1), flat, group=peers)
        parts = torch.split(gathered.cpu(), [p.shape.experts for p in self._places], 1)
        return Loads({place.number: part for place, part in zip(self._places, parts, strict=True)}, self.steps)

    def clear(self) -> None:
        """Begins to count again."""
        self.rows.clear()
        self.steps = 0


def _add(rows: dict[int, Tensor], number: int, counts: Tensor) -> None:
    earlier = rows.get(number)
    rows[number] = counts if earlier is None else earlier + counts
