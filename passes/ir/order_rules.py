"""The rules of a step's order: each action occurs once, after those whose results it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from moec.grammar.diagnostics import InternalError
from moec.passes.ir.order import MICROBATCH_ACTIONS, Action, ActionKind, Order, Round
from moec.passes.ir.order_messages import waiting
from moec.passes.ir.program import Program


class OrderError(ValueError):
    """An action is missing, stands twice, or stands before one that comes first."""


class OrderRules:
    """Takes the actions of an order one by one. Every method raises `OrderError`."""

    def __init__(self, program: Program, stages: Sequence[int], microbatches: int) -> None:
        """The rules for the ranks of `stages`, in a step of `microbatches` micro-batches."""
        self._kinds = {stage: program.kinds_of_stage(stage) for stage in stages}
        self._final, self._microbatches = program.final_kinds, microbatches
        self._last = max(len(program.stages), 1) - 1
        self._done = set[Action]()
        self._forwards: Counter[int] = Counter()
        self._whole: dict[int, list[range]] = {stage: [] for stage in stages}
        """The micro-batches of each stage that rounds have completed."""

    def take(self, action: Action) -> None:
        """Takes the next action."""
        if action.kind in MICROBATCH_ACTIONS:
            self._require_next_of_microbatch(action, self._last if action.kind == "loss" else action.stage)
        elif action.kind != "agree" and action.kind not in self._final:
            raise OrderError(f"this step has no `{action.kind}`")
        elif action != Action(action.kind):
            raise OrderError(f"`{action}` must be written as `{action.kind}`")
        elif action.kind != "agree":
            place = self._final.index(action.kind)
            missing = self._missing_in_microbatches() if place == 0 else self._missing([self._final[place - 1]])
            self._require_none(missing, action)
        if action in self._done:
            raise OrderError(f"`{action}` stands twice")
        self._done.add(action)

    def _require_next_of_microbatch(self, action: Action, stage: int | None) -> None:
        number = action.microbatch
        if stage is None or number is None or action != Action.of(action.kind, stage, number):
            expected = Action.of(action.kind, stage if stage is not None else min(self._kinds), number or 0)
            raise OrderError(f"`{action}` must be written as `{expected}`")
        if action.stage is not None and stage not in self._kinds:
            raise OrderError(f"`{action}` is of another stage than {', '.join(map(str, self._kinds))}")
        if action.kind not in self._kinds.get(stage, ()):
            raise OrderError(f"this stage has no `{action.kind}`")
        if number >= self._microbatches:
            raise OrderError(f"`{action}`, but there are no more micro-batches")
        self._require_none(self._missing(["agree"]), action)
        self._require_none(self._earlier(action.kind, stage, number), action)
        if action.kind in ("backward", "inputs"):
            other: ActionKind = "inputs" if action.kind == "backward" else "backward"
            if self._is_done(other, stage, number):
                raise OrderError(f"`{action}`, whose gradients `{Action.of(other, stage, number)}` computes")
        if action.kind == "forward":
            if number != self._forwards[stage]:
                raise OrderError(f"`{action}`, but micro-batch {self._forwards[stage]} is the next")
            if self._last == 0 and number and not self._is_done("backward", stage, number - 1):
                raise OrderError("several micro-batches under way at once are not supported yet in a single stage")
            self._forwards[stage] += 1

    def _earlier(self, kind: ActionKind, stage: int, number: int) -> Iterator[Action]:
        """What must be done before an action, and is not."""
        kinds, needed = self._kinds[stage], list[ActionKind]()
        match kind:
            case "weights":
                needed = [needs for needs in kinds if needs in ("inputs", "send_gradients")]
            case "send_gradients":
                needed = ["inputs"] if self._is_done("inputs", stage, number) else ["backward"]
            case _:
                place = kinds.index("backward" if kind == "inputs" else kind)
                needed = kinds[place - 1 : place] if place else []
        return (Action.of(n, stage, number) for n in needed if not self._is_done(n, stage, number))

    def _is_done(self, kind: ActionKind, stage: int, number: int) -> bool:
        return Action.of(kind, stage, number) in self._done or any(number in whole for whole in self._whole[stage])

    def _missing(self, kinds: Sequence[ActionKind]) -> Iterator[Action]:
        return (Action(kind) for kind in kinds if Action(kind) not in self._done)

    def _missing_in_microbatches(self) -> Iterator[Action]:
        for stage, kinds in self._kinds.items():
            ends = [kind for kind in kinds if kind not in ("backward", "inputs", "weights")]
            number = 0
            while number < self._microbatches:
                whole = next((whole for whole in self._whole[stage] if number in whole), None)
                if whole is None:
                    last: ActionKind = "weights" if self._is_done("inputs", stage, number) else "backward"
                    needed = [Action.of(kind, stage, number) for kind in (*ends, last)]
                    yield from (action for action in needed if action not in self._done)
                number = whole.stop if whole else number + 1

    def _require_none(self, missing: Iterator[Action], action: Action) -> None:
        if (earlier := next(missing, None)) is not None:
            raise OrderError(f"`{action}` stands before `{earlier}`, which comes first")

    def repeat(self, actions: Sequence[Action], times: int) -> None:
        """Takes the further repetitions of the actions of a whole micro-batch, which were taken once."""
        forward = next((action for action in actions if action.kind == "forward"), None)
        if self._last > 0:
            raise OrderError("the order of several stages has no rounds")
        if forward is None or forward.stage is None or forward.microbatch is None or times < 2:
            raise OrderError("a round has the actions of a whole micro-batch, and at least two repetitions")
        stage, first = forward.stage, forward.microbatch
        kinds = [kind for kind in self._kinds[stage] if kind not in ("inputs", "weights")]
        if list(actions) != [Action.of(kind, stage, first) for kind in kinds]:
            raise OrderError("a round has the actions of a whole micro-batch, in order")
        if first + times > self._microbatches:
            raise OrderError(f"`{forward.later(times - 1)}`, but there are no more micro-batches")
        self._whole[stage].append(range(first, first + times))
        self._forwards[stage] += times - 1

    def end(self) -> None:
        """Requires that no action is left."""
        missing = next(self._missing_in_microbatches(), None) or next(self._missing(["agree", *self._final]), None)
        if missing is not None:
            raise OrderError(f"`{missing}` is missing")


def scheduled(program: Program) -> None:
    """The ranks of each stage have an order of their actions in a step, which keeps the rules. Raises
    `InternalError`."""
    if [order.stages for order in program.orders] != program.stages_by_rank:
        raise InternalError("a stage without an order of its actions, or an order without a stage")
    for order in program.orders:
        if complaint := order_complaint(program, order, program.microbatches):
            raise InternalError(complaint)
    if waits := waiting(program.orders):
        raise InternalError(f"ranks wait for each other at {', '.join(map(str, waits))}")


def order_complaint(program: Program, order: Order, microbatches: int) -> str:
    """The first rule that `order` breaks in a step of `microbatches` micro-batches; empty if it keeps all."""
    rules = OrderRules(program, order.stages, microbatches)
    try:
        for part in order.parts:
            for action in part.actions if isinstance(part, Round) else (part,):
                rules.take(action)
            if isinstance(part, Round):
                rules.repeat(part.actions, part.times)
        rules.end()
    except OrderError as error:
        return f"order of {stages_in_words(order.stages)}: {error}"
    return ""


def stages_in_words(stages: Sequence[int]) -> str:
    """`stage 0`, or `stages 0, 4`."""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
