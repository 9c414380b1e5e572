"""What a rank chooses for its share of the layers: their tables, of loads, in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
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
    """The table of a layer (`Guests.table`), the seconds of a step that it is predicted to take, and those with all
    experts in their first homes."""

    table: Any
    seconds: float
    at_home: float


Choices = Mapping[int, Choice]
"""Those of layers, by their numbers."""

Homes = dict[int, Any]
"""The slots at home of layers [ranks, experts of a rank], by their numbers."""


@dataclass
class Chooser:
    """Chooses by the words of a plan's `adapt`, and the rates of its cluster.

    `horizons`: those of layers of which a move was undone, in steps; others have that of the file.
    """

    plan: Plan
    places: Sequence[Place]
    horizons: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        adapt = self.plan.spec.adapt
        assert adapt is not None
        self.moves, self._words = moves_of(self.plan.spec), guest_words(self.plan.spec)
        self._split, self._horizon = adapt.split, adapt.horizon
        self._times = layer_times(self.plan.program, self.plan.spec)

    def choices(self, counts: Mapping[int, Tensor], steps: int, homes: Homes, *, move: bool) -> Choices:
        """Those of these `places`. `counts`: the rows of each rank's tokens by expert [ranks, experts], of so many
        steps; `homes`: those of now. `move`: whether these may change."""
        return {place.number: self._choice(place, counts[place.number], steps, homes[place.number], move)
                for place in self.places}  # fmt: skip

    def halve_horizon(self, layer: int) -> None:
        """Asks of later moves of a layer that they pay in half of the time."""
        self.horizons[layer] = self.horizons.get(layer, self._horizon) / 2

    def _choice(self, place: Place, counts: Tensor, steps: int, at_home: Any, move: bool) -> Choice:
        rows = counts.numpy()[np.array(place.groups)].sum(0) // (steps * len(place.groups))
        time, homes = self._times[place.body], np.empty(place.experts, np.int64)
        homes[at_home] = np.arange(place.ranks)[:, None]
        slots = Slots(place.guests, sum(_most(word, place) for word in self._words), passed_on=False)
        if move and self.moves is not None:
            moves = Moves(self.moves.threshold, self.horizons.get(place.number, self._horizon))
            homes = choose_homes(rows, homes, slots, time, moves).homes
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
    """The most guests of a layer."""
    return int(word.most) * (place.ranks - 1) if isinstance(word, Shadow) else int(word.slots)
