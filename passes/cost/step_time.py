"""An estimate of the time of a training step, to rank plans of one file. It is no prediction of seconds.

Each op takes the longer of its arithmetic and its memory traffic (roofline: Williams et al. 2009), each collective the
bytes that a rank sends over the bandwidth of the slowest level that its group crosses. Nothing overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from moec.grammar.spec import Cluster, Spec
from moec.passes.cost.totals import BlockCost, runs_of
from moec.passes.cost.weight_traffic import sendings
from moec.passes.cost.weights import weight_bytes
from moec.passes.ir import Program
from moec.passes.ir.mesh import EXPERT_AXES
from moec.passes.ir.ops import ExpertMlp, ExpertMlpPadded, MixtureMlp
from moec.passes.ir.work.cost import Cost, Direction
from moec.passes.place.schedule import order_of_step

EXPERTS = ExpertMlp | ExpertMlpPadded | MixtureMlp
"""The ops that `recompute = experts` runs again."""

FLOPS_PER_BYTE = 10.0
"""FLOPs of a device that states no peak, per byte of its memory's traffic. A guess: that of the library's `cpu`."""

NETWORK_SHARE = 0.25
"""Bandwidth of a level that states none, as a share of the device's memory's. A guess: a message is copied twice."""

LAUNCH = 5e-6
"""Seconds to launch a kernel on an accelerator. A guess, which makes many small micro-batches cost something."""


def step_seconds(costs: Mapping[str, BlockCost], program: Program, spec: Spec) -> float:
    """Seconds of a step on the rank with the most rows; `costs` are those of a micro-batch, by the blocks of `program`.

    A block's `recompute` is that of its cost.
    """
    seconds, order = 0.0, order_of_step(program, program.microbatches)
    for name, count in runs_of(program).items():
        cost = costs[name]
        forward, backward = pass_seconds(cost, spec)
        seconds += count * (order.count("forward") * forward + order.count("backward") * backward)
        sent = sum(
            (sending.forward + sending.backward) / _bandwidth(cost, sending.axis, spec.cluster)
            for sending in sendings(cost.block, cost.workload, program.microbatches, cost.saved_parameters())
        )
        updated = sum(
            2 * (w.masters + w.optimizer_states) for w in weight_bytes(cost, spec, program.microbatches).values()
        )
        seconds += count * (sent + updated / spec.cluster.device.bandwidth)
    return seconds


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
    stride, slowest, inside = mesh.stride(axis), math.inf, 1
    for level in cluster.levels:
        if level.size > 1 and inside < stride * mesh.size(axis) and stride < inside * level.size:
            slowest = min(slowest, level.bandwidth or NETWORK_SHARE * cluster.device.bandwidth)
        inside *= level.size
    return slowest
