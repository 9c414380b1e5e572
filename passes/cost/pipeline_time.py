"""The time of a pipeline's passes: follows the orders of all ranks, each action once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moec.passes.ir.order import Action, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of a stage's passes over a micro-batch.

    `weights` is the part of `backward` that a pass to inputs leaves. `message`: what the stage sends to the next one,
    or gets back from it, is under way for so long; 0 where both are on the same rank.
    """

    forward: float
    backward: float
    weights: float = 0.0
    message: float = 0.0

    def of(self, action: Action) -> float:
        """Seconds in which the action occupies its rank: messages are sent beside computations."""
        match action.kind:
            case "forward":
                return self.forward
            case "backward":
                return self.backward
            case "inputs":
                return self.backward - self.weights
            case _:
                return self.weights


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """For each rank of a pipeline the seconds until its last pass ends, and the seconds in which it computes."""

    ends: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The part of the time in which the busiest rank waits."""
        return 1 - max(self.busy) / max(self.ends)


def follow(orders: Sequence[Order], stages: Sequence[StageSeconds]) -> PipelineTime:
    """The time of the passes of all ranks, in their orders; the loss is a part of the last stage's passes."""
    ends, busy = [0.0] * len(orders), [0.0] * len(orders)
    finished, waiting = dict[_Result, float](), dict[_Result, int]()
    actions = [deque(_computations(order)) for order in orders]
    ready = deque(range(len(orders)))
    while ready:
        rank = ready.popleft()
        while actions[rank]:
            action = actions[rank][0]
            needed, message = _needed(action, stages)
            if needed is not None and needed not in finished:
                waiting[needed] = rank
                break
            actions[rank].popleft()
            assert action.stage is not None
            seconds = stages[action.stage].of(action)
            ends[rank] = max(ends[rank], finished[needed] + message if needed is not None else 0.0) + seconds
            busy[rank] += seconds
            result = action.kind == "forward", action.stage, action.microbatch
            if action.kind != "weights":
                finished[result] = ends[rank]
                if result in waiting:
                    ready.append(waiting.pop(result))
    assert not any(actions), "the orders wait for each other"
    return PipelineTime(tuple(ends), tuple(busy))


_Result = tuple[bool, int | None, int | None]
"""What a pass of a stage over a micro-batch computes: values (True) or their gradients."""


def _computations(order: Order) -> Iterator[Action]:
    return (action for action in order if action.kind in ("forward", "backward", "inputs", "weights"))


def _needed(action: Action, stages: Sequence[StageSeconds]) -> tuple[_Result | None, float]:
    """What an action needs of another stage, and the seconds of its message."""
    stage, number = action.stage, action.microbatch
    assert stage is not None
    if action.kind == "forward" and stage > 0:
        return (True, stage - 1, number), stages[stage - 1].message
    if action.kind in ("backward", "inputs") and stage < len(stages) - 1:
        return (False, stage + 1, number), stages[stage].message
    return None, 0.0
