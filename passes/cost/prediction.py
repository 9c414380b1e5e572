"""What a placed Program is predicted to do in a training step: its time, its rates, and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moec.grammar.spec import Spec
from moec.passes.cost.largest_skew import STEEPEST
from moec.passes.cost.memory import Memory, memory_of
from moec.passes.cost.rates import ClusterRates, Rates, peak
from moec.passes.cost.seconds import Seconds
from moec.passes.cost.step_time import step_seconds
from moec.passes.cost.totals import BlockCost, costs_of, largest_load, model_flops
from moec.passes.ir import Program
from moec.passes.ir.work.workload import Workload

BISECTIONS = 20
"""An exponent is found to a part in 2²⁰ of the steepest."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step of a plan, where each rank has the rows of the busiest one.

    `step`: seconds by term. `tokens`: of a step, over all ranks. `flops`: the model's, of forward and backward over all
    ranks, with the causal half of attention and no recomputation. `peak`: of all devices, in the model's dtype, per
    second. `skew`: rows of the busiest rank over the mean.
    """

    step: Seconds
    tokens: int
    flops: float
    peak: float
    ranks: int
    memory: Memory
    capacity: float
    skew: float

    @property
    def fits(self) -> bool:
        """Whether the peak of each rank's memory fits its device."""
        return self.memory.peak.bytes.total <= self.capacity

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.step.total / self.ranks

    @property
    def flops_per_second(self) -> float:
        """The model's FLOPs per second and device."""
        return self.flops / self.step.total / self.ranks

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), as a fraction."""
        return self.flops / self.step.total / self.peak


def predict(
    program: Program,
    spec: Spec,
    rates: Rates | None = None,
    memory: Memory | None = None,
    known: Mapping[str, BlockCost] | None = None,
) -> Prediction:
    """The prediction of a Program after all passes but the budget, for the workload of its file.

    `rates`: by default those that the file's cluster states. `memory`: that of the Program, and `known`: costs of a
    micro-batch, where they are known (`costs_of`).
    """
    batch, device = Workload.of(spec, program), spec.cluster.device
    flops_per_token = model_flops(program, costs_of(program, batch.even)) / batch.tokens
    return Prediction(
        step=step_of(program, spec, Workload.of_microbatch(spec, program), rates, known),
        tokens=batch.tokens,
        flops=flops_per_token * batch.tokens,
        peak=peak(device, spec.subject.dtype) * program.num_ranks,
        ranks=program.num_ranks,
        memory=memory or memory_of(program, spec),
        capacity=device.memory,
        skew=largest_load(program, batch),
    )


def step_of(
    program: Program,
    spec: Spec,
    workload: Workload,
    rates: Rates | None = None,
    known: Mapping[str, BlockCost] | None = None,
) -> Seconds:
    """The seconds of a step whose micro-batches are this workload; `known` costs are of it (`costs_of`)."""
    return step_seconds(costs_of(program, workload, known), program, spec, rates or ClusterRates(spec.cluster))


def workload_of_skew(program: Program, spec: Spec, skew: float) -> Workload | None:
    """A micro-batch in which the busiest rank has `skew` times the mean rows in the most uneven layer; None where no
    load is so uneven: rows may stay on their rank, or few ranks share the experts."""
    even = Workload.of_microbatch(spec, program).even
    low, high = 0.0, STEEPEST
    if largest_load(program, replace(even, exponent=high)) < skew:
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if largest_load(program, replace(even, exponent=middle)) < skew else (low, middle)
    return replace(even, exponent=high)
