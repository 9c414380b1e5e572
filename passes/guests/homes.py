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

from moec.passes.guests.choice import Homes, LayerTime, Room, choose_guests
from moec.passes.loads.placements import greedy as packed
from moec.passes.loads.placements import rows_of_homes


@dataclass(frozen=True, slots=True)
class WhenToMove:
    """When experts move. `threshold`: the largest load of a rank over the mean up to which they stay. `horizon`: the
    steps within which a move has to save more than it takes."""

    threshold: float
    horizon: float


class ChosenHomes(NamedTuple):
    """Where experts should live, and the seconds that this is predicted to save within the horizon."""

    homes: Homes
    saved: float


def choose_homes(counts: Any, homes: Homes, room: Room, time: LayerTime, when: WhenToMove) -> ChosenHomes:
    """The homes of the next steps; those of now where no move pays. `counts` [ranks, experts]: rows of each rank's
    tokens, as expected. Times are those with the guests that there is `room` for."""
    rows = _rows(counts.sum(0), homes, len(counts))
    best = ChosenHomes(homes, 0.0)
    if rows.max() <= when.threshold * rows.mean():
        return best
    now = choose_guests(counts, homes, room, time).seconds
    for candidate in _candidates(counts, homes):
        saved = (now - choose_guests(counts, candidate, room, time).seconds) * when.horizon
        saved -= sent_by_busiest(homes, candidate, len(counts)) * time.move
        if saved > best.saved:
            best = ChosenHomes(candidate, saved)
    return best


def sent_by_busiest(before: Homes, after: Homes, ranks: int) -> int:
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
    new, number = homes.copy(), 0
    while number < len(loads) and (pair := _exchange(loads, new, _rows(loads, new, ranks))):
        new[list(pair)] = new[list(pair)[::-1]]
        number += 1
        if number.bit_count() == 1:
            yield new.copy()
    if number.bit_count() > 1:
        yield new
    yield _renamed(homes, packed(loads[None], ranks)[0], ranks)
    yield _best_assigned(counts.T, len(loads) // ranks)


def _rows(loads: Any, homes: Homes, ranks: int) -> Any:
    """The rows of each rank [ranks]."""
    return rows_of_homes(loads[None], homes[None], ranks)[0]


def _best_assigned(scores: Any, most: int) -> Any:
    """The rank of each item, at most so many on a rank: the largest of all `scores` [items, ranks] first."""
    items, ranks = scores.shape
    found, left = np.full(items, -1), np.full(ranks, most)
    for flat in np.argsort(-scores, axis=None, kind="stable").tolist():
        item, rank = divmod(flat, ranks)
        if found[item] < 0 and left[rank]:
            found[item] = rank
            left[rank] -= 1
    return found


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
    return _best_assigned(same, 1)[new]
