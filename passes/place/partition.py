"""partition: cut the Program into pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moec.passes.ir import Program, Stage
from moec.passes.ir.interface import FORWARD


@dataclass(frozen=True, slots=True)
class Partition:
    """One stage that runs every layer on all ranks. Pipelines of several stages are not supported yet (`pp`)."""

    def apply(self, program: Program) -> Program:
        """The Program with its stages."""
        ranks = program.mesh("dense").ranks
        return replace(program, stages=(Stage(index=0, first_rank=0, num_ranks=ranks, forward=FORWARD),))
