"""The seconds of each iteration of a trace: of its step, and of its layers with experts.

A layer's seconds are found for a few loads, and between these by straight lines: they are a sum of maxima of lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moec.grammar.spec import Measured, Spec
from moec.grammar.spec.balance import Dynamic
from moec.passes.cost.groups import group_along
from moec.passes.cost.pass_time import BlockTime, work_of
from moec.passes.cost.rates import ClusterRates
from moec.passes.cost.seconds import Seconds, summed
from moec.passes.cost.step_time import runs_of_stages, stage_of, step_of_stages
from moec.passes.cost.totals import BlockCost, costs_of, parameter_state_bytes, runs_on
from moec.passes.ir import Program
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.work.cost import MASTER_BYTES
from moec.passes.ir.work.workload import Workload
from moec.passes.loads.figures import PLANNED, over_mean
from moec.passes.loads.placed_loads import PlacedLoads

MANY = 2**31
"""More ranks than share the experts of any layer: `Measured.load` takes the load of so many ranks for any fewer."""

LOADS = 9
"""The number of loads at which a layer's seconds are computed."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The median and the 95th percentile."""

    half: float
    planned: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Of a trace: rows of the busiest rank over the mean in each layer and iteration, at most what the gate allows;
    seconds of a step; seconds of both passes of a layer for a micro-batch, on average over a step's layers, and with an
    even load."""

    layer: Percentiles
    step: Percentiles
    layer_time: Percentiles
    even_layer_time: float


@dataclass(frozen=True, slots=True)
class _Curve:
    """The seconds of a layer at some loads; `total` are those of both passes."""

    loads: Any
    times: Sequence[BlockTime]

    @property
    def total(self) -> Any:
        return np.array([time.forward.total + time.backward.total for time in self.times])

    def at(self, load: float) -> BlockTime:
        after = min(max(1, int(np.searchsorted(self.loads, load))), len(self.loads) - 1)
        (low, high), (a, b) = self.loads[after - 1 : after + 1], self.times[after - 1 : after + 1]
        share = (load - low) / (high - low)
        parts = (1 - share, share)
        forward = summed(zip((a.forward, b.forward), parts, strict=True))
        backward = summed(zip((a.backward, b.backward), parts, strict=True))
        return BlockTime(forward, backward, parts[0] * a.weights + parts[1] * b.weights)


def step_figures(program: Program, spec: Spec, loads: PlacedLoads) -> StepFigures:
    """The figures of a plan, whose experts lie as `loads` says."""
    workload, rates = Workload.of_microbatch(spec, program).even, ClusterRates(spec.cluster)
    costs = costs_of(program, workload)
    blocks = {number: costs[call.block] for number, call in _mixtures(program, spec).items()}
    of_layers = _loads_of(loads, blocks, workload, program, spec)
    most = max(2.0, *(float(each.max()) for each in of_layers.values()))
    grid = np.linspace(1.0, most, LOADS)
    curves = {
        cost.block.name: _Curve(grid, [_time_of(program, cost, workload, float(load), rates) for load in grid])
        for cost in blocks.values()
    }
    seconds = {
        number: np.interp(each, grid, curves[blocks[number].block.name].total) for number, each in of_layers.items()
    }
    layer_time = np.mean(list(seconds.values()), axis=0)
    even = float(np.mean([curves[cost.block.name].total[0] for cost in blocks.values()]))
    order = np.argsort(_length(program, spec, costs, seconds, rates), kind="stable")

    def step(share: float) -> float:
        at = int(order[max(0, math.ceil(share * len(order)) - 1)])
        times = {number: curves[blocks[number].block.name].at(float(of_layers[number][at])) for number in blocks}
        return _step(program, spec, costs, times, rates).total

    return StepFigures(
        layer=_percentiles(np.stack(list(of_layers.values()))),
        step=Percentiles(step(0.5), step(PLANNED)),
        layer_time=_percentiles(layer_time),
        even_layer_time=even,
    )


def _percentiles(values: Any) -> Percentiles:
    half, planned = np.quantile(values, (0.5, PLANNED))
    return Percentiles(float(half), float(planned))


def _mixtures(program: Program, spec: Spec) -> dict[int, Any]:
    """The calls of the layers with experts, by the layers' numbers."""
    mixtures = {number for number, moe in enumerate(spec.subject.mixtures) if moe is not None}
    return {call.layer: call for call in layer_calls(program) if call.layer in mixtures}


