"""What a rank chooses for its share of the layers: their tables, of loads, in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moec.codegen.plan import Plan
from moec.grammar.spec import Shadow
from moec.passes.degrees.guest_slots import guest_words, moves_of
from moec.passes.guests.choice import Slots, choose_guests
from moec.passes.guests.homes import Moves, choose_homes, placed_slots
from moec.passes.guests.layer_time import layer_times
from moec.passes.guests.split import split
from moec.runtime.placement.place import Place


class Choice(NamedTuple):
    """The table of a layer (`Guests.table`), the seconds of a step that it is predicted to take, and those without
    guests and with all experts in their first homes."""

    table: Any
    seconds: float
    unplaced: float


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


Choices = Mapping[int, Choice]
"""Those of layers, by their numbers."""

Homes = dict[int, Any]
"""The slots at home of layers [ranks, experts of a rank], by their numbers."""


@dataclass
class Chooser:
    """Chooses by the words of a plan's `adapt`, and the rates of its cluster.

    `horizons`: of layers of which a move was undone, in steps; others have that of the file.
    """

    plan: Plan
    places: Sequence[Place]
    horizons: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        adapt = self.plan.spec.adapt
        assert adapt is not None
        self._greedy, self._words = moves_of(self.plan.spec), guest_words(self.plan.spec)
        self._split, self._horizon = adapt.split, adapt.horizon
        self._times = layer_times(self.plan.program, self.plan.spec)

    def choices(self, loads: Loads, homes: Homes, moves: Loads | None) -> Choices:
        """Those of these `places`. `homes`: those of now, which change by the loads `moves`, if at all."""
        return {place.number: self._choice(place, loads, homes[place.number], moves) for place in self.places}

    def halve_horizon(self, layer: int) -> None:
        """Asks of later moves of a layer that they pay in half of the time."""
        self.horizons[layer] = self.horizons.get(layer, self._horizon) / 2

    def _choice(self, place: Place, loads: Loads, at_home: Any, moves: Loads | None) -> Choice:
        rows = loads.of(place)
        time, homes = self._times[place.body], np.empty(place.experts, np.int64)
        homes[at_home] = np.arange(place.ranks)[:, None]
        slots = Slots(place.guests, sum(_most(word, place) for word in self._words), passed_on=False)
        if moves is not None and self._greedy is not None:
            when = Moves(self._greedy.threshold, self.horizons.get(place.number, self._horizon))
            homes = choose_homes(moves.of(place), homes, slots, time, when).homes
            at_home = placed_slots(at_home, homes)
        found, first = choose_guests(rows, homes, slots, time), np.arange(place.experts) // place.own
        without = choose_guests(rows, first, Slots(0, 0, passed_on=False), time)
        return Choice(self._table_of(found.copies, homes, at_home, rows.sum(0), place), found.seconds, without.seconds)

    def _table_of(self, copies: Any, homes: Any, at_home: Any, rows: Any, place: Place) -> Any:
        """The table of `copies` [experts, ranks]: homes, then guests in their order; and shares, as the file's `split`
        says. An expert without rows has its share at home."""
        slots = np.full(place.shape, -1, np.int64)
        slots[:, : place.own] = at_home
        for rank in range(place.ranks):
            guests = np.flatnonzero(copies[:, rank] & (homes != rank))
            slots[rank, place.own : place.own + len(guests)] = guests
        shares = np.zeros(place.shape, np.int64)
        if self._split == "even":
            shares[slots >= 0] = 1
        elif self._split == "old":
            quotas = split(rows, copies)
            quotas[np.arange(place.experts), homes] += rows == 0
            shares = np.where(slots >= 0, quotas[slots, np.arange(place.ranks)[:, None]], 0)
        return np.stack([slots, shares])


def _most(word: Any, place: Place) -> int:
    """The most guests of a layer that the word allows."""
    return int(word.most) * (place.ranks - 1) if isinstance(word, Shadow) else int(word.slots)
