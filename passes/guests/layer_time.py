"""What rows, guests and moves of experts take on the file's cluster, by the cost model: what choices weigh."""

from __future__ import annotations

import math
from dataclasses import replace

from moec.grammar.spec import Spec, Update
from moec.passes.cost.groups import group_along
from moec.passes.cost.optimizers import state_bytes
from moec.passes.cost.pass_time import work_of
from moec.passes.cost.rates import ClusterRates
from moec.passes.cost.totals import BlockCost, costs_of
from moec.passes.guests.choice import LayerTime
from moec.passes.guests.place_guests import guest_bytes, homes_only
from moec.passes.ir import DTYPE_BYTES, Block, Program
from moec.passes.ir.work.cost import MASTER_BYTES
from moec.passes.ir.work.workload import Workload


def layer_times(program: Program, spec: Spec) -> dict[str, LayerTime]:
    """Of each block with slots, in seconds of both passes; of a guest once per step, of an expert that moves once.

    Guests hide beside nothing yet: a job sends them before the layer, and their gradients behind it.
    """
    rates, workload = ClusterRates(spec.cluster), Workload.of_microbatch(spec, program).even
    costs = costs_of(homes_only(program), workload)
    return {
        block.name: _layer_time(costs[block.name], block, rates, spec.update)
        for block in program.blocks
        if block.tables
    }


def _layer_time(cost: BlockCost, block: Block, rates: ClusterRates, update: Update) -> LayerTime:
    """Of a block with slots; `cost` is that without guests."""
    meshes = cost.workload.meshes
    ranks, group = meshes.size("ep"), group_along("ep", meshes)
    seconds = work_of(cost, rates).timed(block.recompute)
    both = seconds.forward + seconds.backward
    rows = max(cost.workload.count(v) / cost.workload.row(v) for v in cost.block.scope.values() if v.ragged is not None)
    sent = rows * (ranks - 1) / ranks
    return LayerTime(
        row=both.of.get("experts", 0.0) / rows,
        sent=both.of.get("all_to_all", 0.0) / sent,
        guest=rates.collective("all_to_all", sum(guest_bytes(block)), group, of="weights"),
        move=rates.collective("all_to_all", _bytes_of_expert(cost, update), group, of="weights"),
    )


def _bytes_of_expert(cost: BlockCost, update: Update) -> float:
    """What a rank has of one of its experts between two steps: its part of masters and optimizer states."""
    total = 0.0
    for p in cost.block.parameters:
        if p.is_of_experts:
            shape = cost.workload.shape(replace(p, layout=p.weight if p.frozen else p.optimizer_state))
            of_all = math.prod(shape) * (DTYPE_BYTES[p.dtype] if p.frozen else MASTER_BYTES)
            total += (of_all + (0 if p.frozen else state_bytes(shape, update, p.matrices))) / shape[0]
    return total
