"""What jobs do in a step is what the plan's schedule says: random plans on gloo ranks, line by line."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given
from property.random_pipelines import pipelines
from property.random_specs import specs
from support.examples import examples
from support.ranks.gloo_pool import GlooPool
from support.ranks.training import batches_of

import moec
from moec.codegen.plan import Plan
from moec.driver import compile as compile_source
from moec.grammar.spec import Spec
from moec.passes.cost.totals import costs_of
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.work.workload import Workload
from moec.passes.place.schedule import events_inside, gathers_again, units_of
from moec.runtime.action_log import VARIABLE

MESSAGES = "receive", "send", "receive_gradients", "send_gradients"


def one_step(plan: Plan) -> list[str]:
    """The actions that this rank has noted in a step."""
    tokens, labels = batches_of(plan.spec, 1)[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        moec.launch(plan, device="cpu") as job,
        pytest.MonkeyPatch.context() as patch,
    ):
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        patch.setenv(VARIABLE, str(log := Path(folder) / "not there yet"))
        mine = (part.chunk(job.data_size)[job.data_rank] for part in (tokens, labels))
        job.step(model, *mine)
        job.clip_grad_norm_(model, 1.0)
        optimizer.step()
        return (log / f"rank{os.environ['RANK']}.actions").read_text().splitlines()


def scheduled(plan: Plan, rank: int) -> list[str]:
    """The actions of a rank that the plan says."""
    program = plan.program
    costs = costs_of(program, Workload.of_microbatch(plan.spec, program))
    blocks = {f"layers.{call.layer}": call.block for call in layer_calls(program)}
    order = next(order for order in program.orders if order.stages == plan.stages_of(rank))
    units = {stage: units_of(program, stage) for stage in order.stages}
    read = {
        unit.name
        for stage, of_stage in units.items()
        for unit in of_stage
        for p in unit.parameters
        if gathers_again(p)
        and f"@{p.name}" in costs[blocks.get(unit.name, program.stages[stage].forward)].saved_parameters()
    }
    lines = list[str]()
    for action in order:
        if action.kind in MESSAGES:
            lines.append(str(action))
        elif action.kind not in ("forward", "backward", "inputs", "weights"):
            lines.append(action.kind)
        if action.stage is not None:
            lines += map(str, events_inside(order, action, units[action.stage], read))
    return lines


@examples(8, 100)
@given(specs(max_ranks=4))
def test_a_job_does_what_its_schedule_says(gloo: GlooPool, spec: Spec):
    assume(
        spec.cluster.ranks > 1
    )  # one rank alone in fp32 has no sums and no casts, and its backward is autograd's alone
    plan = compile_source(spec)
    for rank, noted in enumerate(gloo.run(plan.world_size, one_step, plan, initialize=False)):
        assert noted == scheduled(plan, rank)


@examples(3, 60)
@given(pipelines(max_ranks=2))
def test_the_ranks_of_a_pipeline_do_what_its_schedule_says(gloo: GlooPool, plan: Plan):
    assume(plan.stage_size > 1 and plan.world_size <= 8)
    for rank, noted in enumerate(gloo.run(plan.world_size, one_step, plan, initialize=False)):
        assert noted == scheduled(plan, rank)
