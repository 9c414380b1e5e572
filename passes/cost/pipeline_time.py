"""The time of a pipeline's passes: follows the tables of all ranks, each computation once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.passes.degrees.schedules import Pipeline
from moec.passes.place.pipeline_orders import computations_of
from moec.passes.place.pipeline_tables import Kind, rank_of_stage


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

    def of(self, kind: Kind) -> float:
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


def follow(schedule: str, pipeline: Pipeline, stages: Sequence[StageSeconds]) -> PipelineTime:
    """The time of the passes of all ranks by a schedule; the loss is a part of the last stage's passes."""
    ends, busy, last = [0.0] * pipeline.ranks, [0.0] * pipeline.ranks, len(stages) - 1
    ranks = [rank_of_stage(schedule, pipeline.ranks, stage) for stage in range(len(stages))]
    kinds: tuple[Kind, ...] = ("forward", "backward", "inputs", "weights")
    seconds = {kind: [stage.of(kind) for stage in stages] for kind in kinds}
    messages = [stage.message for stage in stages]
    # The seconds at which a stage has received the values of a micro-batch, and their gradients.
    values, gradients = ([[0.0] * pipeline.microbatches for _ in stages] for _ in range(2))
    for kind, stage, number in computations_of(schedule, pipeline):
        rank, each = ranks[stage], seconds[kind][stage]
        if kind == "forward":
            end = max(ends[rank], values[stage][number]) + each
            if stage < last:
                values[stage + 1][number] = end + messages[stage]
        elif kind == "weights":
            end = ends[rank] + each
        else:
            end = max(ends[rank], gradients[stage][number]) + each
            if stage:
                gradients[stage - 1][number] = end + messages[stage - 1]
        ends[rank] = end
        busy[rank] += each
    return PipelineTime(tuple(ends), tuple(busy))
