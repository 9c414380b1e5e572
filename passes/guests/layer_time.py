"""What rows and guests of a layer take on the file's cluster, by the cost model: what the choice of guests weighs."""

from __future__ import annotations

from moec.grammar.spec import Spec
from moec.passes.cost.groups import group_along
from moec.passes.cost.pass_time import work_of
from moec.passes.cost.rates import ClusterRates
from moec.passes.cost.totals import BlockCost, costs_of
from moec.passes.guests.choice import LayerTime
from moec.passes.guests.place_guests import guest_bytes, homes_only
from moec.passes.ir import Block, Program
from moec.passes.ir.work.workload import Workload


def layer_times(program: Program, spec: Spec) -> dict[str, LayerTime]:
    """Of each block with slots for guests, in seconds of both passes; of a guest once per step.

    Guests hide beside nothing yet: a job sends them before the layer, and their gradients behind it.
    """
    rates, workload = ClusterRates(spec.cluster), Workload.of_microbatch(spec, program).even
    costs = costs_of(homes_only(program), workload)
    return {block.name: _layer_time(costs[block.name], block, rates) for block in program.blocks if block.tables}


def _layer_time(cost: BlockCost, block: Block, rates: ClusterRates) -> LayerTime:
    """Of a block with guests; `cost` is that without."""
    meshes = cost.workload.meshes
    ranks, group = meshes.size("ep"), group_along("ep", meshes)
    seconds = work_of(cost, rates).timed(block.recompute)
    both = seconds.forward + seconds.backward
    rows = max(cost.workload.count(v) / cost.workload.row(v) for v in cost.block.scope.values() if v.ragged is not None)
    sent = rows * (ranks - 1) / ranks
    return LayerTime(
        row=both.of.get("experts", 0.0) / rows,
        sent=both.of.get("all_to_all", 0.0) / sent,
        guest=rates.collective("all_to_all", guest_bytes(block), group, of="weights"),
    )
