"""What a rank chooses for its share of the layers, by their loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moec.codegen.plan import Plan
from moec.grammar.spec import Shadow
from moec.passes.degrees.guest_slots import greedy_of, guest_words
from moec.passes.guests.choice import Room, choose_guests, seconds_at_home
from moec.passes.guests.homes import WhenToMove, choose_homes, placed_slots
from moec.passes.guests.layer_time import layer_times
from moec.passes.guests.split import split
from moec.runtime.placement.loads import Loads
from moec.runtime.placement.place import Place


class Choice(NamedTuple):
    """The table of a layer (`Guests.table`), the seconds of a step that it is predicted to take, and those without
    guests and with all experts in their first homes."""

    table: Any
    seconds: float
    unplaced: float


Choices = Mapping[int, Choice]
"""Those of layers, by their numbers."""

AtHome = dict[int, Any]
"""The expert of each slot at home [ranks, experts of a rank] in numpy, of layers by their numbers."""


class Chooser:
    """Chooses for `places`, by the words of a plan's `adapt` and the rates of its cluster."""

    def __init__(self, plan: Plan, places: Sequence[Place]) -> None:
        adapt = plan.spec.adapt
        assert adapt is not None
        self._places = places
        self._greedy, self._words = greedy_of(plan.spec), guest_words(plan.spec)
        self._split, self._horizon = adapt.split, adapt.horizon
        self._times = layer_times(plan.program, plan.spec)
        self.horizons = dict[int, float]()
        """Of layers of which a move was undone, in steps; others have that of the file."""

    def choices(self, loads: Loads, at_home: AtHome, loads_of_moves: Loads | None) -> Choices:
        """The choices for `places`, with experts `at_home` now. Homes change by `loads_of_moves`; None: they stay."""
        return {p.number: self._choice(p, loads, at_home[p.number], loads_of_moves) for p in self._places}

    def halve_horizon(self, layer: int) -> None:
        """Asks of later moves of a layer that they pay in half of the time."""
        self.horizons[layer] = self.horizons.get(layer, self._horizon) / 2

    def _choice(self, place: Place, loads: Loads, at_home: Any, loads_of_moves: Loads | None) -> Choice:
        counts, time = loads.of(place), self._times[place.body]
        room = Room(place.shape.guests, sum(_most(word, place) for word in self._words))
        homes = np.empty(place.shape.experts, np.int64)
        homes[at_home] = np.arange(place.shape.ranks)[:, None]
        if loads_of_moves is not None and self._greedy is not None:
            when = WhenToMove(self._greedy.threshold, self.horizons.get(place.number, self._horizon))
            homes = choose_homes(loads_of_moves.of(place), homes, room, time, when).homes
            at_home = placed_slots(at_home, homes)
        chosen = choose_guests(counts, homes, room, time)
        unplaced = seconds_at_home(counts, np.arange(place.shape.experts) // place.own, time)
        return Choice(self._table_of(chosen.copies, homes, at_home, counts.sum(0), place), chosen.seconds, unplaced)

    def _table_of(self, copies: Any, homes: Any, at_home: Any, rows: Any, place: Place) -> Any:
        """The table of `copies` [experts, ranks]: homes, then guests in their order; and shares, as the file's `split`
        says. An expert without rows has its share at home."""
        slots = np.full(place.table_shape, -1, np.int64)
        slots[:, : place.own] = at_home
        for rank in range(len(slots)):
            guests = np.flatnonzero(copies[:, rank] & (homes != rank))
            slots[rank, place.own : place.own + len(guests)] = guests
        shares = np.zeros(place.table_shape, np.int64)
        if self._split == "even":
            shares[slots >= 0] = 1
        elif self._split == "old":
            quotas = split(rows, copies)
            quotas[np.arange(len(homes)), homes] += rows == 0
            shares = np.where(slots >= 0, quotas[slots, np.arange(len(slots))[:, None]], 0)
        return np.stack([slots, shares])


def _most(word: Any, place: Place) -> int:
    """The most guests of a layer that the word allows."""
    return int(word.most) * (place.shape.ranks - 1) if isinstance(word, Shadow) else int(word.slots)
