"""Guests: whose rows are where, and which experts are copied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.tables import each_row

from moec.passes.guests.assignment import assigned, quotas_of, segments, slot_numbers
from moec.passes.guests.choice import LayerTime, Room, choose_guests, traffic_of
from moec.passes.guests.split import in_shares, kept_here, split

TIME = LayerTime(row=1.0, sent=0.5, guest=100.0)
HOMES = np.arange(8) // 2


def drawn(seed: int, ranks: int = 4, experts: int = 8) -> np.ndarray:
    """Rows of each rank's tokens, of which one expert gets about half."""
    draw = np.random.default_rng(seed)
    shares = draw.permutation(1 / np.arange(1, experts + 1) ** 2)
    return draw.poisson(shares * 1000, (ranks, experts))


@examples(20, 400)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 9))
def test_rows_are_split_in_whole_numbers_among_copies(seed: int, ranks: int, experts: int):
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 50, experts) * draw.integers(0, 2, experts)
    copies = draw.random((experts, ranks)) < 0.4
    copies[np.arange(experts), draw.integers(0, ranks, experts)] = True
    quotas = split(counts, copies)
    assert quotas.dtype == np.int64
    assert (quotas >= 0).all()
    assert not quotas[~copies].any()
    assert (quotas.sum(1) == counts).all()
    # The busiest rank has no more than with an even split, or than the rows of one expert.
    evenly = copies * (counts / copies.sum(1))[:, None]
    assert quotas.sum(0).max() <= max(evenly.sum(0).max(), counts.max()) + experts


def test_an_expert_everywhere_evens_all_ranks_out() -> None:
    copies = HOMES[:, None] == np.arange(4)
    counts = np.array([1000, 10, 20, 30, 40, 50, 60, 70])
    copies[0] = True
    assert split(counts, copies).sum(0).tolist() == [320, 320, 320, 320]
    of_ranks = np.full((4, 8), 10)
    assert kept_here(of_ranks, split(of_ranks.sum(0), copies)).sum(0).tolist() == [20, 20, 20, 20]


@each_row("slots", [Room(1, 4), Room(2, 3), Room(3, 12), Room(0, 0)])
def test_guests_fit_their_slots_and_take_no_longer_than_none(slots: Room) -> None:
    for seed in range(5):
        counts = drawn(seed)
        chosen = choose_guests(counts, HOMES, slots, TIME)
        guests = chosen.copies & (HOMES[:, None] != np.arange(4))
        assert chosen.copies[np.arange(8), HOMES].all()
        assert guests.sum() <= slots.most
        assert (guests.sum(0) <= slots.of_rank).all()
        none = choose_guests(counts, HOMES, Room(0, 0), TIME)
        assert chosen.seconds <= none.seconds
        assert (chosen.seconds < none.seconds) == bool(guests.any())


def test_a_guest_that_costs_more_than_it_relieves_is_not_chosen() -> None:
    counts = drawn(1)
    dear = LayerTime(row=1.0, sent=0.5, guest=1e9)
    assert traffic_of(choose_guests(counts, HOMES, Room(2, 8), dear).copies, HOMES) == 0
    hidden = LayerTime(row=1.0, sent=0.5, guest=500.0, hidden=1.0)
    assert (
        choose_guests(counts, HOMES, Room(2, 8), hidden).seconds
        < choose_guests(counts, HOMES, Room(2, 8), LayerTime(row=1.0, sent=0.5, guest=500.0)).seconds
    )


@each_row(("guests", "sent"), [([1], 1), ([1, 2], 1), ([1, 2, 3], 1)])
def test_who_has_several_guests_is_sent_once(guests: list[int], sent: float) -> None:
    copies = HOMES[:, None] == np.arange(4)
    copies[0, guests] = True
    assert traffic_of(copies, HOMES) == pytest.approx(sent)


@examples(20, 400)
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 3), st.integers(1, 4))
def test_what_ranks_send_is_what_others_expect(seed: int, ranks: int, own: int, guests: int) -> None:
    draw, experts = np.random.default_rng(seed), ranks * own
    counts = draw.integers(0, 9, (ranks, experts)) * draw.integers(0, 2, experts)
    slots = np.full((ranks, own + guests), -1)
    slots[:, :own] = np.arange(experts).reshape(ranks, own)
    for rank, row in enumerate(slots):
        others = draw.permutation([e for e in range(experts) if e // own != rank])[:guests]
        row[own : own + len(others)] = np.where(draw.random(len(others)) < 0.3, -1, others)
    numbers = slot_numbers(slots, experts)
    shares = np.where(slots >= 0, draw.integers(0, 3, slots.shape), 0) * draw.integers(0, 2)
    shares[:, :own] += shares.any()
    found = [assigned(counts, slots, shares, numbers, rank) for rank in range(ranks)]
    quotas = quotas_of(counts.sum(0), shares, numbers)
    assert (quotas.sum(1) == counts.sum(0)).all()
    for rank, each in enumerate(found):
        assert (each.sent.sum(1) == counts[rank]).all()
        assert (np.diag(each.sent[:, [rank] * experts]) == np.minimum(counts[rank], quotas[:, rank])).all()
        for place, expert in enumerate(slots[rank]):
            sent = [0 if expert < 0 else other.sent[expert, rank] for other in found]
            assert each.received[:, place].tolist() == sent
        of_rank = segments(each.sent, numbers, rank)
        assert (of_rank.lengths.sum(1) == counts[rank]).all()
        assert (of_rank.slots[:, 0] == numbers[:, rank]).all()
    assert (sum(each.sent for each in found) == quotas).all()


def test_shares_give_whole_numbers_in_their_proportions() -> None:
    counts, shares = np.array([10, 7, 0, 3]), np.array([[1, 1, 1], [0, 2, 1], [1, 0, 0], [5, 0, 0]])
    assert in_shares(counts, shares).tolist() == [[4, 3, 3], [0, 5, 2], [0, 0, 0], [3, 0, 0]]
