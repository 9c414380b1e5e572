"""The memory that a comparison on the virtual cluster needs, and its limits."""

from __future__ import annotations

import math

from moec.codegen.plan import Plan
from moec.passes.cost.totals import activation_bytes, costs_of
from moec.passes.ir import local_shape
from moec.passes.ir.value import DTYPE_BYTES
from moec.passes.ir.work.workload import Workload
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference_program
from moec.runtime.verify.inputs import batch_shape, microbatches_of

MAX_BYTES = 8 * 10**9
"""Limit for `weight_bytes`."""

ACTIVATION_BYTES = 4 * 10**9
"""Limit for the activations of all ranks. Above it they are recomputed in backward, which takes a third more time."""

GRAPH_BYTES = 50_000
"""Bytes of autograd's graph of one layer on one rank, besides the tensors that ops save."""


def recomputes(plan: Plan) -> bool:
    """Whether the virtual cluster recomputes activations in backward instead of keeping them.

    An upper estimate, from the reference: a plan may be wrong. It counts everything for each rank of
    `tp`, and every tensor in the plan's dtype, which float64 widens. 61 layers at toy widths on 256 ranks are estimated
    at 2.7 GB and keep 2.1 GB.
    """
    batch, sequence = batch_shape(plan, microbatches_of(plan))
    program = reference_program(plan.spec)
    saved = activation_bytes(program, costs_of(program, Workload(batch=batch, sequence=sequence)))
    saved *= plan.sharers * 8 / DTYPE_BYTES[plan.spec.subject.dtype]
    return saved + plan.stage_size * plan.spec.subject.depth * GRAPH_BYTES > ACTIVATION_BYTES


def weight_bytes(plan: Plan) -> int:
    """Bytes in float64, at most: three times the whole parameters, and twice the parts of every rank."""
    total = local_total = 0
    for parameter in plan.parameters.values():
        total += math.prod(parameter.shape)
        local = local_shape(parameter.shape, parameter.layout, plan.meshes[parameter.mesh])
        local_total += math.prod(local) * plan.stage_size
    return 8 * (3 * total + 2 * local_total)


def require_memory(plan: Plan, help: str) -> None:
    """Raises `JobError`, with `help`, for a plan whose `weight_bytes` are above `MAX_BYTES`."""
    needed = weight_bytes(plan)
    if needed > MAX_BYTES:
        raise JobError(
            "MOE0703",
            f"{plan.name}: about {needed / 1e9:.0f} GB in float64, the limit is {MAX_BYTES / 1e9:.0f} GB",
            help,
        )
