"""The time of a training step: of the passes, by the orders of the ranks, and of weights, gradients and optimizer.

In a pipeline ranks compute at the same time, and messages between stages run beside computations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moec.grammar.spec import Spec
from moec.passes.cost.groups import outermost_between
from moec.passes.cost.parameter_time import ParameterWork, parameter_work
from moec.passes.cost.pass_time import BlockTime, work_of
from moec.passes.cost.pipeline_time import PipelineTime, StageSeconds, follow
from moec.passes.cost.rates import ClusterRates, Rates
from moec.passes.cost.seconds import EXPOSED, Seconds, summed
from moec.passes.cost.totals import BlockCost, message_bytes, runs_on
from moec.passes.ir import Program
from moec.passes.place.pipeline_orders import pipeline_of


def step_seconds(costs: Mapping[str, BlockCost], program: Program, spec: Spec, rates: Rates | None = None) -> Seconds:
    """Seconds of a step where each rank has the rows of the busiest one; of a pipeline, until its last rank ends.

    `costs`: those of a micro-batch by the blocks of `program`. A block's `recompute` is that of its cost. `rates`: by
    default those that the file's cluster states.
    """
    rates = rates or ClusterRates(spec.cluster)
    return step_of_stages(stages_of(costs, program, spec, rates), costs, program, spec, rates)


def step_of_stages(
    stages: Sequence[StageTime], costs: Mapping[str, BlockCost], program: Program, spec: Spec, rates: Rates
) -> Seconds:
    """Seconds of a step with these passes of each stage."""
    time = pipeline_time(program, [stage.seconds for stage in stages])
    passes = summed((part, program.microbatches / len(time.ends)) for s in stages for part in (s.forward, s.backward))
    computing = 1 - sum(passes.of.get(term, 0.0) for term in EXPOSED) / passes.total
    ranks, known, in_pipeline = list[Seconds](), dict[object, ParameterWork](), len(program.stages) > 1
    for end, busy, numbers in zip(time.ends, time.busy, program.stages_by_rank, strict=True):
        runs = [(cost, n) for cost, n in runs_on(program, costs, numbers) if cost.block.parameters]
        key = tuple((cost.block.name, len(cost.block.parameters), n) for cost, n in runs)
        if key not in known:
            known[key] = parameter_work(runs, program.microbatches, spec, rates, in_pipeline=in_pipeline)
        after = known[key].seconds(computing * busy, program.microbatches)
        waits = Seconds({"uneven": busy - sum(time.busy) / len(time.busy), "bubble": end - busy})
        ranks.append(after + (waits if len(time.ends) > 1 else Seconds()))
    return passes + max(ranks, key=lambda seconds: seconds.total)


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of a stage's passes over a micro-batch, by what takes them, and as a pipeline needs them."""

    forward: Seconds
    backward: Seconds
    seconds: StageSeconds


def stages_of(
    costs: Mapping[str, BlockCost], program: Program, spec: Spec, rates: Rates | None = None
) -> list[StageTime]:
    """The passes of each stage; `costs` are those of a micro-batch."""
    rates = rates or ClusterRates(spec.cluster)
    of_blocks = {name: work_of(cost, rates) for name, cost in costs.items()}
    return [
        stage_of(
            [(of_blocks[cost.block.name].timed(cost.block.recompute), n) for cost, n in runs],
            costs,
            program,
            spec,
            rates,
            number,
        )
        for number, runs in enumerate(runs_of_stages(program, costs))
    ]


def runs_of_stages(program: Program, costs: Mapping[str, BlockCost]) -> Iterator[list[tuple[BlockCost, int]]]:
    """The blocks of each stage, and how often it runs them."""
    return (runs_on(program, costs, [number]) for number in range(max(1, len(program.stages))))


def pipeline_time(program: Program, stages: Sequence[StageSeconds]) -> PipelineTime:
    """The time of a step's passes, by the schedule."""
    if len(stages) == 1:  # one order sends nothing, and may have very many micro-batches
        seconds = program.microbatches * (stages[0].forward + stages[0].backward)
        return PipelineTime((seconds,), (seconds,))
    return follow(program.schedule, pipeline_of(program, program.microbatches), stages)


def stage_of(
    runs: Sequence[tuple[BlockTime, float]],
    costs: Mapping[str, BlockCost],
    program: Program,
    spec: Spec,
    rates: Rates,
    number: int,
) -> StageTime:
    """The passes of stage `number`, of all that it runs, and how often."""
    forward = summed((of.forward, n) for of, n in runs)
    backward = summed((of.backward, n) for of, n in runs)
    weights, message, stages = sum(n * of.weights for of, n in runs), 0.0, program.stages[number : number + 2]
    if len(stages) == 2 and stages[0].first_rank != stages[1].first_rank:
        crossed = outermost_between(stages[0].ranks, stages[1].ranks, spec.cluster)
        message = rates.message(message_bytes(costs[stages[0].forward]), crossed)
    seconds = StageSeconds(forward=forward.total, backward=backward.total, weights=weights, message=message)
    return StageTime(forward, backward, seconds)
