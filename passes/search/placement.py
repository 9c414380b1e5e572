"""A Program that serves all plans in which the same axes are wide: their meshes take the place of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from moec.passes.degrees.degrees import Degrees, ExpertDegrees
from moec.passes.ir import Block, Parameter, Program, Recompute
from moec.passes.ir.mesh import parts_of
from moec.passes.pipeline import unverified
from moec.passes.search.space import Sizes, Space

WIDE = 2
"""The size of `dp` and of `edp` in a placement that serves all."""


@dataclass(frozen=True)
class Placement:
    """The Program of a plan of one stage, with these sizes."""

    space: Space
    lowered: Program
    sizes: Sizes

    @cached_property
    def program(self) -> Program:
        """The placed Program."""
        return self._placed(self.lowered)

    @cached_property
    def summed(self) -> Mapping[tuple[str, str], frozenset[str]]:
        """The axes over which the gradient of each parameter is summed, by block and parameter; of one that is frozen,
        those over which it would be."""
        program = self.program
        if any(p.frozen for block in program.blocks for p in block.parameters):
            trained = (replace(b, parameters=_trained(b.parameters)) for b in self.lowered.blocks)
            program = self._placed(replace(self.lowered, blocks=tuple(trained)))
        return {
            (block.name, p.name): frozenset(part for axis in p.sum_over or () for part in parts_of(axis))
            for block in program.blocks
            for p in block.parameters
        }

    @cached_property
    def hidden_dims(self) -> Mapping[tuple[str, str], int | None]:
        """The dim of each parameter of layers that is the width of experts, by block and parameter."""
        names = {placed.body: of.body for placed, of in zip(self.program.layers, self.lowered.layers, strict=True)}
        return {
            (name, p.name): dict(p.shard).get("etp")
            for name, body in names.items()
            for p in self.lowered.block(body).parameters
        }

    def kind_of(self, block: Block) -> int | None:
        """The number of the kind of the block's mixture; None if it has none."""
        meshes = [mesh.name for mesh in self.program.meshes if mesh.name != "dense"]
        return meshes.index(block.experts) if block.experts else None

    def _placed(self, lowered: Program) -> Program:
        space, sizes = self.space, self.sizes
        pairs = zip(space.kinds, sizes.experts, strict=True)
        degrees = Degrees(
            ranks=space.spec.cluster.ranks // sizes.pp,
            dp=WIDE,
            cp=sizes.cp,
            tp=sizes.tp,
            experts=tuple(ExpertDegrees(of.layers, *pair, WIDE, stated=True) for of, pair in pairs if of.layers),
            zero=0,
            recompute=tuple[Recompute, ...](["none"] * space.spec.subject.depth),
            microbatches=sizes.microbatches,
            sequence_parallel=space.spec.parallel.sequence_parallel,
        )
        return unverified(space.spec, degrees, lowered, "partition")


def _trained(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    return tuple(replace(p, frozen=False) for p in parameters)
