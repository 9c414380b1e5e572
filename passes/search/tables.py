"""All plans that have the same ops: one placement, on meshes with arrays as sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from moec.grammar.spec import Spec
from moec.passes.cost.totals import runs_of
from moec.passes.degrees.degrees import Degrees, ExpertDegrees
from moec.passes.ir import Block, Mesh, Parameter, Program, Recompute, local_shape
from moec.passes.ir.mesh import ZERO_AXES, parts_of
from moec.passes.pipeline import unverified
from moec.passes.place.tensor_parallel import kv_heads_of
from moec.passes.search.space import Sizes

Rows = Any
"""An array with a row of `Sizes` for each plan."""

WIDE = 2
"""The size of `dp` and of `edp` in a placement that serves all."""


@dataclass(frozen=True)
class Table:
    """Plans of one structure. `sizes`: a row for each plan, with the columns of `Sizes`."""

    spec: Spec
    sizes: Rows
    lowered: Program
    program: Program

    @classmethod
    def of(cls, spec: Spec, lowered: Program, sizes: Rows) -> Table:
        """The table of plans with the same ops."""
        return cls(spec, sizes, lowered, on_meshes(_placed(spec, lowered, sizes), spec, sizes))

    @cached_property
    def hidden_dims(self) -> dict[tuple[str, str], int | None]:
        """The dim of each parameter that is the width of experts, by block and parameter."""
        return {(b.name, p.name): dict(p.shard).get("etp") for b in self.lowered.blocks for p in b.parameters}

    @cached_property
    def summed(self) -> dict[tuple[str, str], frozenset[str]]:
        """The axes over which the gradient of each parameter is summed, by block and parameter; of one that is frozen,
        those over which it would be."""
        program = self.program
        if any(p.frozen for block in program.blocks for p in block.parameters):
            trained = (replace(b, parameters=_trained(b.parameters)) for b in self.lowered.blocks)
            program = _placed(self.spec, replace(self.lowered, blocks=tuple(trained)), self.sizes)
        return {
            (block.name, p.name): frozenset(part for axis in p.sum_over or () for part in parts_of(axis))
            for block in program.blocks
            for p in block.parameters
        }

    def alike_for_zero(self, block: Block) -> list[Any]:
        """The numbers of rows in which the same axes are wide, and ZeRO finds a dim to cut of the same parameters of a
        block."""
        columns, meshes = dict[object, Any](), self.program.meshes_of(block)
        for p in block.parameters:
            assert p.layout is not None
            axes = self.summed[block.name, p.name] & set(ZERO_AXES)
            hidden, local = self.hidden_dims.get((block.name, p.name)), local_shape(p.shape, p.layout, meshes)
            free = [d for d in range(len(p.shape)) if d == hidden or not p.layout.cuts(d)]
            columns |= {axis: meshes.size(axis) > 1 for axis in axes}
            key = (tuple(sorted(axes)), tuple((p.shape[d], p.layout.cuts(d)) for d in free))
            if axes and key not in columns:
                ranks = math.prod(map(meshes.size, axes))
                columns[key] = np.any([local[d] % ranks == 0 for d in free], axis=0)
        return list(grouped([*columns.values()] or [self.sizes[:, 0] > 0]))

    @cached_property
    def shares(self) -> list[tuple[Block, Any]]:
        """Each block that a pass runs, and how often on the rank with most layers: of layers the largest first."""
        runs, layers = runs_of(self.program), self.program.layer_blocks
        left, shares = np.ceil(self.spec.subject.depth / self.sizes[:, 0]), list[tuple[Block, Any]]()
        for block in sorted((self.program.block(name) for name in runs), key=_elements, reverse=True):
            if block.name in layers:
                taken = np.minimum(left, runs[block.name])
                left = left - taken
            else:
                taken = np.where(self.sizes[:, 0] > 1, 0.5, 1.0)
            shares.append((block, taken))
        return shares


def _placed(spec: Spec, lowered: Program, sizes: Rows) -> Program:
    """The Program of the plan with the largest `cp`."""
    degrees = _degrees_of(spec, Sizes(*map(int, sizes[np.argmax(sizes[:, 1])])))
    return unverified(spec, degrees, lowered, "partition")


def _trained(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    return tuple(replace(p, frozen=False) for p in parameters)


def _elements(block: Block) -> int:
    return sum(math.prod(dim for dim in p.shape if isinstance(dim, int)) for p in block.parameters)


def on_meshes(program: Program, spec: Spec, sizes: Rows) -> Program:
    """The Program on the meshes of these plans."""
    ranks = spec.cluster.ranks // sizes[:, 0]
    _, cp, tp, ep, etp, _ = sizes.T
    dense = (("dp", ranks // (cp * tp)), ("cp", cp), ("tp", tp))
    experts = (("edp", ranks // (ep * etp)), ("ep", ep), ("etp", etp))
    meshes = tuple(Mesh(m.name, dense if m.name == "dense" else experts) for m in program.meshes)
    return replace(program, meshes=meshes, microbatches=sizes[:, 5])


def _degrees_of(spec: Spec, sizes: Sizes) -> Degrees:
    """The degrees of a single stage of plans that place alike."""
    layers = tuple(number for number, moe in enumerate(spec.subject.mixtures) if moe is not None)
    return Degrees(
        ranks=spec.cluster.ranks // sizes.pp,
        dp=WIDE,
        cp=sizes.cp,
        tp=sizes.tp,
        experts=(ExpertDegrees(layers, sizes.ep, sizes.etp, WIDE, stated=True),) if layers else (),
        zero=0,
        recompute=tuple[Recompute, ...](["none"] * spec.subject.depth),
        microbatches=sizes.microbatches,
        sequence_parallel=spec.parallel.sequence_parallel,
    )


def structures(spec: Spec, lowered: Program, sizes: Rows) -> Iterator[Rows]:
    """The rows of sizes that place alike: the same of `tp`, `ep` and `etp` are wide and divide the same dims of
    parameters, and kv heads are copied as often.

    `dp` and `cp` are placed as wide: all that they add are conversions, which cost nothing where there is one rank.
    """
    _, cp, tp, ep, etp, _ = sizes.T
    dims = {
        (axis, size)
        for block in lowered.blocks
        for p in block.parameters
        for axis, dim in p.shard
        if isinstance(size := p.shape[dim], int)
    }
    of_axis = {"tp": tp, "ep": ep, "etp": etp}
    columns = [tp > 1, ep > 1, etp > 1]
    columns += [size % of_axis[axis] == 0 for axis, size in sorted(dims)]
    for heads in {kv_heads_of(block) for block in lowered.blocks} - {None}:
        copies = np.where(heads % tp > 0, tp // heads, 1)
        on_rank = heads * copies // tp
        columns += [copies, np.where(on_rank % cp > 0, cp // on_rank, 1)]
    yield from (sizes[rows] for rows in grouped(columns))


def grouped(columns: list[Any]) -> Iterator[Any]:
    """The numbers of the rows whose columns are equal."""
    numbers = numbered(columns)
    for group in range(int(numbers.max()) + 1):
        yield np.flatnonzero(numbers == group)


def numbered(columns: Iterable[Any]) -> Any:
    """For each row the number of its values, in their order: equal rows have equal ones, and none is left out."""
    numbers: Any = 0
    for column in columns:
        values, places = np.unique(column, return_inverse=True)
        numbers = np.unique(numbers * len(values) + places.reshape(-1), return_inverse=True)[1].reshape(-1)
    return numbers
