"""What ranks hold and do for parameters, at each stage of ZeRO, in all plans of a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moec.grammar.spec import Spec
from moec.passes.cost.optimizers import kind_of
from moec.passes.cost.parameter_time import CARRIED, ParameterWork, parameter_work
from moec.passes.cost.rates import Rates
from moec.passes.cost.totals import BlockCost
from moec.passes.cost.update_time import update_seconds
from moec.passes.cost.weights import WeightBytes, weight_bytes
from moec.passes.ir import Layout, Mesh, Meshes, Parameter, Shard, local_shape
from moec.passes.ir.mesh import ZERO_AXES, parts_of
from moec.passes.ir.work.arrays import larger
from moec.passes.place.communicate import sums_of
from moec.passes.place.shard_zero import cut_by_zero
from moec.passes.search.blocks import BlockRuns
from moec.passes.search.placement import Placement
from moec.passes.search.tables import Part, Table, grouped

Array = Any
"""A number for each plan."""


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters in each plan at one stage of ZeRO, on the rank with most layers.

    Bytes of what stays throughout a step: `before` a backward pass with the gradients of earlier micro-batches, `after`
    it with those of all. `in_flight`: bytes of each micro-batch under way. Of each block, `copies` while its backward
    runs and `in_turn` when its gradients are summed. `has_cuts`: whether ZeRO cuts any parameter.
    """

    before: Array
    after: Array
    in_flight: Array
    copies: Mapping[str, Array]
    in_turn: Mapping[str, Array]
    work: ParameterWork
    has_cuts: Array


@dataclass(frozen=True, slots=True)
class Cut:
    """A block as ZeRO 3 cuts its parameters in the plans of some rows, and how often it runs there."""

    rows: Array
    cost: BlockCost
    share: Array
    every: tuple[BlockCost, Array]
    """The block, not cut, and its share in all plans."""


def cuts_of(table: Table, runs: Mapping[str, BlockRuns]) -> list[Cut]:
    """Each block of a table, once for all plans in which ZeRO cuts the same of its parameters."""
    return [
        Cut(rows, _cut(part.placement, _at(cost, rows), table.spec), share[rows], (cost, share))
        for block, share in table.shares
        for part, cost in runs[block.name].costs
        for rows in alike_for_zero(part, cost)
    ]


def alike_for_zero(part: Part, cost: BlockCost) -> list[Array]:
    """The plans of a part in which the same axes are wide, and ZeRO finds a dim to cut of the same parameters."""
    columns, meshes, placement = dict[object, Any](), _meshes_at(cost, part.plans), part.placement
    for p in cost.block.parameters:
        assert p.layout is not None
        axes = placement.summed[cost.block.name, p.name] & set(ZERO_AXES)
        hidden, local = placement.hidden_dims.get((cost.block.name, p.name)), local_shape(p.shape, p.layout, meshes)
        free = [d for d in range(len(p.shape)) if d == hidden or not p.layout.cuts(d)]
        columns |= {axis: meshes.size(axis) > 1 for axis in axes}
        key = (tuple(sorted(axes)), tuple((p.shape[d], p.layout.cuts(d)) for d in free))
        if axes and key not in columns:
            ranks = math.prod(map(meshes.size, axes))
            columns[key] = np.any([local[d] % ranks == 0 for d in free], axis=0)
    return [part.plans[rows] for rows in grouped([*columns.values()])] if columns else [part.plans]


def held(table: Table, cuts: Sequence[Cut], stage: int, rates: Rates) -> Held:
    """What ranks hold at this stage of ZeRO."""
    plans = len(table.rows)
    before, after, in_flight, casts, optimizer = (_zeros(plans) for _ in range(5))
    copies, in_turn = ({cut.cost.block.name: _zeros(plans) for cut in cuts} for _ in range(2))
    sent = {what: {of_all: _zeros(plans) for of_all in (False, True)} for what in CARRIED}
    has_cuts, adds = np.zeros(plans, bool), not kind_of(table.spec.update.optimizer).whole_matrices
    for cut in cuts:
        rows, share, cost = cut.rows, cut.share, _at_stage(cut.cost, stage)
        name, microbatches, in_pipeline = cost.block.name, table.sizes.microbatches[rows], table.sizes.pp[rows] > 1
        each = sum(weight_bytes(cost, table.spec, microbatches, in_pipeline=in_pipeline).values(), WeightBytes())
        always = each.masters + each.optimizer_states + each.step_copies
        before[rows] += share * (always + each.collected_gradients * (microbatches > 1))
        after[rows] += share * (always + _gradients_after(each, microbatches))
        in_flight[rows] += share * each.saved_copies
        sends = each.reduce_scatter_buffers * each.scatters_per_pass
        copies[name][rows] = each.regathered + each.gather_buffers * np.sign(each.regathered) + sends
        in_turn[name][rows] = each.narrow_gradients + each.wide_gradients + sends
        work = parameter_work([(cost, share)], microbatches, table.spec, rates, in_pipeline=in_pipeline)
        casts[rows] += work.casts
        if adds:
            optimizer[rows] += work.optimizer
        for what, of in work.sent.items():
            for of_all, seconds in of.items():
                sent[what][of_all][rows] += seconds
        has_cuts[rows] |= any(p.gathered != "never" for p in cost.block.parameters)
    if not adds:
        optimizer = _updates(table, cuts, stage, rates)
    return Held(before, after, in_flight, copies, in_turn, ParameterWork(sent, casts, optimizer), has_cuts)


