"""The time of a pipeline's passes: follows the orders of all ranks, each action once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moec.passes.ir.order import ActionKind, Order


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

    def of(self, kind: ActionKind) -> float:
        """Seconds in which a computation occupies its rank: messages are sent beside computations."""
        match kind:
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
    arrives = dict[tuple[bool, int, int | None], float]()
    remaining, moved = [deque(order) for order in orders], True
    while moved:
        moved = False
        for rank, actions in enumerate(remaining):
            end, computed = ends[rank], busy[rank]
            while actions:
                action = actions[0]
                kind, stage, number = action.kind, action.stage, action.microbatch
                if stage is None:
                    pass
                elif kind == "send":
                    arrives[True, stage + 1, number] = end + stages[stage].message
                elif kind == "send_gradients":
                    arrives[False, stage - 1, number] = end + stages[stage - 1].message
                elif kind in ("receive", "receive_gradients"):
                    if (kind == "receive", stage, number) not in arrives:
                        break
                else:
                    seconds = stages[stage].of(kind)
                    end = max(end, arrives.get((kind == "forward", stage, number), 0.0)) + seconds
                    computed += seconds
                actions.popleft()
                moved = True
            ends[rank], busy[rank] = end, computed
    return PipelineTime(tuple(ends), tuple(busy))
