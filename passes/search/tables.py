"""The work and the bytes of all plans that have the same ops: one placement, on meshes with arrays as sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from moec.grammar.spec import LoadUse, Measured, Spec
from moec.passes.cost.pass_time import BlockWork, work_of
from moec.passes.cost.rates import Rates
from moec.passes.cost.totals import BlockCost, costs_of, runs_of
from moec.passes.degrees.degrees import Degrees, ExpertDegrees
from moec.passes.ir import Mesh, Program, Recompute, local_shape
from moec.passes.ir.mesh import ZERO_AXES, parts_of
from moec.passes.ir.work.workload import Workload
from moec.passes.pipeline import unverified
from moec.passes.place.tensor_parallel import kv_heads_of
from moec.passes.search.space import Sizes

Rows = Any
"""An array with a row of `Sizes` for each plan."""

Shares = list[tuple[BlockCost, Any]]
"""Blocks, and how often each runs on a rank of each plan."""

WIDE = 2
"""The size of `dp`, where it is wide, and of `edp` in a placement that serves all: experts of one rank sum nothing."""


@dataclass(frozen=True)
class Table:
    """Plans of one structure. `sizes`: a row for each plan, with the columns of `Sizes`."""

    spec: Spec
    sizes: Rows
    lowered: Program
    program: Program

    @classmethod
    def of(cls, spec: Spec, lowered: Program, sizes: Rows) -> Table:
        """The table of plans with the same ops; the first one is placed."""
        program = unverified(spec, _degrees_of(spec, Sizes(*map(int, sizes[0]))), lowered, "partition")
        return cls(spec, sizes, lowered, replace(on_meshes(program, spec, sizes), microbatches=sizes[:, 5]))

    @cached_property
    def costs(self) -> dict[str, BlockCost]:
        """The cost of each block, for a micro-batch; nothing of ZeRO is in it."""
        return self._costs_for("kept")

    def _costs_for(self, use: LoadUse) -> dict[str, BlockCost]:
        assert self.spec.train is not None
        workload, pp = Workload.of(self.spec, self.program).planned_for(use), self.sizes[:, 0]
        batch, mixtures = self.spec.train.batch // self.sizes[:, 5], -(-workload.mixtures // pp)
        return costs_of(self.program, replace(workload, batch=batch, mixtures=mixtures))

    @cached_property
    def hidden_dims(self) -> dict[tuple[str, str], int | None]:
        """The dim of each parameter that is the width of experts, by block and parameter."""
        return {(b.name, p.name): dict(p.shard).get("etp") for b in self.lowered.blocks for p in b.parameters}

    @cached_property
    def alike_for_zero(self) -> list[Any]:
        """The numbers of rows in which the same axes are wide, and ZeRO finds a dim to cut of the same parameters."""
        columns = dict[object, Any]()
        for block in self.program.blocks:
            meshes = self.costs[block.name].workload.meshes
            for p in block.parameters:
                assert p.layout is not None
                axes = {part for axis in p.sum_over or () for part in parts_of(axis)} & set(ZERO_AXES)
                hidden, local = self.hidden_dims.get((block.name, p.name)), local_shape(p.shape, p.layout, meshes)
                free = [d for d in range(len(p.shape)) if d == hidden or not p.layout.cuts(d)]
                columns |= {axis: meshes.size(axis) > 1 for axis in axes}
                key = (tuple(sorted(axes)), tuple((p.shape[d], p.layout.cuts(d)) for d in free))
                if axes and key not in columns:
                    ranks = math.prod(map(meshes.size, axes))
                    columns[key] = np.any([local[d] % ranks == 0 for d in free], axis=0)
        return list(grouped([*columns.values()] or [self.sizes[:, 0] > 0]))

    def shares(self) -> Shares:
        """Each block that a pass runs, and how often on the rank with most layers: of layers the largest first."""
        runs, layers = runs_of(self.program), self.program.layer_blocks
        left, shares = np.ceil(self.spec.subject.depth / self.sizes[:, 0]), Shares([])
        for name in sorted(runs, key=lambda name: -_elements(self.costs[name])):
            if name in layers:
                taken = np.minimum(left, runs[name])
                left = left - taken
            else:
                taken = np.where(self.sizes[:, 0] > 1, 0.5, 1.0)
            shares.append((self.costs[name], taken))
        return shares

    def works(self, rates: Rates) -> dict[str, BlockWork]:
        """The work of each block."""
        assert self.spec.train is not None
        costs = self._costs_for("time") if isinstance(self.spec.train.routing, Measured) else self.costs
        return {name: work_of(cost, rates) for name, cost in costs.items()}


def _elements(cost: BlockCost) -> int:
    return sum(cost.workload.whole(p) for p in cost.block.parameters)


def on_meshes(program: Program, spec: Spec, sizes: Rows) -> Program:
    """The Program on the meshes of these plans."""
    ranks = spec.cluster.ranks // sizes[:, 0]
    _, cp, tp, ep, etp, _ = sizes.T
    dense = (("dp", ranks // (cp * tp)), ("cp", cp), ("tp", tp))
    experts = (("edp", ranks // (ep * etp)), ("ep", ep), ("etp", etp))
    meshes = tuple(Mesh(m.name, dense if m.name == "dense" else experts) for m in program.meshes)
    return replace(program, meshes=meshes)


def _degrees_of(spec: Spec, sizes: Sizes) -> Degrees:
    """The degrees of a single stage of plans that place alike."""
    layers = tuple(number for number, moe in enumerate(spec.subject.mixtures) if moe is not None)
    return Degrees(
        ranks=spec.cluster.ranks // sizes.pp,
        dp=min(WIDE, spec.cluster.ranks // (sizes.pp * sizes.cp * sizes.tp)),
        cp=sizes.cp,
        tp=sizes.tp,
        experts=(ExpertDegrees(layers, sizes.ep, sizes.etp, WIDE, stated=True),) if layers else (),
        zero=0,
        recompute=tuple[Recompute, ...](["none"] * spec.subject.depth),
        microbatches=sizes.microbatches,
        sequence_parallel=spec.parallel.sequence_parallel,
    )


def structures(spec: Spec, lowered: Program, sizes: Rows) -> Iterator[Rows]:
    """The rows of sizes that place alike: the same axes are wide and divide the same dims of parameters, and kv heads
    are copied as often."""
    pp, cp, tp, ep, etp, _ = sizes.T
    dims = {
        (axis, size)
        for block in lowered.blocks
        for p in block.parameters
        for axis, dim in p.shard
        if isinstance(size := p.shape[dim], int)
    }
    of_axis = {"tp": tp, "ep": ep, "etp": etp}
    columns = [pp * cp * tp < spec.cluster.ranks, cp > 1, tp > 1, ep > 1, etp > 1]
    columns += [size % of_axis[axis] == 0 for axis, size in sorted(dims)]
    for heads in {kv_heads_of(block) for block in lowered.blocks} - {None}:
        copies = np.where(heads % tp > 0, tp // heads, 1)
        on_rank = heads * copies // tp
        columns += [copies, np.where(on_rank % cp > 0, cp // on_rank, 1)]
    yield from (sizes[rows] for rows in grouped(columns))


def grouped(columns: list[Any]) -> Iterator[Any]:
    """The numbers of the rows whose columns are equal."""
    _, groups = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)
    groups = groups.reshape(-1)
    for group in range(int(groups.max()) + 1):
        yield np.flatnonzero(groups == group)
