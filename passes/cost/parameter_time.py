"""The seconds that a rank spends on parameters in a step: gathers of weights, sums of gradients, casts, the update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from moec.passes.ir.work.arrays import larger, smaller
from moec.passes.ir.work.cost import MASTER_BYTES

HIDDEN = 0.55
"""The share of the time of computations beside which gathers and sums run: fitted to the published layouts of arXiv
2504.14960, tables 3 and 4."""

SOON = 1e-12
"""Seconds of what takes no time, to divide by."""


def parameter_seconds(
    runs: Sequence[tuple[BlockCost, int]], program: Program, spec: Spec, rates: Rates, *, computed: float
) -> Seconds:
    """What a rank with these blocks needs in a step beside its passes, in which it computes for `computed` seconds.

    Gathers and sums of every pass may run beside all passes, those of the step beside one micro-batch's.
    """
    sent = {what: defaultdict[str, float](float) for what in ("weights", "gradients")}
    moved = updated = 0.0
    microbatches = program.microbatches
    for cost, count in runs:
        block, workload, saved = cost.block, cost.workload, cost.saved_parameters()
        for sending in sendings(block, workload, microbatches, saved):
            group = group_along(sending.axis, workload.meshes)
            for size in (sending.forward, sending.backward):
                seconds = rates.collective(sending.collective, size, group, of=sending.of)
                sent[sending.of][sending.gathered] += count * seconds
        moved += count * copied_bytes(block, workload, microbatches, saved, in_pipeline=len(program.stages) > 1)
        updated += count * _updated_bytes(cost, spec)
    weights, gradients = (
        sum(
            seconds * _shown(sent, when, computed if when == "per use" else computed / microbatches)
            for when, seconds in of.items()
        )
        for of in sent.values()
    )
    return Seconds(
        {
            "weights": weights,
            "gradients": gradients,
            "casts": rates.copied(moved),
            "optimizer": rates.updated(updated),
        }
    )


def _shown(sent: Mapping[str, Mapping[str, float]], when: str, computed: float) -> float:
    """The share of gathers and sums that computations of so many seconds do not hide."""
    total = sum(of.get(when, 0.0) for of in sent.values())
    return 1 - HIDDEN * smaller(1.0, computed / larger(total, SOON))


def _updated_bytes(cost: BlockCost, spec: Spec) -> float:
    """Bytes that an optimizer moves for a rank's own parts: the gradient for its norm and to scale it, then gradient,
    parameter and states."""
    total = 0.0
    for p in cost.block.parameters:
        if not p.frozen:
            shape = cost.workload.shape(replace(p, layout=p.optimizer_state or REPLICATED))
            total += 6 * MASTER_BYTES * math.prod(shape) + 2 * state_bytes(shape, spec.update, p.matrices)
    return total
