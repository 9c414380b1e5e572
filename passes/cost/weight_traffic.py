"""What a rank sends of weights and gradients in a training step: sums of gradients, and the conversions of ZeRO."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from moec.passes.ir import DTYPE_BYTES, Block, Parameter
from moec.passes.ir.interface import is_forward
from moec.passes.ir.work.cost import MASTER_BYTES, Collective
from moec.passes.ir.work.workload import Workload
from moec.passes.place.schedule import gathers_again, is_summed, keeps_weights, num_gathers, num_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """Bytes that a rank sends over `axis` for one parameter, by a collective of rings: in forward and in backward.

    `is_per_pass`: it is sent in every pass of a step, not once.
    """

    axis: str
    collective: Collective
    of: Literal["weights", "gradients"]
    forward: float = 0.0
    backward: float = 0.0
    is_per_pass: bool = False

    @property
    def purpose(self) -> str:
        """`all_gather of weights`: the heading under which it is listed."""
        return f"{self.collective} of {self.of}"


def sendings(block: Block, workload: Workload, microbatches: int, saved: Collection[str]) -> Iterator[Sending]:
    """What a rank sends in a step for the weights and gradients of one run of `block`; `workload` is bound to it.

    A ring sends (n−1)/n of the tensor for an all-gather or a reduce-scatter, twice that for an all-reduce. Weights are
    gathered in the compute dtype, as often as the schedule says.

    `saved` names the parameters that ops save (`@embedding.weight` is none): at ZeRO 3 backward gathers all weights of
    a layer if it reads one, and of `forward` those that are read.
    """
    for parameter in block.parameters:
        is_read = bool(saved) if not is_forward(block) else f"@{parameter.name}" in saved
        yield from _sendings_of(parameter, workload, microbatches, is_read)


def _sendings_of(p: Parameter, workload: Workload, microbatches: int, is_read: bool) -> Iterator[Sending]:
    elements: float = math.prod(workload.shape(p))
    gathers = partial(Sending, collective="all_gather", of="weights", is_per_pass=gathers_again(p))
    sums = partial(Sending, of="gradients")
    for axis in p.gathered_over:
        ranks = workload.meshes.size(axis)
        sent = elements * (ranks - 1) / ranks
        gathered = sent * DTYPE_BYTES[p.dtype] * num_gathers(p, microbatches)
        again = gathered if gathers_again(p) and is_read else 0.0
        yield gathers(axis=axis, forward=gathered, backward=again)
        if p.frozen:
            return
        summed = sent * MASTER_BYTES * num_sums(p, microbatches)
        yield sums(axis=axis, collective="reduce_scatter", backward=summed, is_per_pass=p.scattered_per_pass)
        elements = elements / ranks
    for axis in (axis for axis in p.sum_over or () if axis not in p.gathered_over):
        ranks = workload.meshes.size(axis)
        sent = 2 * elements * (ranks - 1) / ranks
        yield sums(axis=axis, collective="all_reduce", backward=sent * MASTER_BYTES)


def copied_bytes(
    block: Block, workload: Workload, microbatches: int, saved: Collection[str], *, in_pipeline: bool
) -> float:
    """Bytes that a rank reads and writes in a step to cast masters to the compute dtype, to widen gradients to fp32,
    and to add those of several micro-batches."""
    casts = microbatches - keeps_weights(block, microbatches, in_pipeline=in_pipeline) * (microbatches - 1)
    return sum(_copied_bytes(p, workload, casts, microbatches, bool(saved)) for p in block.parameters if not p.frozen)


def _copied_bytes(p: Parameter, workload: Workload, casts: int, microbatches: int, is_read: bool) -> float:
    whole: float = math.prod(workload.shape(p))
    part = whole / math.prod(map(workload.meshes.size, p.gathered_over))
    cast = (MASTER_BYTES + DTYPE_BYTES[p.dtype]) * (DTYPE_BYTES[p.dtype] < MASTER_BYTES)
    again = 1 + (gathers_again(p) and is_read)
    collected = part if is_summed(p, last=False) else whole
    return cast * (casts * again * part + microbatches * whole) + 3 * MASTER_BYTES * (microbatches - 1) * collected
