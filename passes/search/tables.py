"""All plans of a file: their sizes as arrays, and placements for those that have the same ops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from moec.grammar.spec import Spec
from moec.passes.cost.totals import runs_of
from moec.passes.ir import Block, Program
from moec.passes.place.tensor_parallel import kv_heads_of
from moec.passes.search.placement import Placement
from moec.passes.search.space import Sizes, Space

Rows = Any
"""An array with a row of `Sizes` for each plan."""

Array = Any
"""A number for each plan."""


class Part(NamedTuple):
    """Plans in which a block has the same ops: their numbers, and a placement of it."""

    plans: Array
    placement: Placement


@dataclass(frozen=True)
class Table:
    """Plans of a file. `parts`: of each block, by its name, all of them."""

    space: Space
    rows: Rows
    parts: Mapping[str, Sequence[Part]]

    @classmethod
    def of(cls, space: Space, lowered: Program, rows: Rows) -> Table:
        """The table of some plans.

        Two plans place a block alike if the same of `tp`, and of its own `ep` and `etp`, are wide and divide the same
        dims of parameters, and kv heads are copied as often. `dp` and `cp` are placed as wide: all that they add are
        conversions, which cost nothing where there is one rank.
        """
        sizes, parts = Sizes.of(rows.T), dict[str, list[Part]]()
        dense, *of_kinds = structures(space, lowered, sizes)
        for plans in grouped([dense]):
            base = Sizes.of(map(int, rows[plans[np.argmax(sizes.cp[plans])]]))
            kinds = [[plans[part] for part in grouped([of_kind[plans]])] for of_kind in of_kinds]
            for number in range(max(map(len, kinds))):
                firsts = [of_kind[min(number, len(of_kind) - 1)][0] for of_kind in kinds]
                pairs = [Sizes.of(map(int, rows[first])).experts[kind] for kind, first in enumerate(firsts)]
                placement = Placement(space, lowered, base._replace(experts=pairs))
                for block in placement.program.blocks:
                    kind = placement.kind_of(block)
                    of_block = [plans] if kind is None else kinds[kind]
                    if number < len(of_block):
                        parts.setdefault(block.name, []).append(Part(of_block[number], placement))
        return cls(space, rows, parts)

    @property
    def spec(self) -> Spec:
        """The file."""
        return self.space.spec

    @property
    def program(self) -> Program:
        """The Program of some plan: blocks, how often they run, and layers are those of all."""
        return next(iter(self.parts.values()))[0].placement.program

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of the plans' axes: an array of each."""
        return Sizes.of(self.rows.T)

    @cached_property
    def axes(self) -> Axes:
        """The axes of the plans' meshes."""
        return axes_of(self.spec, self.sizes)

    def pair_of(self, part: Part, block: Block) -> tuple[Array, Array]:
        """`ep` and `etp` of the experts of a block, in each plan; 1 where it has none."""
        kind = part.placement.kind_of(block)
        return (np.ones_like(self.sizes.pp),) * 2 if kind is None else self.sizes.experts[kind]

    @cached_property
    def shares(self) -> list[tuple[Block, Array]]:
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


def _elements(block: Block) -> int:
    return sum(math.prod(dim for dim in p.shape if isinstance(dim, int)) for p in block.parameters)


Axes = Sequence[tuple[tuple[str, Any], ...]]
"""The axes of the dense mesh, and of that of each kind of mixtures."""


def axes_of(spec: Spec, sizes: Sizes) -> Axes:
    """The axes of the meshes of these plans."""
    ranks = spec.cluster.ranks // sizes.pp
    dense = (("dp", ranks // (sizes.cp * sizes.tp)), ("cp", sizes.cp), ("tp", sizes.tp))
    return [dense, *((("edp", ranks // (ep * etp)), ("ep", ep), ("etp", etp)) for ep, etp in sizes.experts)]


def on_meshes(program: Program, axes: Axes) -> Program:
    """The Program on meshes with these axes; a model without mixtures has the dense one only."""
    meshes = (replace(mesh, axes=of_mesh) for mesh, of_mesh in zip(program.meshes, axes, strict=False))
    return replace(program, meshes=tuple(meshes))


def structures(space: Space, lowered: Program, sizes: Sizes) -> Iterator[Array]:
    """The numbers of the ways in which plans place what is no mixture, and the mixtures of each kind."""
    columns = [sizes.tp > 1, *_dividing("tp", sizes.tp, lowered.blocks)]
    for heads in {kv_heads_of(block) for block in lowered.blocks} - {None}:
        copies = np.where(heads % sizes.tp > 0, sizes.tp // heads, 1)
        on_rank = heads * copies // sizes.tp
        columns += [copies, np.where(on_rank % sizes.cp > 0, sizes.cp // on_rank, 1)]
    yield (dense := group_numbers(columns))
    for kind, (ep, etp) in zip(space.kinds, sizes.experts, strict=True):
        blocks = [lowered.block(name) for name in {of.body for of in lowered.layers if of.number in kind.layers}]
        dims = [*_dividing("ep", ep, blocks), *_dividing("etp", etp, blocks)]
        yield group_numbers([dense, ep > 1, etp > 1, *dims])


def _dividing(axis: str, size: Array, blocks: Iterable[Block]) -> list[Array]:
    """Of each dim of parameters that the axis may cut, whether it does."""
    parameters = (p for block in blocks for p in block.parameters)
    dims = {p.shape[dim] for p in parameters for of_axis, dim in p.shard if of_axis == axis}
    return [dim % size == 0 for dim in sorted(dim for dim in dims if isinstance(dim, int))]


def grouped(columns: list[Any]) -> Iterator[Any]:
    """The numbers of the rows whose columns are equal."""
    numbers = group_numbers(columns)
    for group in range(int(numbers.max()) + 1):
        yield np.flatnonzero(numbers == group)


def group_numbers(columns: Iterable[Any]) -> Any:
    """For each row the number of its values, in their order: equal rows have equal ones, and none is left out."""
    numbers: Any = 0
    for column in columns:
        values, places = np.unique(column, return_inverse=True)
        numbers = np.unique(numbers * len(values) + places.reshape(-1), return_inverse=True)[1].reshape(-1)
    return numbers
