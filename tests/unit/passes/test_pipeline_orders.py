"""The orders of pipeline ranks: an action that is missing, stands twice or comes too early is refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from support.plans import moe_spec
from support.staged_plans import staged_plan

from moec.passes.ir import IrError
from moec.passes.ir.order import Order
from moec.passes.ir.order_messages import Message, merged, message_of, waiting
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.place.pipeline_orders import orders_in_turn

PIPELINES = {"one_f_one_b": 1, "interleaved": 2, "zero_bubble_v": 2}


@cache
def lines_of(schedule: str) -> list[str]:
    spec = moe_spec(ranks=1, ep=1, batch=8, depth=4, microbatches=4)
    return print_program(staged_plan(spec, 2, PIPELINES[schedule], schedule).program).splitlines()


def actions(lines: list[str]) -> Iterator[int]:
    """The numbers of the lines of actions of micro-batches."""
    start = next(number for number, line in enumerate(lines) if line.startswith("  order of"))
    return (number for number, line in enumerate(lines) if number > start and " of " in line and line[:4] == "    ")


def is_refused(lines: list[str]) -> bool:
    try:
        parse_program("\n".join(lines) + "\n")
    except IrError:
        return True
    return False


@pytest.mark.parametrize("schedule", PIPELINES)
def test_a_missing_and_a_second_action_are_refused(schedule: str):
    lines = lines_of(schedule)
    assert not is_refused(lines)
    for number in actions(lines):
        assert is_refused([*lines[:number], *lines[number + 1 :]]), lines[number]
        assert is_refused([*lines[:number], lines[number], *lines[number:]]), lines[number]


@pytest.mark.parametrize("schedule", PIPELINES)
def test_an_action_that_comes_first_is_refused_unless_it_was(schedule: str):
    lines = lines_of(schedule)
    heads = [number for number, line in enumerate(lines) if line.startswith("  order of")]
    for number in actions(lines):
        first = max(head for head in heads if head < number) + 2
        if number > first + 1:
            early = [*lines[:first], lines[number], *lines[first:number], *lines[number + 1 :]]
            assert is_refused(early), lines[number]


def test_ranks_that_would_wait_for_each_other_are_found():
    """Each rank's own rules hold: both ranks take what the other one sends first."""
    program = parse_program("\n".join(lines_of("one_f_one_b")) + "\n")
    first, second = program.orders
    assert waiting(program.orders) == []
    receives = [a for a in second.parts if str(a) in ("receive 1 of 0", "receive 1 of 1")]
    others = [a for a in second.parts if a not in receives]
    turned = Order(second.stages, (others[0], *reversed(receives), *others[1:]))
    assert [str(action) for action in waiting((first, turned))] == ["send 0 of 0", "receive 1 of 1"]


@pytest.mark.parametrize("schedule", PIPELINES)
def test_merged_orders_have_every_action_and_each_message_is_received_right_after_it_is_sent(schedule: str):
    orders = parse_program("\n".join(lines_of(schedule)) + "\n").orders
    taken = list(merged(orders))
    assert [[action for rank, action in taken if rank == number] for number in (0, 1)] == [[*o] for o in orders]
    messages = [message for _, action in taken if (message := message_of(action)) is not None]
    assert messages[::2] == messages[1::2]
    assert Message(0, 1, 0) in messages


def test_any_number_of_micro_batches_goes_through_the_stages_in_turn():
    program = parse_program("\n".join(lines_of("zero_bubble_v")) + "\n")
    for microbatches in (1, 3):
        orders = orders_in_turn(program, microbatches)
        assert [order.microbatches for order in orders] == [microbatches] * 2
        assert waiting(orders) == []
