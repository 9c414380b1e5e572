"""`Order`: what the ranks of a stage do in a training step, action by action.

The job runs it, `moec verify` runs the same one, memory walks it, time counts it, and a plan's text has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

ActionKind = Literal["agree", "forward", "loss", "backward", "sum", "states", "clip", "update"]

OF_MICROBATCH: tuple[ActionKind, ...] = ("forward", "loss", "backward")
"""The actions of one micro-batch, in the order in which it takes them."""

AT_END: tuple[ActionKind, ...] = ("sum", "states", "clip", "update")
"""The actions after the last backward pass: the sums of gradients end, states get new values, gradients are clipped,
the optimizer updates parameters. A script calls the last two."""


@dataclass(frozen=True, slots=True)
class Action:
    """`agree`, `loss of 3`, or `forward 0 of 3`: the forward pass of stage 0 over micro-batch 3."""

    kind: ActionKind
    stage: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        stage = "" if self.stage is None else f" {self.stage}"
        return f"{self.kind}{stage}" + ("" if self.microbatch is None else f" of {self.microbatch}")

    def later(self, microbatches: int) -> Action:
        """The same action of the micro-batch that comes so many later."""
        return self if self.microbatch is None else replace(self, microbatch=self.microbatch + microbatches)


@dataclass(frozen=True, slots=True)
class Round:
    """Actions that are repeated at least once, each time over the next micro-batch."""

    actions: tuple[Action, ...]
    times: int


@dataclass(frozen=True, slots=True)
class Order:
    """The actions of the ranks of one stage, in order. Iteration gives those of a round in each repetition."""

    stage: int
    parts: tuple[Action | Round, ...]

    def __iter__(self) -> Iterator[Action]:
        for part in self.parts:
            if isinstance(part, Action):
                yield part
                continue
            for number in range(part.times):
                yield from (action.later(number) for action in part.actions)

    def __str__(self) -> str:
        """`agree, 4 × (forward, loss, backward), sum, clip, update`."""
        return ", ".join(
            part.kind
            if isinstance(part, Action)
            else f"{part.times} × ({', '.join(action.kind for action in part.actions)})"
            for part in self.parts
        )

    def count(self, kind: ActionKind) -> int:
        """How often a step has an action of this kind."""
        parts = ((part, 1) if isinstance(part, Action) else (part, part.times) for part in self.parts)
        return sum(
            times * sum(action.kind == kind for action in ((part,) if isinstance(part, Action) else part.actions))
            for part, times in parts
        )


def one_stage(microbatches: int, *, has_loss: bool = True, has_states: bool = False) -> Order:
    """The order without a pipeline: the micro-batches one after the other, each forward and backward.

    A step over a single layer has no `loss`, which its host computes.
    """
    passes = (Action("forward", 0, 0), *((Action("loss", None, 0),) if has_loss else ()), Action("backward", 0, 0))
    repeated = passes if microbatches == 1 else (Round(passes, microbatches),)
    return Order(0, (Action("agree"), *repeated, *(Action(kind) for kind in AT_END if kind != "states" or has_states)))
