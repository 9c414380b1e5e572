"""Which experts change homes: an exchange of experts between ranks, if it saves more within a horizon than it takes.

Candidates exchange an expert of the busiest rank for one of the emptiest, again and again. Two place all experts: the
largest first (SmartMoE, Zhai et al. 2023, algorithm 1), on the ranks that have most of them already; and each where
most of its rows come from, which pays beside guests that level the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moec.passes.guests.choice import Homes, LayerTime, Slots, choose_guests
from moec.passes.loads.placements import greedy as packed
from moec.passes.loads.placements import rows_of_homes


@dataclass(frozen=True, slots=True)
class Moves:
    """When experts move. `threshold`: the largest load of a rank over the mean up to which they stay. `horizon`: the
    steps within which a move has to save more than it takes."""

    threshold: float
    horizon: float


class ChosenHomes(NamedTuple):
    """Where experts should live, and the seconds that this is predicted to save within the horizon."""

    homes: Homes
    saved: float


def choose_homes(counts: Any, homes: Homes, slots: Slots, time: LayerTime, moves: Moves) -> ChosenHomes:
    """The homes of the next steps; those of now where no move pays. `counts` [ranks, experts]: rows of each rank's
    tokens, as expected. Times are those with the guests that `slots` has room for."""
    rows = rows_of_homes(counts.sum(0)[None], homes[None], len(counts))[0]
    best = ChosenHomes(homes, 0.0)
    if rows.max() <= moves.threshold * rows.mean():
        return best
    now = choose_guests(counts, homes, slots, time).seconds
    for candidate in _candidates(counts, homes):
        saved = (now - choose_guests(counts, candidate, slots, time).seconds) * moves.horizon
        saved -= moved(homes, candidate, len(counts)) * time.move
        if saved > best.saved:
            best = ChosenHomes(candidate, saved)
    return best


def moved(before: Homes, after: Homes, ranks: int) -> int:
    """The experts that the rank with most of them sends; it gets as many."""
    return int(np.bincount(before[before != after], minlength=ranks).max())


def placed_slots(slots: Any, homes: Homes) -> Any:
    """The expert of each slot [ranks, experts of a rank] for new homes. Experts that stay keep their slots of `slots`;
    those that come fill the others in order."""
    ranks, _ = slots.shape
    found = np.where(homes[slots] == np.arange(ranks)[:, None], slots, -1)
    for rank, row in enumerate(found):
        here = np.flatnonzero(homes == rank)
        row[row < 0] = here[~np.isin(here, row)]
    return found


def _candidates(counts: Any, homes: Homes) -> Iterator[Homes]:
    """After one, two, four and more exchanges, and after the last one; then the two that place all experts."""
    loads, ranks = counts.sum(0), len(counts)
    stays, homes, number = homes, homes.copy(), 0
    rows = rows_of_homes(loads[None], homes[None], ranks)[0]
    while number < len(loads) and (pair := _exchange(loads, homes, rows)):
        homes[list(pair)] = homes[list(pair)[::-1]]
        rows = rows_of_homes(loads[None], homes[None], ranks)[0]
        number += 1
        if number.bit_count() == 1:
            yield homes.copy()
    if number.bit_count() > 1:
        yield homes
    yield _renamed(stays, packed(loads[None], ranks)[0], ranks)
    yield _nearest(counts)


def _nearest(counts: Any) -> Homes:
    """Experts on the ranks from which most of their rows come, those with most rows there first."""
    ranks, experts = counts.shape
    homes, room = np.full(experts, -1), np.full(ranks, experts // ranks)
    for flat in np.argsort(-counts.T, axis=None, kind="stable").tolist():
        expert, rank = divmod(flat, ranks)
        if homes[expert] < 0 and room[rank]:
            homes[expert] = rank
            room[rank] -= 1
    return homes


def _exchange(loads: Any, homes: Homes, rows: Any) -> tuple[int, int] | None:
    """The expert of the busiest rank and that of the emptiest whose exchange levels the two most; None if none does."""
    hot, cold = int(rows.argmax()), int(rows.argmin())
    given, taken = np.flatnonzero(homes == hot), np.flatnonzero(homes == cold)
    more = loads[given][:, None] - loads[taken]
    larger = np.maximum(rows[hot] - more, rows[cold] + more)
    at = int(larger.argmin())
    if larger.flat[at] >= rows[hot]:
        return None
    return int(given[at // len(taken)]), int(taken[at % len(taken)])


def _renamed(now: Homes, new: Homes, ranks: int) -> Homes:
    """The same sets of experts, on ranks that have most of them now."""
    same = np.zeros((ranks, ranks), np.int64)
    np.add.at(same, (new, now), 1)
    names, left = np.full(ranks, -1), np.ones(ranks, bool)
    for flat in np.argsort(-same, axis=None, kind="stable").tolist():
        of_new, rank = divmod(flat, ranks)
        if names[of_new] < 0 and left[rank]:
            names[of_new], left[rank] = rank, False
    return names[new]