def _updates(table: Table, cuts: Sequence[Cut], stage: int, rates: Rates) -> Array:
    """Seconds of an update that takes matrices of all blocks together. Kinds of mixtures with equal degrees have one
    mesh in a plan, and so exchange together."""
    seconds, numbers = _zeros(len(table.rows)), dict[str, Array]()
    for number, cut in enumerate(cuts):
        numbers.setdefault(cut.cost.block.name, np.zeros(len(table.rows), int))[cut.rows] = number
    meshes = [mesh.name for mesh in table.program.meshes if mesh.name != "dense"]
    equal = [_first_equal(table.sizes.experts, kind) for kind in range(len(meshes))]
    for rows in grouped([*numbers.values(), *equal]):
        runs = list[tuple[BlockCost, Array]]()
        for of_block in numbers.values():
            cut = cuts[of_block[rows[0]]]
            cost, share = cut.every
            block = _at_stage(cut.cost, stage).block
            if block.experts:
                block = replace(block, experts=meshes[equal[meshes.index(block.experts)][rows[0]]])
            runs.append((replace(_at(cost, rows), block=block), share[rows]))
        seconds[rows] = update_seconds(runs, table.spec.update, rates)
    return seconds


def _first_equal(pairs: Sequence[tuple[Array, Array]], kind: int) -> Array:
    """The first kind with the same pair of degrees as this one, in each plan."""
    found = np.full(len(pairs[kind][0]), kind)
    for other in reversed(range(kind)):
        found[(pairs[other][0] == pairs[kind][0]) & (pairs[other][1] == pairs[kind][1])] = other
    return found


def _zeros(plans: int) -> Array:
    return np.zeros(plans)


def _gradients_after(weights: WeightBytes, parts: Array) -> Array:
    """Bytes of gradients after a backward pass: those of ZeRO 2 and 3 are added to the earlier ones later."""
    collected = weights.collected_gradients + weights.pass_gradients * weights.scatters_per_pass
    return larger(collected * (parts > 1), larger(weights.pass_gradients, weights.final_gradients))


def _at(cost: BlockCost, rows: Array) -> BlockCost:
    """The cost of a block with the meshes of some plans; those of its ops stay what they are."""
    return replace(cost, workload=replace(cost.workload, meshes=_meshes_at(cost, rows)))


def _meshes_at(cost: BlockCost, rows: Array) -> Meshes:
    """The meshes of some plans, or of one."""
    meshes = cost.workload.meshes
    experts = None if meshes.experts is None else _mesh_at(meshes.experts, rows)
    return replace(meshes, dense=_mesh_at(meshes.dense, rows), experts=experts)


def _mesh_at(mesh: Mesh, rows: Array) -> Mesh:
    axes: Sequence[tuple[str, Array]] = mesh.axes
    sizes = ((axis, of_axis[rows]) for axis, of_axis in axes)
    return replace(mesh, axes=tuple((axis, size if np.ndim(size) else int(size)) for axis, size in sizes))


def _cut(placement: Placement, cost: BlockCost, spec: Spec) -> BlockCost:
    """The block with its parameters as ZeRO 3 lays them out in its first plan, those that lie alike as one."""
    meshes, cut = _meshes_at(cost, 0), list[Parameter]()
    for p in cost.block.parameters:
        axes = frozenset(axis for axis in placement.summed[cost.block.name, p.name] if meshes.size(axis) > 1)
        p = cut_by_zero(p, meshes, 3, axes, placement.hidden_dims.get((cost.block.name, p.name)))
        cut.append(replace(p, sum_over=() if p.frozen else sums_of(p, axes, meshes)))
    return replace(cost, block=replace(cost.block, parameters=tuple(_together(cost, spec, cut))))


def _at_stage(cost: BlockCost, stage: int) -> BlockCost:
    """The block, cut by ZeRO 3, as a stage of ZeRO cuts it."""
    meshes, parameters = _meshes_at(cost, 0), list[Parameter]()
    for p in cost.block.parameters:
        axes = {part for axis in p.sum_over or () for part in parts_of(axis) if meshes.size(part) > 1}
        is_cut = [stage > least and (stage > 2 or not p.frozen) for least in (2, 1, 0)]
        layouts = zip(is_cut, (p.weight, p.gradient, p.optimizer_state), strict=True)
        weight, gradient, state = (layout if cut else p.layout for cut, layout in layouts)
        p = replace(p, weight=weight, gradient=gradient, optimizer_state=state)
        parameters.append(replace(p, sum_over=sums_of(p, axes, meshes)))
    return replace(cost, block=replace(cost.block, parameters=tuple(parameters)))


def _together(cost: BlockCost, spec: Spec, parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    """Parameters that lie alike, as one of one dim; each by itself where an optimizer's states depend on shapes."""
    saved, alike = cost.saved_parameters(), dict[object, list[Parameter]]()
    adds = not kind_of(spec.update.optimizer).whole_matrices
    for p in parameters:
        axes = tuple(frozenset(layout.axes) if layout else None for layout in _layouts(p))
        key = (p.dtype, p.frozen, p.matrices.hidden, f"@{p.name}" in saved, p.sum_over, axes)
        alike.setdefault(key if adds else p.name, []).append(p)
    yield from (_as_one(together) if len(together) > 1 else together[0] for together in alike.values())


def _as_one(parameters: Sequence[Parameter]) -> Parameter:
    """A parameter with the elements of all, which the same axes cut."""
    first = parameters[0]
    elements = sum(math.prod(dim for dim in p.shape if isinstance(dim, int)) for p in parameters)
    flat = [layout and Layout.of(dict.fromkeys(layout.axes, Shard(0))) for layout in _layouts(first)]
    layout, weight, gradient, state = flat
    return replace(first, shape=(elements,), layout=layout, weight=weight, gradient=gradient, optimizer_state=state)


def _layouts(p: Parameter) -> tuple[Layout | None, ...]:
    return p.layout, p.weight, p.gradient, p.optimizer_state
