"""Predicted seconds of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans import moe_text

from moec.grammar import load_text
from moec.passes.cost.step_time import step_seconds
from moec.passes.cost.totals import costs_of
from moec.passes.ir.work.workload import Workload
from moec.passes.pipeline import compile_program


def seconds(inner: str, outer: str, ep: int) -> float:
    """Of a step on two nodes of two devices."""
    levels = f'level "node" {{ size = 2; bandwidth = {inner} }}; level "rail" {{ size = 2; bandwidth = {outer} }}'
    spec = load_text(moe_text(ranks=4, ep=ep, dp=4, levels=levels, depth=2)).unwrap()
    program = compile_program(spec, "schedule").program
    workload = Workload.of(spec, program)
    part = replace(workload, batch=workload.batch // program.microbatches)
    return step_seconds(costs_of(program, part), program, spec).total


@pytest.mark.parametrize("ep", [2, 4])
def test_each_level_that_a_group_crosses_takes_its_time(ep: int) -> None:
    fast = seconds("100GB/s", "100GB/s", ep)
    assert seconds("100GB/s", "1MB/s", ep) > 10 * fast
    assert seconds("1MB/s", "100GB/s", ep) > 10 * fast
