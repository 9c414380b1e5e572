"""Which rows of a rank's tokens go to which copy of their expert, and which rows a rank receives.

All ranks compute this from the same counts, in whole numbers, so that what one sends is what the other expects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moec.passes.guests.split import in_shares, kept_here, split

Slots = Any
"""The expert of each slot [ranks, slots of a rank], −1 for none; no expert twice on a rank."""

Shares = Any
"""In which proportions slots get rows of their experts [ranks, slots of a rank]; all 0: as evens the ranks out."""


class Assigned(NamedTuple):
    """One rank's part: the rows of its tokens by expert and by the rank that computes them [experts, ranks], and the
    rows that it receives [sources, slots of a rank]."""

    sent: Any
    received: Any


def slot_numbers(slots: Slots, experts: int) -> Any:
    """The number of the slot of each expert on each rank, counted rank by rank [experts, ranks]; −1 where it has
    none."""
    ranks, of_rank = slots.shape
    numbers = np.full((experts, ranks), -1, np.int64)
    taken = np.flatnonzero(slots.ravel() >= 0)
    numbers[slots.ravel()[taken], taken // of_rank] = taken
    return numbers


def assigned(counts: Any, slots: Slots, shares: Shares, numbers: Any, rank: int) -> Assigned:
    """What `rank` sends and receives. `counts` [ranks, experts]: rows of each rank's tokens; `numbers`: those of
    `slot_numbers`.

    An expert's own copies take their ranks' rows first. What is left of sources, in order, fills what is left of
    copies, in order: an overlap of two intervals for each pair.
    """
    quotas = quotas_of(counts.sum(0), shares, numbers)
    own = kept_here(counts, quotas)
    left_of_sources, left_of_copies = counts.T - own, quotas - own
    source_ends, copy_ends = left_of_sources.cumsum(1), left_of_copies.cumsum(1)
    source_starts, copy_starts = source_ends - left_of_sources, copy_ends - left_of_copies

    sent = np.minimum(source_ends[:, rank, None], copy_ends) - np.maximum(source_starts[:, rank, None], copy_starts)
    np.maximum(sent, 0, out=sent)
    sent[:, rank] += own[:, rank]

    here = np.flatnonzero(slots[rank] >= 0)
    experts = slots[rank, here]
    ends, starts = copy_ends[experts, rank, None], copy_starts[experts, rank, None]
    taken = np.minimum(source_ends[experts], ends) - np.maximum(source_starts[experts], starts)
    np.maximum(taken, 0, out=taken)
    taken[:, rank] += own[experts, rank]
    received = np.zeros(slots.shape, np.int64)
    received[:, here] = taken.T
    return Assigned(sent, received)


def quotas_of(counts: Any, shares: Shares, numbers: Any) -> Any:
    """The rows of each expert that each rank computes [experts, ranks], of the rows of each expert."""
    if not shares.any():
        return split(counts, numbers >= 0)
    return in_shares(counts, np.where(numbers >= 0, shares.ravel()[numbers], 0))


class Segments(NamedTuple):
    """The rows of each expert of one rank's tokens in turn: how many are in each segment, and its slot
    [experts, ranks]."""

    lengths: Any
    slots: Any


def segments(sent: Any, numbers: Any, rank: int) -> Segments:
    """The segments of each expert's rows: first those that stay on `rank`, then those of other ranks in order."""
    ranks = sent.shape[1]
    order = np.r_[rank, 0:rank, rank + 1 : ranks]
    return Segments(sent[:, order], numbers[:, order])
