"""Which experts are guests on which ranks in the next steps: the candidate that is predicted to take the least time.

Candidates relieve the busiest rank by one guest after the other, then bring experts to where most of their rows are;
others have the busiest experts everywhere (shadows, FasterMoE, He et al. 2022, section 4.2). No guests is one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moec.passes.guests.split import Copies, kept_here, split, spread

Homes = Any
"""The rank of each expert [experts]."""

DIRECT = 1
"""The guests of an expert up to which its home sends to each; of more, their ranks pass on parts to each other. On the
trace of SmartMoE's artifact, EP 16 with nothing hidden, 1 is 7 % faster than 2."""

BUSY = 0.99
"""The share of the busiest rank's rows from which on others are as busy."""

TRIED = 6
"""The experts of the busiest rank of which one gets a guest, those with most rows there first."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """What decides a layer's seconds: of a row's products and of a row over the wire, in both passes; of a guest's
    weights and its gradient; the share of the products beside which guests travel; and an expert that moves."""

    row: float
    sent: float
    guest: float
    hidden: float = 0.0
    move: float = 0.0

    def seconds(self, rows: float, sent: float, guests: float) -> float:
        """With so many rows on the busiest rank, rows over its wire, and guests that it sends or gets."""
        products = rows * self.row
        return products + sent * self.sent + max(0.0, guests * self.guest - self.hidden * products)


class Room(NamedTuple):
    """How many guests a rank has room for, and all ranks together."""

    of_rank: int
    most: int


class Chosen(NamedTuple):
    """Who has weights of which expert, the homes among them, and the predicted seconds."""

    copies: Copies
    seconds: float


def choose_guests(counts: Any, homes: Homes, room: Room, time: LayerTime) -> Chosen:
    """The guests of a layer in the next steps. `counts` [ranks, experts]: rows of each rank's tokens, as expected."""
    without = _Layer(counts, homes)
    best, copies = time.seconds(*without.figures()), without.copies
    for layers in (_relieved(counts, homes, room), _everywhere(counts, homes, room)):
        for layer in layers:
            if (seconds := time.seconds(*layer.figures())) < best:
                best, copies = seconds, layer.copies.copy()
    return Chosen(copies, best)


def seconds_at_home(counts: Any, homes: Homes, time: LayerTime) -> float:
    """The seconds of a layer without guests. `counts` [ranks, experts]: rows of each rank's tokens."""
    return time.seconds(*_Layer(counts, homes).figures())


def traffic_of(copies: Copies, homes: Homes) -> float:
    """The guests that the busiest rank sends or gets."""
    guests = copies & (homes[:, None] != np.arange(copies.shape[1]))
    layer = _Layer(np.zeros(copies.shape[::-1], np.int64), homes)
    for expert in np.flatnonzero(guests.any(1)).tolist():
        layer.add(expert, np.flatnonzero(guests[expert]))
    return layer.figures().guests


class _Figures(NamedTuple):
    """Rows of the busiest rank, rows over the wire of the busiest, and guests that the busiest sends or gets."""

    rows: float
    sent: float
    guests: float


class _Layer:
    """A layer with some guests: whose rows are where, and what that takes."""

    def __init__(self, counts: Any, homes: Homes) -> None:
        ranks, experts = counts.shape
        self.counts, self.homes = counts, homes
        self.of_experts, self.of_ranks = counts.sum(0), counts.sum(1)
        self.copies = np.zeros((experts, ranks), bool)
        self.copies[np.arange(experts), homes] = True
        self.quotas = np.where(self.copies, self.of_experts[:, None], 0)
        self.rows = self.quotas.sum(0)
        self.local = np.minimum(counts.T, self.quotas).sum(0)
        self.guests = np.zeros(experts, int)
        self.got, self.gave = np.zeros(ranks), np.zeros(ranks)

    def add(self, expert: int, ranks: Any) -> None:
        """Makes an expert a guest of these ranks, and splits its rows again."""
        self._send(expert, -1)
        self.copies[expert, ranks] = True
        self.got[ranks] += 1
        self.guests[expert] += len(ranks)
        self._send(expert, 1)

        (at,) = self.copies[expert].nonzero()
        own, before = self.counts[at, expert], self.quotas[expert, at]
        others = self.rows[at] - before
        after = np.array(spread(int(self.of_experts[expert]), others.tolist()))
        self.quotas[expert, at], self.rows[at] = after, others + after
        self.local[at] += np.minimum(own, after) - np.minimum(own, before)

    def split_all(self) -> None:
        """Splits the rows of all experts anew, well enough to compare: where all ranks have equally many rows, one
        more copy would get none."""
        self.quotas = split(self.of_experts, self.copies, passes=2)
        self.rows, self.local = self.quotas.sum(0), kept_here(self.counts, self.quotas).sum(0)

    def _send(self, expert: int, sign: int) -> None:
        """Adds or takes away what ranks send of an expert."""
        guests, home = self.guests[expert], self.homes[expert]
        if guests <= DIRECT:
            self.gave[home] += sign * guests
        else:
            passed = sign * (guests - 1) / guests
            self.gave[self.copies[expert]] += passed
            self.gave[home] += sign - passed

    def figures(self) -> _Figures:
        sent = max(float((self.rows - self.local).max()), float((self.of_ranks - self.local).max()))
        return _Figures(float(self.rows.max()), sent, max(float(self.gave.max()), float(self.got.max())))


def _relieved(counts: Any, homes: Homes, room: Room) -> Iterator[_Layer]:
    """A guest after the other: of an expert of the busiest rank on the one with the fewest rows, while that helps; then
    where most rows of an expert come from."""
    layer, left = _Layer(counts, homes), room.most
    while left and (found := _relief(layer, room.of_rank)):
        layer.add(*found)
        left -= 1
        yield layer
    number = left
    while left:
        free = ~layer.copies & (layer.got < room.of_rank)
        gain = np.where(free, counts.T, 0)
        expert, rank = divmod(int(gain.argmax()), len(counts))
        if gain[expert, rank] == 0:
            break
        layer.add(expert, [rank])
        left -= 1
        if (number - left).bit_count() == 1:  # one, two, four and so on more
            layer.split_all()
            yield layer
    layer.split_all()
    yield layer


def _relief(layer: _Layer, of_rank: int) -> tuple[int, list[int]] | None:
    """The expert and the rank of the next guest."""
    hot = int(layer.rows.argmax())
    quotas = layer.quotas[:, hot]
    for expert in (-quotas).argsort(kind="stable")[:TRIED].tolist():
        free = ~layer.copies[expert] & (layer.got < of_rank)
        rows = np.where(free, layer.rows, layer.rows[hot])
        rank = int(rows.argmin())
        if quotas[expert] and rows[rank] < BUSY * layer.rows[hot]:
            return expert, [rank]
    return None


def _everywhere(counts: Any, homes: Homes, room: Room) -> Iterator[_Layer]:
    """The busiest experts on all ranks: one, two, and so on."""
    layer, ranks = _Layer(counts, homes), counts.shape[0]
    others = ranks - 1
    for number, expert in enumerate(np.argsort(-layer.of_experts, kind="stable").tolist(), 1):
        at = np.flatnonzero(~layer.copies[expert])
        if number * others > room.most or (layer.got[at] >= room.of_rank).any():
            return
        layer.add(expert, at)
        layer.split_all()
        yield layer
