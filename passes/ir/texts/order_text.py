"""The text of the order of a step: an action is a line, and a round a block of lines with its number of times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from moec.passes.ir.ir_error import UnreadableLineError, at_most, quoted
from moec.passes.ir.limits import MAX_MICROBATCHES, MAX_STAGES
from moec.passes.ir.order import Action, ActionKind, Order, Round
from moec.passes.ir.order_rules import OrderError, OrderRules, stages_in_words
from moec.passes.ir.program import Program
from moec.passes.ir.texts.lines import Lines
from moec.passes.ir.texts.parse_type import integer

_HEAD = re.compile(r"  order of stages? ([0-9]++(?:, [0-9]++)*+) \{")
_ACTION = re.compile(r"( {4}| {6})([a-z_]++)(?: ([0-9]++))?(?: of ([0-9]++))?")
_ROUND = re.compile(r"    repeat ([0-9]++) times \{")
_KINDS: dict[str, ActionKind] = {kind: kind for kind in get_args(ActionKind)}


def order_lines(order: Order) -> Iterator[str]:
    """The text of an order."""
    yield f"  order of {stages_in_words(order.stages)} {{"
    for part in order.parts:
        if isinstance(part, Action):
            yield f"    {part}"
            continue
        yield f"    repeat {part.times} times {{"
        yield from (f"      {action}" for action in part.actions)
        yield "    }"
    yield "  }"


class OrderReader:
    """Reads the orders of a Program, all other parts of which are read, and checks their rules line by line."""

    def __init__(self, lines: Lines, program: Program) -> None:
        self._lines, self._program = lines, program

    def order(self) -> Order:
        """The next order. Raises `UnreadableLineError` at the first action that breaks a rule."""
        numbers = self._lines.take_match(_HEAD, "`order of stage …`")[1].split(", ")
        at_most(len(numbers), len(self._program.stages), "stages")
        stages = tuple(integer(number, "a stage", 0, MAX_STAGES) for number in numbers)
        if stages not in self._program.stages_by_rank:
            raise UnreadableLineError(f"no ranks run exactly the {stages_in_words(stages)}")
        rules = OrderRules(self._program, stages, self._program.microbatches)
        parts: list[Action | Round] = []
        try:
            while not self._lines.next_starts_with("  }"):
                repeats = self._lines.next_starts_with("    repeat ")
                parts.append(self._round(rules) if repeats else self._action(rules, "    "))
            self._lines.take_exactly("  }")
            rules.end()
        except OrderError as error:
            raise UnreadableLineError(str(error)) from None
        return Order(stages, tuple(parts))

    def _round(self, rules: OrderRules) -> Round:
        times = integer(self._lines.take_match(_ROUND, "a round")[1], "a number of times", 2, MAX_MICROBATCHES)
        actions = []
        while not self._lines.next_starts_with("    }"):
            actions.append(self._action(rules, "      "))
        self._lines.take_exactly("    }")
        rules.repeat(actions, times)
        return Round(tuple(actions), times)

    def _action(self, rules: OrderRules, indent: str) -> Action:
        match = self._lines.take_match(_ACTION, "an action of a step")
        if match[1] != indent or match[2] not in _KINDS:
            raise UnreadableLineError(f"an action of a step is wanted, not {quoted(match[0].strip())}")
        numbers = (None if n is None else integer(n, "a number", 0, MAX_MICROBATCHES) for n in match.groups()[2:])
        action = Action(_KINDS[match[2]], *numbers)
        rules.take(action)
        return action