def _loads_of(
    loads: PlacedLoads, blocks: Mapping[int, BlockCost], workload: Workload, program: Program, spec: Spec
) -> dict[int, Any]:
    """The load of each layer in each iteration."""
    found = dict[int, Any]()
    for place, number in enumerate(sorted(blocks)):
        block, experts = blocks[number].block, blocks[number].workload.meshes.experts
        bound, moe = replace(workload, exponent=math.inf).bound_to(program, block), spec.subject.mixtures[number]
        ranks = experts.size("ep") if experts is not None else 1
        if moe is not None and isinstance(moe.capacity, Dynamic):  # all experts have the places of the busiest one
            ranks, allowed = loads.experts, bound.busiest_of(loads.experts, loads.experts)
        else:
            allowed = max((bound.skew(v) for v in block.scope.values() if v.ragged is not None), default=1.0)
        rows = loads.rows(ranks)
        found[number] = np.minimum(over_mean(rows)[:, min(place, rows.shape[1] - 1)], allowed)
    return found


def _time_of(program: Program, cost: BlockCost, workload: Workload, load: float, rates: ClusterRates) -> BlockTime:
    one = Measured(file="-", ranks=(MANY,), layers=(1,), time=(load,), kept=(load,), most=(load,))
    of_load = BlockCost.of(program, cost.block, replace(workload, measured=one, mixtures=1))
    return work_of(of_load, rates).timed(cost.block.recompute)


def _step(
    program: Program, spec: Spec, costs: Mapping[str, BlockCost], times: Mapping[int, BlockTime], rates: ClusterRates
) -> Seconds:
    """The seconds of a step whose layers with experts take these `times`."""
    stages = []
    for number, runs in enumerate(runs_of_stages(program, costs)):
        layers = [call for call in layer_calls(program, [number]) if call.layer in times]
        of_experts = {call.block for call in layers}
        each = [(times[call.layer], 1.0) for call in layers]
        each += [
            (work_of(cost, rates).timed(cost.block.recompute), n)
            for cost, n in runs
            if cost.block.name not in of_experts
        ]
        stages.append(stage_of(each, costs, program, spec, rates, number))
    return step_of_stages(stages, costs, program, spec, rates)


def _length(
    program: Program, spec: Spec, costs: Mapping[str, BlockCost], seconds: Mapping[int, Any], rates: ClusterRates
) -> Any:
    """What orders iterations by their step: the slowest rank, and of a pipeline the bubble that the mean leaves."""
    ranks = []
    for stages in program.stages_by_rank:
        layers = [call for call in layer_calls(program, stages) if call.layer in seconds]
        of_experts = {call.block for call in layers}
        others = [
            (work_of(cost, rates).timed(cost.block.recompute), n)
            for cost, n in runs_on(program, costs, stages)
            if cost.block.name not in of_experts
        ]
        rest = sum(n * (time.forward.total + time.backward.total) for time, n in others)
        iterations = len(next(iter(seconds.values())))
        ranks.append(np.full(iterations, rest) + sum(seconds[call.layer] for call in layers))
    virtual = max(1, len(program.stages)) / len(ranks)
    return program.microbatches * np.max(ranks, 0) + (len(ranks) - 1) / virtual * np.mean(ranks, 0)


@dataclass(frozen=True, slots=True)
class Copies:
    """What copies of experts cost beside a step with their rows: bytes on a rank, and seconds to sum their gradients in
    fp32 among the ranks with a copy, hidden by nothing."""

    bytes: float
    seconds: float


def copies_of(program: Program, spec: Spec, loads: PlacedLoads) -> Copies:
    """The cost of a placement's copies: those of the pipeline rank with the most layers. A ring over the c ranks with
    a copy sends 2 (c - 1) / c of an expert: on average each rank sends two for each extra copy that it has."""
    costs = costs_of(program, Workload.of_microbatch(spec, program).even)
    rates, most = ClusterRates(spec.cluster), Copies(0.0, 0.0)
    for stages in program.stages_by_rank:
        size = seconds = 0.0
        for call in layer_calls(program, stages):
            cost = costs[call.block]
            meshes = cost.workload.meshes
            ranks = meshes.experts.size("ep") if meshes.experts is not None else 1
            if ranks == 1:
                continue
            ours = [p for p in cost.block.parameters if p.layout is not None and "ep" in p.layout.cuts(0)]
            states = sum(parameter_state_bytes(p, cost.workload, spec.update) for p in ours)
            elements = sum(math.prod(cost.workload.shape(p)) for p in ours if not p.frozen)
            of_rank = loads.experts / ranks
            size += -(-loads.placement.extra // ranks) * states / of_rank
            sent = 2 * loads.placement.extra / ranks * MASTER_BYTES * elements / of_rank
            seconds += rates.collective("all_reduce", sent, group_along("ep", meshes), of="gradients")
        most = max(most, Copies(size, seconds), key=lambda copies: copies.bytes)
    return most
