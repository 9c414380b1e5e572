"""Homes that move: which experts change ranks, and when a move is undone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.tables import each_row

from moec.passes.guests.choice import LayerTime, Room, choose_guests
from moec.passes.guests.homes import WhenToMove, choose_homes, placed_slots, sent_by_busiest
from moec.passes.guests.place_guests import SlotShape
from moec.passes.loads.placements import rows_of_homes
from moec.runtime.placement.guard import STEPS, MoveGuard, is_slower
from moec.runtime.placement.loads import CountedLoads
from moec.runtime.placement.place import Place

NO_GUESTS = Room(0, 0)
HOMES = np.arange(8) // 2
BUSY = np.array([900, 800, 10, 20, 30, 40, 50, 60])
"""Loads of which the first rank has nine tenths: one of its two busy experts should leave."""


def chosen(loads: np.ndarray, move: float, when: WhenToMove, room: Room = NO_GUESTS) -> tuple[np.ndarray, float]:
    """The homes for these loads, whose rows come from all ranks alike, and what they save."""
    counts = np.stack([loads] * 4)
    return choose_homes(counts, HOMES, room, LayerTime(row=1.0, sent=0.1, guest=1e9, move=move), when)


def test_busy_experts_part() -> None:
    homes, saved = chosen(BUSY, 1.0, WhenToMove(1.1, 10))
    rows = rows_of_homes(BUSY[None], homes[None], 4)[0]
    assert rows.max() < 1000
    assert np.bincount(homes).tolist() == [2, 2, 2, 2]
    assert sent_by_busiest(HOMES, homes, 4) == 1
    assert saved > 0


@each_row(
    ("move", "threshold", "horizon"),
    [(1.0, 4.0, 10.0), (1e9, 1.1, 10.0), (1e4, 1.1, 0.1)],
)
def test_experts_stay_where_loads_are_even_enough_or_a_move_does_not_pay(
    move: float, threshold: float, horizon: float
) -> None:
    homes, saved = chosen(BUSY, move, WhenToMove(threshold, horizon))
    assert homes.tolist() == HOMES.tolist()
    assert saved == 0


def test_without_rows_experts_stay() -> None:
    assert chosen(np.zeros(8, np.int64), 0.0, WhenToMove(1.0, 10))[0].tolist() == HOMES.tolist()


@examples(20, 400)
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 4))
def test_homes_stay_balanced_and_those_that_stay_keep_their_slots(seed: int, ranks: int, own: int) -> None:
    draw = np.random.default_rng(seed)
    slots = draw.permutation(ranks * own).reshape(ranks, own)
    homes = np.empty(ranks * own, np.int64)
    homes[slots] = np.arange(ranks)[:, None]
    counts = draw.integers(0, 9, (ranks, ranks * own)) ** 3
    time = LayerTime(1.0, 0.1, 1.0, move=0.5)
    found = choose_homes(counts, homes, NO_GUESTS, time, WhenToMove(1.0, 3.0))
    assert np.bincount(found.homes, minlength=ranks).tolist() == [own] * ranks
    new = placed_slots(slots, found.homes)
    assert sorted(new.ravel().tolist()) == list(range(ranks * own))
    assert (found.homes[new] == np.arange(ranks)[:, None]).all()
    stays = found.homes[slots] == homes[slots]
    assert (new[stays] == slots[stays]).all()
    before, after = (choose_guests(counts, h, NO_GUESTS, time).seconds for h in (homes, found.homes))
    assert found.saved == pytest.approx(3 * (before - after) - 0.5 * sent_by_busiest(homes, found.homes, ranks))
    assert found.saved > 0 or (found.homes == homes).all()


def test_experts_go_to_where_their_rows_come_from() -> None:
    counts = np.zeros((4, 8), np.int64)
    counts[np.arange(8) % 4, np.arange(8)] = 100
    counts[0, 0] = 110
    time = LayerTime(row=1.0, sent=1.0, guest=1e9, move=1.0)
    found = choose_homes(counts, HOMES, NO_GUESTS, time, WhenToMove(1.0, 10.0))
    assert found.homes.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


class Steps:
    """A clock of steps that take the given seconds each, and a guard that sees them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.guard = MoveGuard(lambda: self.now)

    def take(self, seconds: float, number: int = STEPS) -> None:
        for _ in range(number):
            self.guard.start()
            self.now += seconds
            self.guard.stop()


@each_row(("after", "slower"), [(1.04, False), (1.06, True), (0.5, False)])
def test_a_guard_compares_ten_steps_before_and_after(after: float, slower: bool) -> None:
    steps = Steps()
    steps.take(1.0)
    steps.guard.watch({3: torch.tensor([[0], [1]])})
    assert not steps.guard.is_due
    steps.take(after, STEPS - 1)
    assert not steps.guard.is_due
    steps.take(after, 1)
    assert steps.guard.is_due
    assert is_slower(*steps.guard.medians()) == slower
    assert list(steps.guard.end()) == [3]
    assert not steps.guard.is_due


def test_what_comes_before_a_step_does_not_count_nor_a_move_after_too_few_steps() -> None:
    steps = Steps()
    steps.take(1.0, STEPS - 1)
    steps.guard.watch({3: torch.tensor([[0], [1]])})
    assert not steps.guard.homes_before
    steps.now += 100.0  # moving, between `stop` and `start`
    steps.take(1.0, 1)
    assert steps.guard.median == 1.0


def test_passes_of_a_step_that_failed_do_not_count() -> None:
    place = Place(3, SlotShape(1, 2, 0), ((0,),), "ep", "body", 0)
    loads = CountedLoads([place], 1, "", torch.device("cpu"))
    loads.add({("counts", 3, None): torch.tensor([[5, 7]])})
    loads.begin_step()
    for microbatch in ([[1, 2]], [[10, 20]]):
        loads.add({("counts", 3, None): torch.tensor(microbatch)})
    loads.end_step()
    assert loads.rows[3].tolist() == [[11, 22]]
    assert loads.steps == 1
