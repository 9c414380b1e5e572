"""What one run of a block takes in each plan of a table.

An op's cost depends on the sequences of a micro-batch and on the axes that its block uses: plans in which these are
equal are costed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from moec.grammar.spec import LoadUse, Measured
from moec.passes.cost.liveness import Run, steps_of
from moec.passes.cost.pass_time import work_of
from moec.passes.cost.rates import Rates
from moec.passes.cost.seconds import EXPOSED
from moec.passes.cost.totals import BlockCost
from moec.passes.ir import Block, Program, Recompute
from moec.passes.ir.mesh import DENSE_AXES, EXPERT_AXES, parts_of
from moec.passes.ir.ops import Conversion
from moec.passes.ir.work.arrays import larger
from moec.passes.ir.work.cost import Cost, Saved
from moec.passes.ir.work.workload import Workload
from moec.passes.search.space import Sizes
from moec.passes.search.tables import Part, Table, axes_of, group_numbers, on_meshes

Array = Any
"""A number for each plan."""


class BlockRun(NamedTuple):
    """Forward and backward over a micro-batch: seconds, those of collectives among them; bytes that are kept for
    backward, that wait until gradients of weights are computed, and that its worst moment takes."""

    seconds: Array
    sent: Array
    kept: Array
    queued: Array
    worst: Array


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """A block in each plan: its run with each word of `recompute`, and the bytes of its residual input.

    `costs` have the parameters that ops save, and nothing else of them; their meshes are those of all plans.
    """

    costs: Sequence[tuple[Part, BlockCost]]
    of: Mapping[Recompute, BlockRun]
    residual: Array


def runs_in(table: Table, name: str, words: Iterable[Recompute], rates: Rates, *, splits: bool) -> BlockRuns:
    """The runs of a block of the table; one outside of layers has that of `none` only.

    `splits`: a schedule computes gradients of weights apart from those of inputs.
    """
    words = tuple(words) if name in table.program.layer_blocks else ("none",)
    runs = [_runs_of(table, part, name, words, rates, splits=splits) for part in table.parts[name]]

    def of_all(values: Iterable[Array]) -> Array:
        joined = np.empty(len(table.rows))
        for part, value in zip(table.parts[name], values, strict=True):
            joined[part.plans] = value
        return joined

    return BlockRuns(
        [pair for run in runs for pair in run.costs],
        {word: BlockRun(*map(of_all, zip(*(run.of[word] for run in runs), strict=True))) for word in words},
        of_all(run.residual for run in runs),
    )


def _runs_of(
    table: Table, part: Part, name: str, words: Sequence[Recompute], rates: Rates, *, splits: bool
) -> BlockRuns:
    """The runs in the plans of one part."""
    block, is_layer = part.placement.program.block(name), name in table.program.layer_blocks
    numbers = group_numbers(column[part.plans] for column in _columns(table, part, block))
    firsts = part.plans[np.unique(numbers, return_index=True)[1]]
    cost = _cost(table, part, block, firsts, "kept")
    of_time = _cost(table, part, block, firsts, "time") if _is_measured(table) else cost
    work, steps = work_of(of_time, rates), steps_of(cost)

    def of_plans(value: Array) -> Array:
        return np.broadcast_to(value, len(firsts))[numbers]

    inputs = [v for v in block.inputs if v.role == "residual"]

    def run(word: Recompute) -> BlockRun:
        passes, memory = work.passes(word), Run.of_steps(steps, cost, word, splits=splits and is_layer)
        other = memory.to_inputs if is_layer else memory.forward
        kept = memory.kept.total + cost.workload.bytes(*(v for v in inputs if is_layer and v.name in memory.inputs))
        found = (
            sum(part.total for part in passes),
            sum(part.of.get(term, 0.0) for part in passes for term in EXPOSED),
            kept,
            memory.queued.total,
            larger(memory.backward.total, other.total),
        )
        return BlockRun(*map(of_plans, found))

    return BlockRuns(
        [(part, _of_parameters(cost, on_meshes(part.placement.program, table.axes)))],
        {word: run(word) for word in words},
        of_plans(cost.workload.bytes(*inputs)),
    )


def _columns(table: Table, part: Part, block: Block) -> list[Array]:
    """The numbers on which the costs of a block's ops depend: the sequences of a rank and micro-batch, and the sizes of
    the axes that they use and of those inside of these, which set the distance of a group's ranks."""
    pp, cp, tp, microbatches, _ = table.sizes
    ep, etp = table.pair_of(part, block)
    ranks = table.spec.cluster.ranks // pp
    sizes = {"cp": cp, "tp": tp, "ep": ep, "etp": etp, "dp": ranks // (cp * tp), "edp": ranks // (ep * etp)}
    cuts = {axis for v in block.scope.values() for axis in (v.layout.axes if v.layout else ())}
    used = cuts - {"dp", "dp_cp", "edp"}  # these cut the batch alone
    used |= {op.axis for op in block.ops if isinstance(op, Conversion)}
    if any(getattr(op, "group", "sequence") != "sequence" for op in block.ops):
        used.add("dp")
    parts = {part for axis in used for part in parts_of(axis)}
    inside = {axis for axes in (DENSE_AXES, EXPERT_AXES) for i, axis in enumerate(axes) if parts & {*axes[: i + 1]}}
    assert table.spec.train is not None
    sequences = table.spec.train.batch // microbatches // sizes["dp"]
    return [sequences, *([pp] if _is_measured(table) else []), *(sizes[axis] for axis in sorted(inside))]


def _is_measured(table: Table) -> bool:
    """Whether loads depend on the number of layers of a rank, and on what they are for."""
    return table.spec.train is not None and isinstance(table.spec.train.routing, Measured)


def _cost(table: Table, part: Part, block: Block, plans: Array, use: LoadUse) -> BlockCost:
    """The cost of a block in these plans; nothing of ZeRO is in it."""
    assert table.spec.train is not None
    sizes = Sizes.of(table.rows[plans].T)
    program = on_meshes(part.placement.program, axes_of(table.spec, sizes))
    workload = Workload.of(table.spec, program).planned_for(use)
    batch, mixtures = table.spec.train.batch // sizes.microbatches, -(-workload.mixtures // sizes.pp)
    return BlockCost.of(program, block, replace(workload, batch=batch, mixtures=mixtures))


def _of_parameters(cost: BlockCost, program: Program) -> BlockCost:
    """The block on the meshes of a Program, with no cost but the parameters that ops save."""
    saved = ((op, [Saved(s.name, 0.0) for s in of.saved if s.is_parameter]) for op, of in cost.costs)
    workload = replace(cost.workload, meshes=program.meshes_of(cost.block))
    return BlockCost(cost.block, workload, tuple((op, Cost(saved=tuple(names))) for op, names in saved))
