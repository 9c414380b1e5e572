"""The time of a pipeline's passes: follows the orders of all ranks, each action once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.passes.ir.order import Action, Order
from moec.passes.ir.order_messages import Message, merged, sent_by


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of a stage's passes over a micro-batch.

    `weights`: the part of `backward` that a pass to inputs leaves for later. `message`: of a message to the next stage,
    or of its gradients back; 0 if both stages are on one rank.
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
    arrives = dict[Message, float]()
    for rank, action in merged(orders):
        if (message := sent_by(action)) is not None:
            arrives[message] = ends[rank] + stages[min(message.sender, message.receiver)].message
        elif action.kind in ("forward", "backward", "inputs", "weights") and action.stage is not None:
            sender = action.stage + (-1 if action.kind == "forward" else 1)
            start = max(ends[rank], arrives.get(Message(sender, action.stage, action.microbatch), 0.0))
            seconds = stages[action.stage].of(action)
            ends[rank], busy[rank] = start + seconds, busy[rank] + seconds
    return PipelineTime(tuple(ends), tuple(busy))
