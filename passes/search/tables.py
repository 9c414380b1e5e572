"""All plans that have the same ops: one placement, on meshes with arrays as sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from moec.grammar.spec import Spec
from moec.passes.cost.totals import runs_of
from moec.passes.degrees.degrees import Degrees, ExpertDegrees
from moec.passes.ir import Block, Parameter, Program, Recompute, local_shape
from moec.passes.ir.mesh import ZERO_AXES, parts_of
from moec.passes.pipeline import unverified
from moec.passes.place.tensor_parallel import kv_heads_of
from moec.passes.search.space import Sizes, Space

Rows = Any
"""An array with a row of `Sizes` for each plan."""

WIDE = 2
"""The size of `dp` and of `edp` in a placement that serves all."""


@dataclass(frozen=True)
class Table:
    """Plans of one structure. `rows`: one for each plan, with the columns of `Sizes`."""

    space: Space
    rows: Rows
    lowered: Program
    program: Program

    @classmethod
    def of(cls, space: Space, lowered: Program, rows: Rows) -> Table:
        """The table of plans with the same ops."""
        placed = _placed(space, lowered, rows)
        return cls(space, rows, lowered, on_meshes(placed, space.spec, Sizes.of(rows.T)))

    @property
    def spec(self) -> Spec:
        """The file."""
        return self.space.spec

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of the plans' axes: an array of each."""
        return Sizes.of(self.rows.T)

    def pair_of(self, block: Block) -> tuple[Any, Any]:
        """`ep` and `etp` of the experts of a block, in each plan; 1 where it has none."""
        meshes = [mesh.name for mesh in self.program.meshes if mesh.name != "dense"]
        return self.sizes.experts[meshes.index(block.experts)] if block.experts else (1, 1)

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
            program = _placed(self.space, replace(self.lowered, blocks=tuple(trained)), self.rows)
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
        return list(grouped([*columns.values()] or [self.sizes.pp > 0]))

    @cached_property
    def shares(self) -> list[tuple[Block, Any]]:
        """Each block that a pass runs, and how often on the rank with most layers: of layers the largest first."""
        runs, layers = runs_of(self.program), self.program.layer_blocks
        left, shares = np.ceil(self.spec.subject.depth / self.sizes.pp), list[tuple[Block, Any]]()
        for block in sorted((self.program.block(name) for name in runs), key=_elements, reverse=True):
            if block.name in layers:
                taken = np.minimum(left, runs[block.name])
                left = left - taken
            else:
                taken = np.where(self.sizes.pp > 1, 0.5, 1.0)
            shares.append((block, taken))
        return shares


def _placed(space: Space, lowered: Program, rows: Rows) -> Program:
    """The Program of the plan with the largest `cp`."""
    degrees = _degrees_of(space, Sizes.of(map(int, rows[np.argmax(rows[:, 1])])))
    return unverified(space.spec, degrees, lowered, "partition")


def _trained(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    return tuple(replace(p, frozen=False) for p in parameters)


def _elements(block: Block) -> int:
    return sum(math.prod(dim for dim in p.shape if isinstance(dim, int)) for p in block.parameters)


def on_meshes(program: Program, spec: Spec, sizes: Sizes) -> Program:
    """The Program on the meshes of these plans."""
    ranks = spec.cluster.ranks // sizes.pp
    dense, *experts = program.meshes
    axes = (("dp", ranks // (sizes.cp * sizes.tp)), ("cp", sizes.cp), ("tp", sizes.tp))
    meshes = [replace(dense, axes=axes)]
    for mesh, (ep, etp) in zip(experts, sizes.experts, strict=False):  # a model without mixtures has no mesh
        meshes.append(replace(mesh, axes=(("edp", ranks // (ep * etp)), ("ep", ep), ("etp", etp))))
    return replace(program, meshes=tuple(meshes), microbatches=sizes.microbatches)


def _degrees_of(space: Space, sizes: Sizes) -> Degrees:
    """The degrees of a single stage of plans that place alike."""
    pairs = zip(space.kinds, sizes.experts, strict=True)
    return Degrees(
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


def structures(space: Space, lowered: Program, rows: Rows) -> Iterator[Any]:
    """The numbers of rows that place alike: the same of `tp`, `ep` and `etp` are wide and divide the same dims of
    parameters, and kv heads are copied as often.

    `dp` and `cp` are placed as wide: all that they add are conversions, which cost nothing where there is one rank.
    """
    sizes = Sizes.of(rows.T)
    columns = [sizes.tp > 1, *_dividing("tp", sizes.tp, lowered.blocks)]
    for kind, (ep, etp) in zip(space.kinds, sizes.experts, strict=True):
        blocks = blocks_of(lowered, kind.layers)
        columns += [ep > 1, etp > 1, *_dividing("ep", ep, blocks), *_dividing("etp", etp, blocks)]
    for heads in {kv_heads_of(block) for block in lowered.blocks} - {None}:
        copies = np.where(heads % sizes.tp > 0, sizes.tp // heads, 1)
        on_rank = heads * copies // sizes.tp
        columns += [copies, np.where(on_rank % sizes.cp > 0, sizes.cp // on_rank, 1)]
    yield from grouped(columns)


def blocks_of(program: Program, layers: Collection[int]) -> list[Block]:
    """The distinct blocks of these layers."""
    names = dict.fromkeys(layer.body for layer in program.layers if layer.number in layers)
    return [program.block(name) for name in names]


def _dividing(axis: str, size: Any, blocks: Iterable[Block]) -> list[Any]:
    """Of each dim of parameters that the axis may cut, whether it does."""
    parameters = (p for block in blocks for p in block.parameters)
    dims = {p.shape[dim] for p in parameters for of_axis, dim in p.shard if of_axis == axis}
    return [dim % size == 0 for dim in sorted(dim for dim in dims if isinstance(dim, int))]


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
