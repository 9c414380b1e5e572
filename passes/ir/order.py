"""`Order`: the actions of ranks in a training step.

The job and `moec verify` run an Order, the estimates of memory and time follow it, and a plan's text contains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

# fmt: off
ActionKind = Literal[
    "agree", "receive", "forward", "send", "loss", "receive_gradients", "backward", "inputs", "send_gradients",
    "weights", "sum", "states", "clip", "update",
]
# fmt: on

MICROBATCH_ACTIONS: tuple[ActionKind, ...] = (
    "receive",
    "forward",
    "send",
    "loss",
    "receive_gradients",
    "backward",
    "inputs",
    "send_gradients",
    "weights",
)
"""The actions of one micro-batch, in the order in which a stage takes them. A stage receives the outputs of the stage
before it, and the gradients of the outputs that it sent to the next stage. `backward` computes all gradients; in its
place `inputs` computes those of what the stage received, and `weights`, later, those of parameters."""

FINAL_ACTIONS: tuple[ActionKind, ...] = ("sum", "states", "clip", "update")
"""The actions after the last backward pass: the sums of gradients end, states get new values, gradients are clipped,
the optimizer updates parameters. A script calls the last two."""

SPLIT_BACKWARD = frozenset({"zero_bubble", "zero_bubble_v", "dual_pipe_v"})
"""The schedules in which `inputs` and `weights` take the place of `backward`, at least for some micro-batches."""


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
    """The actions of a whole micro-batch in its stage, taken `times` times, at least twice, each for the next one."""

    actions: tuple[Action, ...]
    times: int


@dataclass(frozen=True)
class Order:
    """The actions of the ranks that run these `stages`, in order. Iteration yields the actions of every repetition of a
    round."""

    stages: tuple[int, ...]
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

    @property
    def microbatches(self) -> int:
        """The number of micro-batches."""
        return self.count("forward") // len(self.stages)

    @cached_property
    def last_of_stage(self) -> Mapping[int, Action]:
        """For each stage the action that completes the gradients of its parameters."""
        last = dict[int, Action]()
        for part in reversed(self.parts):
            actions = (part,) if isinstance(part, Action) else [a.later(part.times - 1) for a in reversed(part.actions)]
            for action in actions:
                if action.kind in ("backward", "weights") and action.stage is not None:
                    last.setdefault(action.stage, action)
            if len(last) == len(self.stages):
                break
        return last


def kinds_of_stage(stage: int, stages: int, *, has_loss: bool) -> list[ActionKind]:
    """The kinds of actions that a micro-batch may have in a stage, in order.

    A step over a single layer has no `loss`, which its host computes.
    """
    is_first, is_last = stage == 0, stage == stages - 1
    omitted = {
        "receive": is_first,
        "send": is_last,
        "loss": not (is_last and has_loss),
        "receive_gradients": is_last,
        "send_gradients": is_first,
    }
    return [kind for kind in MICROBATCH_ACTIONS if not omitted.get(kind)]


def in_turn(kinds: Sequence[ActionKind], final: Sequence[ActionKind], microbatches: int) -> Order:
    """The order of a single stage with actions of these `kinds`, in which each micro-batch is complete before the next
    begins; then the `final` actions of the step."""
    passes = tuple(Action.of(kind, 0, 0) for kind in kinds if kind not in ("inputs", "weights"))
    repeated = passes if microbatches == 1 else (Round(passes, microbatches),)
    return Order((0,), (Action("agree"), *repeated, *map(Action, final)))
