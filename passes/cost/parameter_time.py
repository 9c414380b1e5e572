"""The seconds that a rank spends on parameters in a step: gathers of weights, sums of gradients, casts, the update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from moec.grammar.spec import Spec
from moec.passes.cost.groups import group_along
from moec.passes.cost.optimizers import state_bytes
from moec.passes.cost.rates import Rates
from moec.passes.cost.seconds import Seconds
from moec.passes.cost.totals import BlockCost
from moec.passes.cost.weight_traffic import copied_bytes, sendings
from moec.passes.ir import Program
from moec.passes.ir.layout import REPLICATED
from moec.passes.ir.work.cost import MASTER_BYTES

HIDDEN = {"per use": 0.5, "per step": 0.4, "never": 0.4}
"""The share of gathers and sums that runs beside computations, by when a parameter is gathered: fitted to the published
layouts of arXiv 2504.14960, tables 3 and 4, where FSDP hides half of its traffic and a distributed optimizer less."""


def parameter_seconds(
    runs: Sequence[tuple[BlockCost, int]], program: Program, spec: Spec, rates: Rates, *, passes: float
) -> Seconds:
    """What a rank with these blocks needs in a step beside its passes, which take `passes` seconds."""
    sent = defaultdict[str, float](float)
    moved = updated = 0.0
    microbatches = program.microbatches
    for cost, count in runs:
        block, workload, saved = cost.block, cost.workload, cost.saved_parameters()
        for sending in sendings(block, workload, microbatches, saved):
            group = group_along(sending.axis, workload.meshes)
            for size in (sending.forward, sending.backward):
                seconds = rates.collective(sending.collective, size, group)
                sent[sending.of] += count * seconds * (1 - HIDDEN[sending.gathered])
        moved += count * copied_bytes(block, workload, microbatches, saved)
        updated += count * _updated_bytes(cost, spec)
    return Seconds(
        {
            "weights": sent["weights"],
            "gradients": sent["gradients"],
            "casts": rates.moved(moved),
            "optimizer": rates.updated(updated),
        }
    )


def _updated_bytes(cost: BlockCost, spec: Spec) -> float:
    """Bytes that an optimizer moves for a rank's own parts: the gradient for its norm and to scale it, then gradient,
    parameter and states."""
    total = 0.0
    for p in cost.block.parameters:
        if not p.frozen:
            shape = cost.workload.shape(replace(p, layout=p.optimizer_state or REPLICATED))
            total += 6 * MASTER_BYTES * math.prod(shape) + 2 * state_bytes(shape, spec.update, p.matrices)
    return total
