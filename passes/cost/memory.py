"""The memory of each pipeline rank over a training step: what takes it at each moment, and the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from moec.grammar.spec import Spec
from moec.passes.cost.buffers import Buffers, Bytes, MemoryKind
from moec.passes.cost.optimizer_work import work_bytes
from moec.passes.cost.stage_memory import LayerMemory, Moment, PassPosition, StageMemory
from moec.passes.cost.totals import BlockCost, costs_of, each_parameter_once
from moec.passes.cost.weights import WeightBytes
from moec.passes.ir import Program
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.order import ActionKind, Order
from moec.passes.ir.work.workload import Workload
from moec.passes.place.schedule import orders_of_step

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
    return largest_of(memory_of_ranks(program, spec, workload))


def largest_of(memories: Iterable[Memory]) -> Memory:
    """That with the highest peak."""
    return max(memories, key=lambda memory: memory.peak.bytes.total)


def memory_of_ranks(program: Program, spec: Spec, workload: Workload | None = None) -> list[Memory]:
    """The memory of each pipeline rank."""
    workload = workload or Workload.of_microbatch(spec, program)
    kept, most = workload.planned_for("kept"), workload.planned_for("most")
    costs = costs_of(program, kept)
    uneven = costs if most is kept else costs_of(program, most)
    layers = {
        name: LayerMemory.of(costs[name], spec, program, uneven[name])
        for name, numbers in program.layers_by_block.items()
        if numbers
    }
    microbatches = program.microbatches if len(program.stages) > 1 else min(program.microbatches, 2)
    memories = list[Memory]()
    for order in orders_of_step(program, microbatches):
        numbers = {call.layer for call in layer_calls(program, order.stages)}
        of_rank = {
            name: replace(layer, numbers=own)
            for name, layer in layers.items()
            if (own := tuple(number for number in layer.numbers if number in numbers))
        }
        moments = _Timeline(program, spec, costs, of_rank, order).moments()
        memories.append(Memory(tuple(moments), of_rank, order.stages))
    return memories


@dataclass(slots=True)
class _Passes:
    """Equal passes over different micro-batches: their moments, and the most that other micro-batches take in one."""

    moments: list[Moment]
    microbatch: int | None
    others: Bytes
    most: float = -1.0


class _Timeline:
    """Follows the order of a rank, and notes the bytes at its events.

    Micro-batches under way in a stage take equal bytes. So the walk runs a pass once for all micro-batches that find
    the same tensors of the step, and counts the other micro-batches that wait meanwhile.
    """

    def __init__(
        self,
        program: Program,
        spec: Spec,
        costs: Mapping[str, BlockCost],
        layers: Mapping[str, LayerMemory],
        order: Order,
    ) -> None:
        self.order, self.is_pipeline, self.last_stage = order, len(program.stages) > 1, max(order.stages)
        self.step = Buffers()
        self.stages = {stage: StageMemory(program, spec, costs, layers, stage, self.step) for stage in order.stages}
        stages = self.stages.values()
        self.top_level = {name: weights for stage in stages for name, weights in stage.top_level.items()}
        calls = [op for stage in stages for op in stage.layer_calls()]
        self.sums = [*self.top_level, *(f"layer {op.layer}" for op in calls)]
        self.weights_of_units = [*self.top_level.values(), *(layers[op.block].weights for op in calls)]
        totals = sum(self.weights_of_units, WeightBytes())
        largest = max(
            [weights.optimizer_states for weights in self.top_level.values()]
            + [layer.largest_state for layer in layers.values()]
        )
        outside = each_parameter_once(costs[stage.block.name] for stage in stages)
        called_blocks = [costs[op.block] for op in calls]
        self.work = work_bytes([*outside, *called_blocks], totals.optimizer_states, largest, spec.update)
        self.step.add("masters", "parameters", totals.masters)
        self.step.add("states", "optimizer", totals.optimizer_states)
        self.step.add("device", "device", DEVICE_BYTES.get(spec.cluster.device.kind, 0.0))

    def moments(self) -> Iterator[Moment]:
        """Every event of the step, the worst moment of each."""
        yield from self._merged(self._passes())
        yield self._sums_end()
        yield self._update()

    def _passes(self) -> Iterable[_Passes]:
        passes, begun, changes, last = dict[object, _Passes](), set[object](), 0, self.order.last_of_stage
        latest, waiting = dict[tuple[int, int | None], ActionKind](), Counter[tuple[int, ActionKind]]()
        sizes, others = self._left(), 0.0
        for action in self.order:
            kind, stage = action.kind, self.last_stage if action.stage is None else action.stage
            if action.microbatch is None or kind in ("send", "send_gradients"):
                continue
            if (before := latest.pop((stage, action.microbatch), None)) is not None:
                waiting[stage, before] -= 1
                others -= sizes[stage, before]
            if kind not in ("receive", "receive_gradients"):
                part, position = "backward" if kind == "weights" else kind, PassPosition()
                is_first = part in ("forward", "backward") and (part, stage) not in begun
                if is_first or last[stage] == action:
                    begun.add((part, stage))
                    changes, position = changes + 1, PassPosition(is_first, last[stage] == action)
                key = kind, stage, position, changes
                if key not in passes:
                    passes[key] = _Passes(self.stages[stage].run(kind, position), action.microbatch, Bytes())
                    sizes = self._left()
                    others = sum(number * sizes[of] for of, number in waiting.items() if number)
                if others > passes[key].most:
                    left = (self.stages[s].left[k].times(number) for (s, k), number in waiting.items() if number)
                    passes[key].most, passes[key].others = others, sum(left, Bytes())
            if kind not in ("backward", "weights"):
                latest[stage, action.microbatch] = kind
                waiting[stage, kind] += 1
                others += sizes[stage, kind]
        return passes.values()

    def _left(self) -> dict[tuple[int, ActionKind], float]:
        """The bytes that a micro-batch keeps in a stage after its latest action of each kind."""
        return {(stage, kind): of.total for stage, passes in self.stages.items() for kind, of in passes.left.items()}

    def _merged(self, passes: Iterable[_Passes]) -> Iterable[Moment]:
        """The worst moment of each event; in a single stage, of each micro-batch."""
        worst: dict[object, Moment] = {}
        for each in passes:
            for moment in each.moments:
                key = moment.event, None if self.is_pipeline else each.microbatch
                moment = replace(moment, bytes=moment.bytes + each.others)
                if key not in worst or moment.bytes.total > worst[key].bytes.total:
                    worst[key] = moment
        return worst.values()

    def _sums_end(self) -> Moment:
        """Sums end layer by layer, each with a copy of its part."""
        self.step.drop("sent")
        most = max(weights.sum_copies for weights in self.weights_of_units)
        moment = Moment("gradient sums", self.stages[self.last_stage].alive.bytes() + Bytes({"communication": most}))
        for name in self.sums:
            self.step.drop(f"sum {name}")
            self.step.drop(f"step copy {name}")
        return moment

    def _update(self) -> Moment:
        """The optimizer's step, which reads the summed gradients."""
        reduced = sum(weights.final_gradients for weights in self.weights_of_units)
        work = Bytes({"work": self.work} if self.work else {})
        return Moment(
            "optimizer step", self.stages[self.last_stage].alive.bytes() + Bytes({"gradients": reduced}) + work
        )
