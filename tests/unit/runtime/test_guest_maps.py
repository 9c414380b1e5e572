"""`moec verify` with guests: the maps that it tries, and faults that it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from support.plans import moe_plan
from support.tables import each_row
from torch import Tensor

from moec.grammar.diagnostics import InternalError
from moec.passes.guests.place_guests import guests_of, homes_only
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.ir.verifier import check_program
from moec.runtime.verify.cluster import virtual_weights
from moec.runtime.verify.guest_maps import guest_maps
from moec.runtime.verify.toy import at_toy_widths
from moec.runtime.verify.verification import verify
from moec.runtime.weights.slots import slots_complaint, table_of, with_homes

PLAN = {"ranks": 2, "ep": 2, "adapt": "replicate(4)"}


def test_the_program_has_slots_and_is_read_back() -> None:
    program = moe_plan(**PLAN).program
    body = program.body(program.layers[1])
    assert guests_of(body) == 2
    assert [table.shape for table in body.tables] == [(2, 2, 6)]
    assert parse_program(print_program(program)) == program
    assert guests_of(homes_only(program).body(program.layers[1])) == 0


@each_row(
    ("old", "new"),
    [
        ("guests(4)", "guests(2)"),
        (" guests(4)", ""),
        ("%slots: int64[2, 2, 6]", "%slots: int64[2, 1, 12]"),
        ("%slots: int64[2, 2, 6]", "%slots: int64[2, 2, 7]"),
    ],
)
def test_guests_that_are_not_those_of_the_slots_are_refused(old: str, new: str) -> None:
    text = print_program(moe_plan(**PLAN).program)
    assert old in text
    check_program(parse_program(text))
    with pytest.raises(InternalError):
        check_program(parse_program(text.replace(old, new)))


def test_maps_are_different_possible_and_more_than_ten() -> None:
    maps = [slots for step in guest_maps(moe_plan(**PLAN).program, 0) for slots in step.values()]
    assert len(maps) > 12
    assert len({str(slots.tolist()) for slots in maps}) > 10
    assert {slots_complaint(slots, 2, 8, 2) for slots in maps} == {""}
    full = {bool((slots[0] >= 0).all()) for slots in maps}
    assert full == {True, False}


def test_layers_of_each_body_have_all_extreme_maps_and_ten_others() -> None:
    program = moe_plan(ranks=4, mixtures=((8, 2), (8, 2), (8, 4)), adapt="replicate(4)").program
    bodies = {layer.number: layer.body for layer in program.layers}
    steps = guest_maps(program, 0)
    for body in {bodies[layer] for layer in steps[0]}:
        maps = [table[0] for step in steps for layer, table in step.items() if bodies[layer] == body]
        guests = torch.stack([slots[:, 8 // len(slots) :] for slots in maps])
        assert len(maps) >= 12
        assert 1 in (guests >= 0).sum((1, 2))
        assert len({str(found.tolist()) for found in guests}) > 10


def test_homes_that_may_move_are_in_any_order() -> None:
    plan = moe_plan(ranks=2, ep=2, adapt="greedy()")
    assert guests_of(plan.program.body(plan.program.layers[1])) == 0
    maps = [slots for step in guest_maps(plan.program, 0, moves=True) for slots in step.values()]
    assert len({str(slots[0].tolist()) for slots in maps}) > 9
    assert {slots_complaint(slots, 2, 8, 0, moves=True) for slots in maps} == {""}
    assert "in order" in slots_complaint(maps[0], 2, 8, 0)
    assert "homes of all 8 experts" in slots_complaint(torch.zeros_like(maps[0]), 2, 8, 0, moves=True)
    assert verify(plan, float32=False).ok


def test_toys_with_fewer_experts_have_fewer_slots() -> None:
    plan = moe_plan(ranks=4, experts=16, ep=4, mixtures=((16, 2), (16, 4)), adapt="[replicate(8), shadow(3)]")
    toy = at_toy_widths(plan, fewer_experts=True).plan
    slots = [guests_of(toy.program.body(layer)) for layer in toy.program.layers]
    assert slots == [0, 2, 1]
    assert verify(toy, float32=False).ok


@each_row(
    ("at", "value", "words"),
    [
        ((0, 0, 1), 2, "do not begin with the homes of all 8 experts, in order"),
        ((0, 0, 4), 8, "not among 0 to 7"),
        ((0, 0, 4), 1, "expert 1 twice on rank 0"),
        ((1, 1, 5), -1, "shares below 0"),
        ((1, 1, 5), 1 << 40, "too large"),
        ((1, 0, 0), 1, "no slot a share of expert 1"),
    ],
)
def test_impossible_slots_are_named(at: tuple[int, int, int], value: int, words: str) -> None:
    slots = torch.cat([torch.arange(8).view(2, 4), torch.tensor([[4, -1], [-1, 0]])], 1)
    table = table_of(slots)
    assert slots_complaint(table, 2, 8, 2) == ""
    assert "not int64 [2, 2, 6]" in slots_complaint(slots, 2, 8, 2)
    table[at] = value
    assert words in slots_complaint(table, 2, 8, 2)


def lost(gradients: Sequence[Tensor], slots: Tensor) -> list[Tensor]:
    return [gradient[: int(slots.max() + 1) // len(slots)] for gradient in gradients]


def swapped(parts: Sequence[Tensor], slots: Tensor) -> list[Tensor]:
    right, own = hosted(parts, slots), len(parts[0])
    return [torch.cat([weights[:own], weights[own:].flip(0)]) for weights in right]


hosted = virtual_weights.hosted


@each_row(("name", "wrong"), [("returned", lost), ("hosted", swapped)])
def test_guests_that_lose_gradients_or_have_other_weights_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., list[Tensor]]
) -> None:
    plan = moe_plan(**PLAN)
    monkeypatch.setattr(virtual_weights, name, wrong)
    report = verify(plan, float32=False)
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.op == "assign_slots"


def test_experts_keep_their_shares_in_other_homes() -> None:
    slots = torch.tensor([[0, 1, 2, -1], [2, 3, 0, 1]])
    shares = torch.tensor([[1, 2, 3, 0], [0, 5, 6, 7]])
    found = with_homes(torch.stack([slots, shares]), torch.tensor([[3, 2], [0, 1]]))
    assert found[0].tolist() == [[3, 2, -1, -1], [0, 1, -1, -1]]
    assert found[1].tolist() == [[5, 3, 0, 0], [7, 9, 0, 0]]
    assert torch.equal(with_homes(found, slots[:, :2])[0], table_of(torch.tensor([[0, 1, -1, -1], [2, 3, -1, -1]]))[0])
