"""How uneven a load of experts may be: the largest with which a training step still fits its device."""

from __future__ import annotations

from dataclasses import replace

from moec.grammar.spec import Spec
from moec.passes.cost.memory import memory_of
from moec.passes.cost.totals import costs_of
from moec.passes.ir import Program
from moec.passes.ir.work.workload import Workload

STEEPEST = 8.0
"""The exponent of the most uneven load that is tried: nearly all rows go to the first expert."""


def largest_skew(program: Program, spec: Spec, beside: float = 0.0) -> float | None:
    """The largest ratio of the busiest rank's load to the mean at which a step still fits the device, with so many
    bytes `beside` it. The same rank is the busiest in every layer.

    0 if it does not fit under an even load either; None if no load exceeds the device.
    """
    even = Workload.of_microbatch(spec, program).even

    def fits(exponent: float) -> bool:
        peak = memory_of(program, spec, replace(even, exponent=exponent)).peak.bytes.total
        return peak + beside <= spec.cluster.device.memory

    if fits(STEEPEST):
        return None
    if not fits(0.0):
        return 0.0
    low, high = 0.0, STEEPEST
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(cost.skew() for cost in costs_of(program, replace(even, exponent=low)).values())
