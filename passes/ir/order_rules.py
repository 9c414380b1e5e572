"""The rules of a step's order: each action occurs once per micro-batch or once per step, in a fixed order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moec.grammar.diagnostics import InternalError
from moec.passes.ir.order import FINAL_ACTIONS, MICROBATCH_ACTIONS, Action, ActionKind, Order, Round
from moec.passes.ir.program import Program


class OrderError(ValueError):
    """An action is missing, stands twice, or stands before one that comes first."""


class OrderRules:
    """Takes the actions of a stage's order one by one. Every method raises `OrderError`."""

    def __init__(self, stage: int, microbatches: int, kinds: Sequence[ActionKind]) -> None:
        """`kinds` are the kinds of actions that the stage has (`Program.action_kinds`)."""
        self._stage, self._microbatches = stage, microbatches
        self._passes = [kind for kind in kinds if kind in MICROBATCH_ACTIONS]
        self._end = [kind for kind in kinds if kind in FINAL_ACTIONS]
        self._done: Counter[ActionKind] = Counter()

    @classmethod
    def of(cls, program: Program, stage: int, microbatches: int) -> OrderRules:
        """The rules for the ranks of a stage of `program`, in a step of `microbatches` micro-batches."""
        return cls(stage, microbatches, program.action_kinds(stage))

    def take(self, action: Action) -> None:
        """Takes the next action."""
        kind = action.kind
        if kind not in ("agree", *self._passes, *self._end):
            raise OrderError(f"this stage has no `{kind}`")
        expected = self._next(kind)
        if (action.stage is None, action.microbatch is None) != (expected.stage is None, expected.microbatch is None):
            raise OrderError(f"`{action}` must be written as `{expected}`")
        if action.stage != expected.stage:
            raise OrderError(f"`{action}` is of another stage than {self._stage}")
        self._require_earlier(action)
        self._done[kind] += 1

    def _next(self, kind: ActionKind) -> Action:
        return Action.of(kind, self._stage, self._done[kind])

    def _require_earlier(self, action: Action) -> None:
        kind = action.kind
        if kind in self._passes:
            place = self._passes.index(kind)
            number = self._done[kind]
            if action.microbatch != number or number >= self._microbatches:
                complete = number >= self._microbatches
                expected = "there are no more micro-batches" if complete else f"micro-batch {number} is the next"
                raise OrderError(f"`{action}`, but {expected}")
            earlier = ["agree", *self._passes][place]
            if place == 0 and self._done["backward"] < number:
                raise OrderError("several micro-batches under way at once are not supported yet")
            self._require_done(action, earlier, 1 if place == 0 else number + 1)
            return
        if self._done[kind]:
            raise OrderError(f"`{kind}` stands twice")
        if kind in self._end:
            place = self._end.index(kind)
            earlier = self._end[place - 1] if place else "backward"
            self._require_done(action, earlier, 1 if place else self._microbatches)

    def _require_done(self, action: Action, earlier: ActionKind, times: int) -> None:
        if self._done[earlier] < times:
            raise OrderError(f"`{action}` stands before `{self._next(earlier)}`, which comes first")

    def repeat(self, actions: Sequence[Action], times: int) -> None:
        """Takes the further repetitions of actions that were taken once.

        Each repetition moves on by one micro-batch. If the last one keeps the rules, so do those before it.
        """
        kinds = Counter(action.kind for action in actions)
        if times < 2 or not actions or any(number > 1 for number in kinds.values()):
            raise OrderError("a round has at least one action, none of a kind twice, and at least two repetitions")
        if not set(kinds) <= set(self._passes):
            raise OrderError("only actions of micro-batches are repeated")
        for kind in kinds:
            self._done[kind] += times - 2
        for action in actions:
            self.take(action.later(times - 1))

    def end(self) -> None:
        """Requires that no action is left."""
        for kind in ("agree", *self._passes, *self._end):
            if self._done[kind] < (self._microbatches if kind in self._passes else 1):
                raise OrderError(f"`{self._next(kind)}` is missing")


def scheduled(program: Program) -> None:
    """Each stage has the order of its ranks' actions in a step, which keeps the rules. Raises `InternalError`."""
    if [order.stage for order in program.orders] != [stage.index for stage in program.stages]:
        raise InternalError("a stage without an order of its actions, or an order without a stage")
    for order in program.orders:
        if complaint := order_complaint(program, order, program.microbatches):
            raise InternalError(complaint)


def order_complaint(program: Program, order: Order, microbatches: int) -> str:
    """The first rule that `order` breaks in a step of `microbatches` micro-batches; empty if it keeps all."""
    rules = OrderRules.of(program, order.stage, microbatches)
    try:
        for part in order.parts:
            for action in part.actions if isinstance(part, Round) else (part,):
                rules.take(action)
            if isinstance(part, Round):
                rules.repeat(part.actions, part.times)
        rules.end()
    except OrderError as error:
        return f"order of stage {order.stage}: {error}"
    return ""
