"""partition: cuts the Program into pipeline stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from moec.grammar.checking.marks import refused
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Spec
from moec.passes.cost.pass_time import pass_seconds
from moec.passes.cost.rates import ClusterRates, Rates
from moec.passes.cost.totals import BlockCost, costs_of
from moec.passes.degrees.degrees import Degrees
from moec.passes.ir import Program, Stage
from moec.passes.ir.interface import FORWARD
from moec.passes.ir.ops import Call
from moec.passes.ir.work.workload import Workload
from moec.passes.place.pipeline_tables import rank_of_stage
from moec.passes.place.stage_blocks import UncuttableError, cut_forward


@dataclass(frozen=True, slots=True)
class Partition:
    """Gives each pipeline rank its stages: ranges of consecutive layers, the first with the embedding and the last with
    the head.

    Without stated ranges no cut has a faster slowest stage, by the costs of ops. `known`: costs of a micro-batch, where
    they are known (`costs_of`).
    """

    spec: Spec
    degrees: Degrees
    known: Mapping[str, BlockCost] | None = None

    def apply(self, program: Program) -> Program:
        """The Program with its stages. Raises `DiagnosticError` where a stage would need a value of an earlier one that
        stages do not hand on."""
        size, degrees = program.mesh("dense").ranks, self.degrees
        if degrees.pp == 1:
            return replace(program, stages=(Stage(index=0, first_rank=0, num_ranks=size, forward=FORWARD),))
        num_stages = degrees.pp * degrees.virtual
        lasts = degrees.last_layers or _balanced(self._seconds_of_layers(program), num_stages)
        try:
            forwards = cut_forward(program.block(FORWARD), lasts)
        except UncuttableError as error:
            span, what = self.spec.parallel.span("pp"), f"a pipeline of this model, where {error}"
            raise DiagnosticError([refused(span, what, "set `pp = 1`", numbers=False)]) from None
        schedule = degrees.schedule or program.schedule
        stages = (
            Stage(
                index=index,
                first_rank=rank_of_stage(schedule, degrees.pp, index) * size,
                num_ranks=size,
                forward=forward.name,
            )
            for index, forward in enumerate(forwards)
        )
        blocks = (new for block in program.blocks for new in (forwards if block.name == FORWARD else [block]))
        return replace(program, blocks=tuple(blocks), stages=tuple(stages), schedule=schedule)

    def _seconds_of_layers(self, program: Program) -> list[float]:
        """Seconds of each layer's forward and backward pass over a micro-batch, of the first with what comes before it
        and of the last with what comes after it and the loss."""
        costs = costs_of(program, Workload.of_microbatch(self.spec, program), self.known)
        rates = ClusterRates(self.spec.cluster)
        seconds = {name: _both(cost, rates) for name, cost in costs.items()}
        of_layers = [seconds[layer.body] for layer in program.layers]
        before, after = _around_layers(costs[FORWARD])
        of_layers[0] += _both(before, rates)
        of_layers[-1] += _both(after, rates) + seconds.get("loss", 0.0)
        return of_layers


def _both(cost: BlockCost, rates: Rates) -> float:
    """Seconds of both passes of a block."""
    return sum(seconds.total for seconds in pass_seconds(cost, rates))


def _around_layers(forward: BlockCost) -> tuple[BlockCost, BlockCost]:
    """The costs of the ops of `forward` before and after its layers."""
    calls = [place for place, (op, _) in enumerate(forward.costs) if isinstance(op, Call)]
    return replace(forward, costs=forward.costs[: calls[0]]), replace(forward, costs=forward.costs[calls[-1] + 1 :])


def _balanced(seconds: Sequence[float], stages: int) -> list[int]:
    """The last layer of each of `stages` ranges, whose largest sum is as small as it can be.

    Each range has a layer. Later ranges are filled first: earlier stages have more micro-batches in flight.
    """
    sums = [*accumulate(seconds, initial=0.0)]
    low, high = max(seconds), sums[-1]
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _lasts_within(sums, stages, middle) else (middle, high)
    lasts = _lasts_within(sums, stages, low) or _lasts_within(sums, stages, high)
    assert lasts is not None
    return lasts


BISECTIONS = 40
"""The largest sum is found to a part in 2⁴⁰ of all seconds."""


def _lasts_within(sums: Sequence[float], stages: int, most: float) -> list[int] | None:
    """The last layers of ranges with sums of at most `most`, filled from the end; None if there are too few ranges.

    `sums[i]` is that of the layers before i.
    """
    end, lasts = len(sums) - 1, list[int]()
    for remaining in reversed(range(stages)):
        lasts.append(end - 1)
        first = min(bisect_left(sums, sums[end] - most), end - 1)
        end = max(first, remaining)  # each of the remaining ranges has a layer
    return None if end else lasts[::-1]
