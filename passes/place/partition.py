"""partition: cut the Program into pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moec.passes.ir import Program, Stage


@dataclass(frozen=True, slots=True)
class Partition:
    """One stage that holds every block. Pipelines of several stages are not supported yet (`pp`)."""

    def apply(self, program: Program) -> Program:
        """The Program with its stages."""
        return replace(program, stages=(Stage(index=0, blocks=tuple(b.name for b in program.blocks)),))
