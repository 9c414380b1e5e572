"""An estimate of the time of a training step, to rank plans of one file. It is no prediction of seconds.

Each op takes the longer of its arithmetic and its memory traffic (roofline: Williams et al. 2009), each collective the
bytes that a rank sends over the bandwidth of the slowest level that its group crosses. In a pipeline ranks
compute at the same time, and messages between stages run beside computations; nothing else overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from moec.grammar.spec import Cluster, Spec
from moec.passes.cost.pipeline_time import PipelineTime, StageSeconds, follow
from moec.passes.cost.totals import BlockCost, message_bytes, runs_on
from moec.passes.cost.weight_traffic import sendings
from moec.passes.cost.weights import weight_bytes
from moec.passes.ir import Program
from moec.passes.ir.mesh import EXPERT_AXES
from moec.passes.ir.ops import ExpertMlp, ExpertMlpPadded, MixtureMlp
from moec.passes.ir.work.cost import Cost, Direction
from moec.passes.place.schedule import orders_of_step

EXPERTS = ExpertMlp | ExpertMlpPadded | MixtureMlp
"""The ops that `recompute = experts` runs again."""

FLOPS_PER_BYTE = 10.0
"""FLOPs of a device that states no peak, per byte of its memory's traffic. A guess: that of the library's `cpu`."""

NETWORK_SHARE = 0.25
"""Bandwidth of a level that states none, as a share of the device's memory's. A guess: a message is copied twice."""

LAUNCH = 5e-6
"""Seconds to launch a kernel on an accelerator. A guess, which makes many small micro-batches cost something."""


def step_seconds(costs: Mapping[str, BlockCost], program: Program, spec: Spec) -> float:
    """Seconds of a step where each rank has the rows of the busiest one; of a pipeline, until its last rank ends.

    `costs`: those of a micro-batch by the blocks of `program`. A block's `recompute` is that of its cost.
    """
    ends = zip(program.stages_by_rank, pipeline_time(costs, program, spec).ends, strict=True)
    return max(end + _seconds_of_parameters(runs_on(program, costs, stages), program, spec) for stages, end in ends)


def _seconds_of_parameters(runs: Sequence[tuple[BlockCost, int]], program: Program, spec: Spec) -> float:
    """Seconds in which a rank sends weights and gradients in a step, and updates parameters."""
    seconds, passes = 0.0, program.microbatches
    for cost, count in runs:
        sent = sum(
            (sending.forward + sending.backward) / _bandwidth(cost, sending.axis, spec.cluster)
            for sending in sendings(cost.block, cost.workload, passes, cost.saved_parameters())
        )
        updated = sum(2 * (w.masters + w.optimizer_states) for w in weight_bytes(cost, spec, passes).values())
        seconds += count * (sent + updated / spec.cluster.device.bandwidth)
    return seconds


def pipeline_time(costs: Mapping[str, BlockCost], program: Program, spec: Spec) -> PipelineTime:
    """The time of a step's passes, by the orders of the ranks; `costs` are those of a micro-batch."""
    stages = [_stage_seconds(costs, program, spec, number) for number in range(max(1, len(program.stages)))]
    if len(stages) == 1:  # one order sends nothing, and may have very many micro-batches
        seconds = program.microbatches * (stages[0].forward + stages[0].backward)
        return PipelineTime((seconds,), (seconds,))
    return follow(orders_of_step(program, program.microbatches), stages)


def _stage_seconds(costs: Mapping[str, BlockCost], program: Program, spec: Spec, number: int) -> StageSeconds:
    forward = backward = weights = message = 0.0
    for cost, count in runs_on(program, costs, [number]):
        of_forward, of_backward = pass_seconds(cost, spec)
        forward, backward = forward + count * of_forward, backward + count * of_backward
        weights += count * sum(_seconds(of_op.work.backward.of_weights, spec) for _, of_op in cost.costs)
    stages = program.stages[number : number + 2]
    if len(stages) == 2 and stages[0].first_rank != stages[1].first_rank:
        bandwidth = _bandwidth_between(stages[0].ranks, stages[1].ranks, spec.cluster)
        message = message_bytes(costs[stages[0].forward]) / bandwidth
    return StageSeconds(forward=forward, backward=backward, weights=weights, message=message)


def pass_seconds(cost: BlockCost, spec: Spec) -> tuple[float, float]:
    """Seconds of a block in the forward pass and in the backward pass of a micro-batch."""
    of_ops = [_op_seconds(of_op, cost, spec, again) for of_op, again in _ops(cost)]
    return sum(forward for forward, _ in of_ops), sum(backward for _, backward in of_ops)


def _ops(cost: BlockCost) -> Iterator[tuple[Cost, bool]]:
    """The costs of a block's ops, and whether backward computes the op again."""
    word = cost.block.recompute
    for op, of_op in cost.costs:
        yield of_op, word == "layer" or (word == "experts" and isinstance(op, EXPERTS))


def _op_seconds(of_op: Cost, cost: BlockCost, spec: Spec, again: bool) -> tuple[float, float]:
    """Seconds in a forward pass and in a backward pass; `again`: backward computes the op again."""
    forward, backward = (_seconds(direction, spec) for direction in (of_op.work.forward, of_op.work.backward))
    for sent in of_op.sent:
        bandwidth = _bandwidth(cost, sent.axis, spec.cluster)
        forward += sent.forward / bandwidth
        backward += sent.backward / bandwidth
    return forward, backward + forward * again


def _seconds(direction: Direction, spec: Spec) -> float:
    device = spec.cluster.device
    peak = getattr(device.peak, spec.subject.dtype) or FLOPS_PER_BYTE * device.bandwidth
    products = sum(max(p.flops / peak, p.moved / device.bandwidth) for p in direction.products)
    launches = LAUNCH * direction.launches if device.kind != "cpu" else 0.0
    return products + direction.moved / device.bandwidth + launches


def _bandwidth(cost: BlockCost, axis: str, cluster: Cluster) -> float:
    """Bytes per second of a rank over the slowest level that groups along `axis` cross."""
    meshes = cost.workload.meshes
    mesh = meshes.experts if axis in EXPERT_AXES and meshes.experts is not None else meshes.dense
    stride = mesh.stride(axis)
    span = stride * mesh.size(axis)
    return _slowest(cluster, lambda inside, size: inside < span and stride < inside * size)


def _bandwidth_between(ranks: range, others: range, cluster: Cluster) -> float:
    """Bytes per second of a rank over the slowest level that messages between two stages cross."""
    pairs = [(ranks[place], others[place]) for place in (0, -1)]
    return _slowest(cluster, lambda inside, size: any(a // inside % size != b // inside % size for a, b in pairs))


def _slowest(cluster: Cluster, is_crossed: Callable[[int, int], bool]) -> float:
    """Bandwidth of the slowest crossed level, by its number of ranks inside of a unit, and of units."""
    slowest, inside = math.inf, 1
    for level in cluster.levels:
        if level.size > 1 and is_crossed(inside, level.size):
            slowest = min(slowest, level.bandwidth or NETWORK_SHARE * cluster.device.bandwidth)
        inside *= level.size
    return slowest
