"""A pipeline in a few lines: the layers, parameters and peak memory of its ranks, its bubble, and its orders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moec.grammar.amounts import amount_of_bytes, si
from moec.grammar.layer_numbers import numbered
from moec.grammar.spec import Spec
from moec.passes.cost.memory import Memory, memory_of_ranks, ranks_in_words
from moec.passes.cost.step_time import pipeline_time, stages_of
from moec.passes.cost.totals import BlockCost, costs_of, runs_on
from moec.passes.ir import Program
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.order import Order
from moec.passes.ir.work.workload import Workload

PASSES = ("forward", "backward", "inputs", "weights")

MOST_PARTS = 8
"""The most parts of an order that are shown: half of them from its beginning, half from its end."""


def pipeline_lines(program: Program, spec: Spec) -> list[str]:
    """Lines of a summary; none of a plan of one stage."""
    if len(program.stages) < 2:
        return []
    costs = costs_of(program, Workload.of_microbatch(spec, program))
    bubble = pipeline_time(program, [stage.seconds for stage in stages_of(costs, program, spec)]).bubble
    head = f"{len(program.stages)} stages by `{program.schedule}`: the busiest rank waits {bubble:.0%} of its time"
    ranks = [_rank_line(program, costs, memory) for memory in memory_of_ranks(program, spec)]
    ends = (program.orders[0], program.orders[-1])
    orders = [f"{ranks_in_words(program, order.stages)}: {order_in_words(order)}" for order in ends]
    return [*_headed("pipeline", [head, *ranks]), *_headed("its order", orders)]


def _headed(head: str, lines: Sequence[str]) -> list[str]:
    return [f"  {head if index == 0 else '':<9} {line}" for index, line in enumerate(lines)]


def _rank_line(program: Program, costs: Mapping[str, BlockCost], memory: Memory) -> str:
    """`ranks 0..3, of stage 0: layers 0..1, 1.2 M parameters, 540 kB at the peak`."""
    layers = [call.layer for call in layer_calls(program, memory.stages)]
    runs = runs_on(program, costs, memory.stages)
    parameters = sum(times * whole for cost, times in runs for _, whole, *_ in cost.elements())
    peak = amount_of_bytes(memory.peak.bytes.total)
    words = ranks_in_words(program, memory.stages)
    return f"{words}: {numbered(layers)}, {si(parameters)} parameters, {peak} at the peak"


def order_in_words(order: Order) -> str:
    """`3 × forward, 5 × (forward, backward), 3 × backward`: the passes, with stages where the ranks have several."""
    several = len(order.stages) > 1
    words = [f"{a.kind} {a.stage}" if several else a.kind for a in order if a.kind in PASSES]
    parts = [*_repeated(words)]
    if len(parts) > MOST_PARTS:
        parts = [*parts[: MOST_PARTS // 2], "…", *parts[-MOST_PARTS // 2 :]]
    return ", ".join(parts)


LONGEST_PERIOD = 12
"""The most passes that are searched for repetitions."""


def _repeated(words: Sequence[str]) -> Iterator[str]:
    """The words in order, repetitions as `5 × (forward, backward)`."""
    place = 0
    while place < len(words):
        times = {period: _times(words, place, period) for period in range(1, LONGEST_PERIOD + 1)}
        period = max(times, key=lambda period: period * times[period] if times[period] > 1 else 1)
        listed = ", ".join(words[place : place + period])
        yield listed if times[period] == 1 else f"{times[period]} × {listed if period == 1 else f'({listed})'}"
        place += period * times[period]


def _times(words: Sequence[str], place: int, period: int) -> int:
    """How often the `period` words at `place` stand there in a row."""
    times = 1
    while words[place + times * period : place + (times + 1) * period] == words[place : place + period]:
        times += 1
    return times
