"""The memory of each pipeline rank over a training step: what takes it at each moment, and the peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import NamedTuple

from moec.grammar.spec import Spec
from moec.passes.cost.buffers import Buffers, Bytes, MemoryKind
from moec.passes.cost.optimizer_work import work_bytes
from moec.passes.cost.pipeline_passes import KEPT, RankPasses, passes_of_ranks
from moec.passes.cost.stage_memory import LayerMemory, Moment, StageMemory
from moec.passes.cost.totals import BlockCost, costs_of, each_parameter_once
from moec.passes.cost.weights import WeightBytes
from moec.passes.ir import Program
from moec.passes.ir.interface import forwards, layer_calls
from moec.passes.ir.ops import Call
from moec.passes.ir.work.workload import Workload
from moec.passes.place.pipeline_orders import orders_of, pipeline_of

DEVICE_BYTES = {"cuda": 3.9e9, "hip": 3.9e9}
"""What a device's context and its communicators' buffers take: 3.5 GB + 0.4 GB, measured on NVIDIA with NCCL."""


ALWAYS: tuple[MemoryKind, ...] = ("parameters", "optimizer", "device")
"""Kinds of memory that take the same bytes at every moment of a step."""


@dataclass(frozen=True)
class Memory:
    """One rank of some `stages` over one training step, event by event.

    In a single stage the events of the first micro-batch, then those of the last; in a pipeline the worst moment of
    each event over all micro-batches. `layers` are the distinct layers by the names of their blocks.
    """

    moments: tuple[Moment, ...]
    layers: Mapping[str, LayerMemory]
    stages: tuple[int, ...]

    @cached_property
    def peak(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.bytes.total)


def ranks_in_words(program: Program, stages: Sequence[int]) -> str:
    """`ranks 8..15, of stage 1`: the ranks that run these stages."""
    ranks = program.stages[stages[0]].ranks
    numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}..{ranks[-1]}"
    return f"{numbers}, of stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def memory_of(program: Program, spec: Spec, workload: Workload | None = None) -> Memory:
    """The memory of the rank with the most rows, for micro-batches of `workload`; by default those of the file. In a
    pipeline that of the rank with the highest peak."""
    return largest_of(peaks_of_ranks(program, spec, workload))


def largest_of(ranks: Iterable[RankMemory]) -> Memory:
    """That with the highest peak."""
    return max(ranks, key=lambda rank: rank.peak).memory()


def memory_of_ranks(program: Program, spec: Spec, workload: Workload | None = None) -> list[Memory]:
    """The memory of each pipeline rank."""
    return [rank.memory() for rank in peaks_of_ranks(program, spec, workload)]


def peaks_of_ranks(
    program: Program, spec: Spec, workload: Workload | None = None, known: Mapping[str, BlockCost] | None = None
) -> list[RankMemory]:
    """The memory of each pipeline rank, which is computed when it is asked for. Ranks whose stages are equal but for
    names take the same bytes. `known`: costs of an even load, where they are known (`costs_of`)."""
    workload = workload or Workload.of_microbatch(spec, program)
    kept, most = workload.planned_for("kept"), workload.planned_for("most")
    costs = costs_of(program, kept, known)
    uneven = costs if most is kept else costs_of(program, most)
    layers = {
        name: LayerMemory.of(costs[name], spec, program, uneven[name])
        for name, numbers in program.layers_by_block.items()
        if numbers
    }
    if len(program.stages) > 1:
        passes = passes_of_ranks(program.schedule, pipeline_of(program, program.microbatches))
    else:
        (order,) = orders_of(program, min(program.microbatches, 2))
        passes = (RankPasses.of((0,), [*order], 0),)
    make = partial(_Timeline, program, spec, costs, layers)
    runs, ranks = dict[object, Callable[[], _Runs]](), list[RankMemory]()
    for stages, of_rank in zip(program.stages_by_rank, passes, strict=True):
        parts = [_without_names(program, stage) for stage in stages]
        key: object = stages if None in parts else (*parts, of_rank.runs)
        if key not in runs:
            runs[key] = cache(partial(_runs_of, make, stages, of_rank))
        numbers = tuple(call.layer for call in layer_calls(program, stages))
        ranks.append(RankMemory(stages, numbers, of_rank, runs[key], layers, len(program.stages) > 1))
    return ranks


def _without_names(program: Program, stage: int) -> object:
    """The inputs, ops and outputs of a stage without names and numbers of layers, to compare it with others; None if it
    is the first or the last one, or has parameters of its own."""
    block = forwards(program)[stage]
    if not 0 < stage < len(program.stages) - 1 or block.parameters:
        return None
    numbers, ops = {value.name: str(number) for number, value in enumerate(block.inputs)}, list[object]()
    for op in block.ops:
        operands = tuple(numbers.get(name, name) for name in op.operands)
        ops.append((op.block, operands) if isinstance(op, Call) else replace(op, operands=operands, results=()))
        numbers.update({value.name: f"{len(ops)}.{place}" for place, value in enumerate(op.results)})
    inputs = [(value.role, value.shape, value.dtype, value.layout) for value in block.inputs]
    return (*inputs, *ops, *((output.role, numbers[output.name]) for output in block.outputs))


class _Runs(NamedTuple):
    """The passes of a rank by themselves.

    `moments`: of each pass; `most`: their most bytes. `left`: what a micro-batch keeps that waits (`KEPT`), stage by
    stage; `sizes`: the bytes of each. `end`: the moments after all passes. `layers`: the numbers of the layers in
    events.
    """

    moments: Sequence[Sequence[Moment]]
    most: Sequence[float]
    left: Sequence[Bytes]
    sizes: Sequence[float]
    end: Sequence[Moment]
    layers: Sequence[int]


@dataclass(frozen=True)
class RankMemory:
    """The memory of the ranks that run some `stages` with these `layers`; of a rank that is alone, for each
    micro-batch."""

    stages: tuple[int, ...]
    numbers: tuple[int, ...]
    passes: RankPasses
    run: Callable[[], _Runs]
    layers: Mapping[str, LayerMemory]
    is_pipeline: bool

    @cached_property
    def peak(self) -> float:
        """The bytes at the moment with the most."""
        runs = self.run()
        of_passes = map(sum, zip(runs.most, self.passes.most_waiting(runs.sizes), strict=True))
        return max(*of_passes, *(moment.bytes.total for moment in runs.end))

    def memory(self) -> Memory:
        """All of it."""
        of_rank = {
            name: replace(layer, numbers=own)
            for name, layer in self.layers.items()
            if (own := tuple(number for number in layer.numbers if number in self.numbers))
        }
        return Memory((*self._merged(), *self.run().end), of_rank, self.stages)

    def _merged(self) -> Iterable[Moment]:
        """The worst moment of each event; in a single stage, of each micro-batch."""
        runs, worst = self.run(), dict[object, Moment]()
        numbers = dict(zip(runs.layers, self.numbers, strict=True))
        for number, each in enumerate(self.passes.passes):
            waiting = self.passes.largest_waiting(number, runs.sizes)
            others = sum((of.times(n) for of, n in zip(runs.left, waiting, strict=True) if n), Bytes())
            for moment in runs.moments[number]:
                moment = moment.of_layer(numbers)
                key = moment.event, None if self.is_pipeline else each.microbatch
                moment = replace(moment, bytes=moment.bytes + others)
                if key not in worst or moment.bytes.total > worst[key].bytes.total:
                    worst[key] = moment
        return worst.values()


def _runs_of(make: Callable[[Sequence[int]], _Timeline], stages: Sequence[int], of_rank: RankPasses) -> _Runs:
    return make(stages).runs(of_rank)


class _Timeline:
    """Runs the passes of a rank in order, each once for all micro-batches that find the same tensors of the step.

    Micro-batches that wait in a stage take equal bytes.
    """

    def __init__(
        self,
        program: Program,
        spec: Spec,
        costs: Mapping[str, BlockCost],
        layers: Mapping[str, LayerMemory],
        stages: Sequence[int],
    ) -> None:
        self.step, self.last = Buffers(), stages.index(max(stages))
        self.stages = [StageMemory(program, spec, costs, layers, stage, self.step) for stage in stages]
        self.top_level = {name: weights for stage in self.stages for name, weights in stage.top_level.items()}
        self.calls = [op for stage in self.stages for op in stage.layer_calls()]
        self.sums = [*self.top_level, *(f"layer {op.layer}" for op in self.calls)]
        self.weights_of_units = [*self.top_level.values(), *(layers[op.block].weights for op in self.calls)]
        totals = sum(self.weights_of_units, WeightBytes())
        largest = max(
            [weights.optimizer_states for weights in self.top_level.values()]
            + [layers[op.block].largest_state for op in self.calls]
        )
        outside = each_parameter_once(costs[stage.block.name] for stage in self.stages)
        called_blocks = [costs[op.block] for op in self.calls]
        self.work = work_bytes([*outside, *called_blocks], totals.optimizer_states, largest, spec.update)
        self.step.add("masters", "parameters", totals.masters)
        self.step.add("states", "optimizer", totals.optimizer_states)
        self.step.add("device", "device", DEVICE_BYTES.get(spec.cluster.device.kind, 0.0))

    def runs(self, of_rank: RankPasses) -> _Runs:
        """The moments of each pass, and those at the end of the step."""
        moments = [self.stages[each.place].run(each.kind, each.position) for each in of_rank.passes]
        left = [stage.left.get(kind, Bytes()) for stage in self.stages for kind in KEPT]
        return _Runs(
            moments,
            [max((moment.bytes.total for moment in of), default=0.0) for of in moments],
            left,
            [of.total for of in left],
            (self._sums_end(), self._update()),
            [op.layer for op in self.calls],
        )

    def _sums_end(self) -> Moment:
        """Sums end layer by layer, each with a copy of its part."""
        self.step.drop("sent")
        most = max(weights.sum_copies for weights in self.weights_of_units)
        moment = Moment("gradient sums", self.stages[self.last].alive.bytes() + Bytes({"communication": most}))
        for name in self.sums:
            self.step.drop(f"sum {name}")
            self.step.drop(f"step copy {name}")
        return moment

    def _update(self) -> Moment:
        """The optimizer's step, which reads the summed gradients."""
        reduced = sum(weights.final_gradients for weights in self.weights_of_units)
        work = Bytes({"work": self.work} if self.work else {})
        return Moment("optimizer step", self.stages[self.last].alive.bytes() + Bytes({"gradients": reduced}) + work)
