"""What a schedule takes: how many stages of a rank, and how many micro-batches."""

from __future__ import annotations

from typing import NamedTuple

from moec.grammar.stated import STAGES_OF_RANK


class Pipeline(NamedTuple):
    """The ranks of a pipeline, the stages of each (`virtual`), and the micro-batches of a step."""

    ranks: int
    virtual: int
    microbatches: int

    @property
    def per_round(self) -> int:
        """The micro-batches that a rank takes through one of its stages before it takes them through the next."""
        return self.microbatches // max(1, self.microbatches // self.ranks)


def takes(schedule: str, pipeline: Pipeline) -> bool:
    """Whether a schedule has a table for so many stages of each rank and micro-batches."""
    if STAGES_OF_RANK[schedule].fitting(pipeline.virtual) != pipeline.virtual:
        return False
    match schedule:
        case "interleaved" | "zero_bubble":
            return pipeline.microbatches % pipeline.per_round == 0
        case "dual_pipe_v":
            return pipeline.microbatches >= 2 * pipeline.ranks
        case _:
            return True
