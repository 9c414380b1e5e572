"""Choices of slots on every backend and device present: an expert's rows fill its copies in turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from places import Place
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


@pytest.mark.parametrize("shares", [False, True])
@each_row(
    ("ranks", "own", "guests", "tokens"), [(2, 2, 1, 40), (5, 1, 4, 30), (3, 43, 2, 90), (4, 2, 0, 20), (3, 2, 2, 0)]
)
def test_rows_fill_copies_in_turn(place: Place, ranks: int, own: int, guests: int, tokens: int, shares: bool) -> None:
    draw, experts = np.random.default_rng(ranks), ranks * own
    slots = drawn_slots(draw, ranks, own, guests)
    if shares:
        slots[1] = torch.where(slots[0] >= 0, torch.from_numpy(draw.integers(1, 4, slots[0].shape)), 0)
    chosen = (experts * draw.random((ranks, 1, tokens, 2)) ** 3).astype(int)
    chosen[draw.random(chosen.shape) < 0.1] = -1
    counts = np.stack([(each.ravel()[:, None] == np.arange(experts)).sum(0) for each in chosen])
    numbers = slot_numbers(slots[0].numpy(), experts)
    for rank in range(ranks):
        found = assigned(counts, *slots.numpy(), numbers, rank)
        order = [rank, *(other for other in range(ranks) if other != rank)]
        turns = [iter(np.repeat(numbers[e, order], found.sent[e, order]).tolist()) for e in range(experts)]
        expected = [-1 if expert < 0 else next(turns[expert]) for expert in chosen[rank].ravel().tolist()]
        given, gathered = (torch.from_numpy(each).to(place.device) for each in (chosen[rank], counts))
        placed, received, splits = place.backend.assign_slots(given, gathered, slots, rank)
        assert placed.flatten().tolist() == expected
        assert received.tolist() == found.received.tolist()
        assert splits.device.type == "cpu"
        assert splits.tolist() == [found.sent.sum(0).tolist(), found.received.sum(1).tolist()]
        assert all(next(turn, None) is None for turn in turns)
