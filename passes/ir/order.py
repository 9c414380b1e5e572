"""`Order`: the actions of the ranks of a stage in a training step.

The job and `moec verify` run an Order, the estimates of memory and time follow it, and a plan's text contains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

# fmt: off
ActionKind = Literal[
    "agree", "receive", "forward", "send", "loss", "receive_gradients", "backward", "send_gradients",
    "sum", "states", "clip", "update",
]
# fmt: on

MICROBATCH_ACTIONS: tuple[ActionKind, ...] = (
    "receive",
    "forward",
    "send",
    "loss",
    "receive_gradients",
    "backward",
    "send_gradients",
)
"""The actions of one micro-batch, in the order in which a stage takes them. A stage receives the outputs of the stage
before it, and the gradients of the outputs that it sent to the next stage."""

FINAL_ACTIONS: tuple[ActionKind, ...] = ("sum", "states", "clip", "update")
"""The actions after the last backward pass: the sums of gradients end, states get new values, gradients are clipped,
the optimizer updates parameters. A script calls the last two."""


@dataclass(frozen=True, slots=True)
class Action:
    """`agree`, `loss of 3`, or `forward 0 of 3`: the forward pass of stage 0 over micro-batch 3."""

    kind: ActionKind
    stage: int | None = None
    microbatch: int | None = None

    @classmethod
    def of(cls, kind: ActionKind, stage: int, microbatch: int) -> Action:
        """The action of this kind, with a micro-batch and a stage if the kind has them; `loss` has no stage."""
        if kind not in MICROBATCH_ACTIONS:
            return cls(kind)
        return cls(kind, None if kind == "loss" else stage, microbatch)

    def __str__(self) -> str:
        stage = "" if self.stage is None else f" {self.stage}"
        return f"{self.kind}{stage}" + ("" if self.microbatch is None else f" of {self.microbatch}")

    def later(self, microbatches: int) -> Action:
        """This action on the micro-batch that comes `microbatches` later."""
        return self if self.microbatch is None else replace(self, microbatch=self.microbatch + microbatches)


@dataclass(frozen=True, slots=True)
class Round:
    """Actions taken `times` times, at least twice, each time for the next micro-batch."""

    actions: tuple[Action, ...]
    times: int


@dataclass(frozen=True, slots=True)
class Order:
    """The actions of the ranks of one stage, in order. Iteration yields the actions of every repetition of a round."""

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
        """The number of actions of this kind in a step."""
        return sum(
            part.kind == kind
            if isinstance(part, Action)
            else part.times * sum(action.kind == kind for action in part.actions)
            for part in self.parts
        )


def kinds_of_stage(stage: int, stages: int, *, has_loss: bool, has_states: bool) -> list[ActionKind]:
    """The kinds of actions that a stage has in a step, in the order in which one micro-batch takes them.

    A step over a single layer has no `loss`, which its host computes.
    """
    is_first, is_last = stage == 0, stage == stages - 1
    omitted = {
        "receive": is_first,
        "send": is_last,
        "loss": not (is_last and has_loss),
        "receive_gradients": is_last,
        "send_gradients": is_first,
        "states": not has_states,
    }
    return [kind for kind in ("agree", *MICROBATCH_ACTIONS, *FINAL_ACTIONS) if not omitted.get(kind)]


def in_turn(stage: int, microbatches: int, kinds: Sequence[ActionKind]) -> Order:
    """The order of a stage where each micro-batch goes through all stages, forward and backward, before the next.

    `kinds` are the kinds of actions that the stage has (`kinds_of_stage`).
    """
    passes = tuple(Action.of(kind, stage, 0) for kind in kinds if kind in MICROBATCH_ACTIONS)
    repeated = passes if microbatches == 1 else (Round(passes, microbatches),)
    return Order(stage, (Action("agree"), *repeated, *(Action(kind) for kind in kinds if kind in FINAL_ACTIONS)))
