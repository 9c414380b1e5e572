"""The order of a step in a plan's text: it reads back, and an action too many, too few or out of order is refused."""

from __future__ import annotations

from functools import cache

import pytest
from support.plans import moe_spec
from support.tables import each_row

from moec.passes.ir import IrError
from moec.passes.ir.order import Action
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.texts.text import print_program
from moec.passes.pipeline import compile_program

ROUND = "    repeat 4 times {\n      forward 0 of 0\n      loss of 0\n      backward 0 of 0\n    }\n"


@cache
def text_of(microbatches: int) -> str:
    spec = moe_spec(batch=32, microbatches=microbatches, gate="topk(2, bias = online(0.01))")
    return print_program(compile_program(spec).program)


def test_micro_batches_are_taken_one_after_the_other():
    order = parse_program(text_of(4)).orders[0]
    kinds = ["agree", *["forward", "loss", "backward"] * 4, "sum", "states", "clip", "update"]
    assert [action.kind for action in order] == kinds
    assert [action.microbatch for action in order if action.kind == "loss"] == [0, 1, 2, 3]
    assert order.count("backward") == 4


def test_an_order_that_is_written_out_reads_as_the_same_actions():
    passes = [f"forward 0 of {n}\n    loss of {n}\n    backward 0 of {n}" for n in range(4)]
    written = text_of(4).replace(ROUND, "".join(f"    {three}\n" for three in passes))
    order = parse_program(written).orders[0]
    assert all(isinstance(part, Action) for part in order.parts)
    assert list(order) == list(parse_program(text_of(4)).orders[0])


WRONG = {
    "a sum before the last backward": (
        "    backward 0 of 0\n    sum\n", "    sum\n    backward 0 of 0\n", 1, "`sum` stands before `backward 0 of 0`"
    ),
    "no loss": ("    loss of 0\n", "", 1, "`backward 0 of 0` stands before `loss of 0`"),
    "no sum": ("    sum\n", "", 1, "`states` stands before `sum`"),
    "no update": ("    update\n", "", 1, "`update` is missing"),
    "an agreement at the end": ("    agree\n", "", 1, "`forward 0 of 0` stands before `agree`"),
    "two clips": ("    clip\n", "    clip\n    clip\n", 1, "`clip` stands twice"),
    "a forward twice": ("    loss of 0\n", "    forward 0 of 0\n    loss of 0\n", 1, "micro-batch 1 is the next"),
    "another micro-batch": ("      loss of 0\n", "      loss of 1\n", 4, "`loss of 1` stands before `forward 0 of 1`"),
    "too few repetitions": ("repeat 4 times", "repeat 3 times", 4, "`sum` stands before `forward 0 of 3`"),
    "too many repetitions": ("repeat 4 times", "repeat 5 times", 4, "there are no more micro-batches"),
    "one repetition": ("repeat 4 times", "repeat 1 times", 4, "a number of times"),
    "a sum in a round": ("      backward 0 of 0\n", "      backward 0 of 0\n      sum\n", 4, "`sum` stands before"),
    "another stage": ("    forward 0 of 0\n", "    forward 1 of 0\n", 1, "another stage than 0"),
    "no stage": ("    forward 0 of 0\n", "    forward of 0\n", 1, "`forward of 0` must be written as `forward 0 of 0`"),
    "an action that there is not": ("    clip\n", "    shuffle\n", 1, "an action of a step is wanted"),
    "an order of no stage": ("order of stage 0", "order of stage 1", 1, "no ranks run exactly the stage 1"),
}  # fmt: skip
"""What is replaced by what, in an order of how many micro-batches, and what the refusal says."""


@each_row("fault", WRONG)
def test_a_wrong_order_is_refused_at_its_line(fault: str):
    old, new, microbatches, words = WRONG[fault]
    text = text_of(microbatches)
    start = text.index("  order of stage")
    assert old in text[start:]
    with pytest.raises(IrError, match=words) as refused:
        parse_program(text[:start] + text[start:].replace(old, new, 1))
    lines = text.splitlines()
    assert lines.index("  order of stage 0 {") < refused.value.line <= len(lines) + 1


def test_several_micro_batches_are_not_under_way_at_once_yet():
    actions = ["forward 0 of 0", "forward 0 of 1", "loss of 0", "loss of 1", "backward 0 of 0", "backward 0 of 1"]
    both = "".join(f"    {action}\n" for action in actions)
    text = text_of(2)
    changed = text.replace(ROUND.replace("4", "2"), both)
    assert changed != text
    with pytest.raises(IrError, match="not supported yet"):
        parse_program(changed)
