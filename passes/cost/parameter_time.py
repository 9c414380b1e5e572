"""The seconds that a rank spends on parameters in a step: gathers of weights, sums of gradients, casts, the update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moec.grammar.spec import Spec
from moec.passes.cost.groups import group_along
from moec.passes.cost.rates import Contents, Rates
from moec.passes.cost.seconds import Seconds
from moec.passes.cost.totals import BlockCost
from moec.passes.cost.update_time import update_seconds
from moec.passes.cost.weight_traffic import copied_bytes, sendings
from moec.passes.ir.work.arrays import larger, smaller
from moec.passes.ir.work.cost import Collective

HIDDEN = 0.55
"""The share that is hidden of the shorter of the two: gathers and sums, or the computations beside which they run.
Fitted to the published layouts of arXiv 2504.14960, tables 3 and 4."""

CARRIED: tuple[Contents, Contents] = ("weights", "gradients")

SOON = 1e-12
"""Seconds of what takes no time, to divide by."""


@dataclass(frozen=True, slots=True)
class ParameterWork:
    """What a rank does with parameters in a step: seconds of gathers and sums, by what they carry and whether every
    pass has them, and of the kernels that cast, add and update."""

    sent: Mapping[Contents, Mapping[bool, float]]
    casts: float
    optimizer: float

    def seconds(self, computed: float, microbatches: int) -> Seconds:
        """The seconds beside passes in which the rank computes for `computed` seconds.

        Gathers and sums of every pass may run beside all passes, those of the step beside one micro-batch's.
        """
        shown = {
            of_all: self._shown(of_all, computed if of_all else computed / microbatches) for of_all in (False, True)
        }
        weights, gradients = (
            sum(seconds * shown[of_all] for of_all, seconds in self.sent[what].items()) for what in CARRIED
        )
        return Seconds({"weights": weights, "gradients": gradients, "casts": self.casts, "optimizer": self.optimizer})

    def _shown(self, of_all: bool, computed: float) -> float:
        """The share of gathers and sums that computations of so many seconds do not hide."""
        total = sum(of.get(of_all, 0.0) for of in self.sent.values())
        return 1 - HIDDEN * smaller(1.0, computed / larger(total, SOON))


def parameter_work(
    runs: Sequence[tuple[BlockCost, int]], parts: int, spec: Spec, rates: Rates, *, in_pipeline: bool
) -> ParameterWork:
    """What a rank with these blocks does with parameters in a step of so many `parts`. Collectives of one group in one
    run of a block are priced as one message."""
    sent = {what: defaultdict[bool, float](float) for what in CARRIED}
    moved = 0.0
    for cost, count in runs:
        block, workload, saved = cost.block, cost.workload, cost.saved_parameters()
        together = defaultdict[tuple[Contents, bool, Collective, str, int], float](float)
        for s in sendings(block, workload, parts, saved):
            for is_back, size in enumerate((s.forward, s.backward)):
                key = (s.of, s.is_per_pass, s.collective, s.axis, is_back)
                together[key] = together[key] + size
        for (what, of_all, collective, axis, _), size in together.items():
            times = parts if of_all else 1
            seconds = times * rates.collective(collective, size / times, group_along(axis, workload.meshes), of=what)
            sent[what][of_all] = sent[what][of_all] + count * seconds
        moved = moved + count * copied_bytes(block, workload, parts, saved, in_pipeline=in_pipeline)
    return ParameterWork(sent, rates.copied(moved), update_seconds(runs, spec.update, rates))
