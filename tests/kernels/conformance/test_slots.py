"""Choices of slots on every backend and device present: an expert's rows fill its copies in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from places import INTERPRETED, Place
from support.tables import each_row
from torch import Tensor

from moec.passes.guests.assignment import assigned, slot_numbers


def drawn_slots(draw: np.random.Generator, ranks: int, own: int, guests: int) -> Tensor:
    """Homes in any order, guests of other ranks, and some slots empty: [2, ranks, slots], shares 0."""
    slots = np.full((ranks, own + guests), -1)
    slots[:, :own] = draw.permutation(ranks * own).reshape(ranks, own)
    for row in slots:
        others = draw.permutation([expert for expert in range(ranks * own) if expert not in row])[:guests]
        row[own : own + len(others)] = np.where(draw.random(len(others)) < 0.3, -1, others)
    return torch.from_numpy(np.stack([slots, np.zeros_like(slots)]))


CASES = {
    (2, 2, 1, 40): 2,
    (5, 1, 4, 30): 5,
    (3, 43, 2, 90): 3,
    (4, 2, 0, 20): 4,
    (3, 2, 2, 0): 3,
    (33, 1, 1, 40): 1,
    (64, 8, 1, 300): 0 if INTERPRETED else 3,
}
"""Ranks, experts at home on each, slots for guests, and tokens of each; and how many ranks are compared. The host
computes without guests, and with shares."""


@pytest.mark.parametrize("shares", [False, True])
@each_row(("sizes", "compared"), list(CASES.items()))
def test_rows_fill_copies_in_turn(place: Place, sizes: tuple[int, int, int, int], compared: int, shares: bool) -> None:
    ranks, own, guests, tokens = sizes
    draw, experts = np.random.default_rng(ranks), ranks * own
    slots = drawn_slots(draw, ranks, own, guests)
    if shares:
        slots[1] = torch.where(slots[0] >= 0, torch.from_numpy(draw.integers(1, 4, slots[0].shape)), 0)
    chosen = (experts * draw.random((ranks, 1, tokens, 2)) ** 3).astype(int)
    chosen[draw.random(chosen.shape) < 0.1] = -1
    counts = np.stack([np.bincount(each.ravel() + 1, minlength=experts + 1)[1:] for each in chosen])
    expected = [in_turn(chosen[rank].ravel(), counts, slots, rank) for rank in range(ranks)]
    rows = np.stack([np.bincount(each + 1, minlength=slots[0].numel() + 1)[1:] for each in expected])
    rows = rows.reshape(ranks, ranks, own + guests)  # of each rank, for each slot of each rank
    for rank in range(compared):
        given, gathered = (torch.from_numpy(each).to(place.device) for each in (chosen[rank], counts))
        placed, received, splits = place.backend.assign_slots(given, gathered, slots, rank)
        assert placed.flatten().tolist() == expected[rank].tolist()
        assert received.tolist() == rows[:, rank].tolist()
        assert splits.device.type == "cpu"
        assert splits.tolist() == [rows[rank].sum(1).tolist(), rows[:, rank].sum(1).tolist()]


def in_turn(chosen: Any, counts: Any, slots: Tensor, rank: int) -> Any:
    """The slot of each choice of a rank: an expert's rows fill its copy on this rank, then those of others in order."""
    numbers = slot_numbers(slots[0].numpy(), counts.shape[1])
    sent = assigned(counts, *slots.numpy(), numbers, rank).sent
    order = [rank, *(other for other in range(len(counts)) if other != rank)]
    turns = [iter(np.repeat(numbers[e, order], sent[e, order]).tolist()) for e in range(len(numbers))]
    found = np.array([-1 if expert < 0 else next(turns[expert]) for expert in chosen.tolist()], int)
    assert all(next(turn, None) is None for turn in turns)
    return found
