"""Compares the rounding errors of a plan, in its dtype, with those of the unsharded model in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moec.codegen.emit import DTYPES
from moec.codegen.plan import Plan
from moec.passes.ir import Op, Program
from moec.passes.ir import ops as o
from moec.passes.ir.activations import ACTIVATIONS
from moec.passes.ir.attribute_types import ActivationName
from moec.passes.ir.attributes import attributes_of_type
from moec.runtime.host.reference import reference_program
from moec.runtime.verify.cluster.lockstep import Watch
from moec.runtime.verify.cluster.prepared_graphs import Graphs
from moec.runtime.verify.cluster.recorded import BackwardError, StepError
from moec.runtime.verify.cluster.routes import Routes, sharded_choices
from moec.runtime.verify.cluster.virtual import VirtualCluster
from moec.runtime.verify.inputs import GlobalBatch
from moec.runtime.verify.rounding_errors import RoundingErrors
from moec.runtime.verify.rounding_runs import UnshardedRun, confident_logits, logits_gradients
from moec.runtime.verify.unsharded import Unsharded, states_of
from moec.runtime.verify.verify_report import Rounding

UNSHARDED_RUNS = 3
"""Runs of the unsharded model in a measurement: two in float64, and one in the plan's dtype."""


def measure_rounding(
    plan: Plan, model: Unsharded, batch: GlobalBatch, *, recompute: bool = False, watch: Watch | None = None
) -> Rounding:
    """Runs plan and unsharded model in the plan's dtype, from the parameters of `model`, and both against float64.

    All runs start from the same parameters, rounded once, send every token to the same experts, and run gelu where the
    model has relu, and attention without its clip.
    """
    program, plan = smooth(reference_program(plan.spec)), replace(plan, program=smooth(plan.program))
    parameters = {name: p.detach().to(DTYPES[plan.parameters[name].dtype]) for name, p in model.named_parameters()}
    dtype = DTYPES[plan.spec.subject.dtype]
    batch = batch.to(dtype)
    states = states_of(model)
    fp32_states = {name: state.float() for name, state in states.items()}
    float64_graphs = Graphs(program, float64=True)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}

    def run_in_float64(weights: Mapping[str, Tensor], routes: Routes) -> UnshardedRun:
        doubles = {name: weight.double() for name, weight in weights.items()}
        run = UnshardedRun(float64_graphs, doubles, states, routes, trained, watch)
        run.run(batch.to(torch.float64))
        return run

    exact = run_in_float64(parameters, Routes())
    choices = {path: experts[0] for path, experts in exact.routes.experts.items()}
    routes_of_one_rank = {path: [experts] for path, experts in choices.items()}
    nearby = {name: _perturbed(p, name) for name, p in parameters.items()}
    perturbed = run_in_float64(nearby, Routes(routes_of_one_rank))
    graphs = Graphs(program, float64=False)
    same_dtype = UnshardedRun(graphs, parameters, fp32_states, Routes(routes_of_one_rank), trained, watch)
    same_dtype.run(batch.to(dtype))
    routes = Routes(sharded_choices(plan, choices))
    cluster = VirtualCluster(plan, parameters, fp32_states, recompute=recompute, routes=routes, watch=watch)
    name = str(plan.spec.subject.dtype)
    confident = confident_logits(batch, plan.spec.model.outputs, dtype) if plan.spec.has_model else None
    try:
        step = cluster.step(batch.rank_inputs, batch.rank_targets, extra_inputs=batch.rank_extra_inputs)
        step.run()
        gradients = None if confident is None else logits_gradients(plan, cluster.lockstep, batch, confident)
    except (StepError, BackwardError) as failure:
        worst, inf = f"a pass that stopped, at {failure}", math.inf
        return Rounding(ok=False, dtype=name, worst=worst, output=inf, gradient=inf, mean=inf, step=inf)
    errors = RoundingErrors(plan, exact, same_dtype, perturbed)
    errors.add_outputs(step.stage_values.result, step.stage_values.scalars)
    errors.add_routers(routes)
    errors.add_gradients(step.gradients)
    if confident is None:
        errors.add_gradient_of_x(batch)
    else:
        assert gradients is not None
        errors.add_logits_gradient(gradients, *(run.logits_gradient(batch, confident) for run in (exact, same_dtype)))
    errors.add_step({name: p for name, p in parameters.items() if name in trained}, step.gradients)
    return errors.report(name)


def smooth(program: Program) -> Program:
    """The same Program with gelu for relu, and so on (`ActivationKind.smooth`), and without clamps and clips."""

    def change(op: Op) -> Op:
        attributes: dict[str, Any] = {
            name: kind.smooth
            for name in attributes_of_type(type(op), ActivationName)
            if (kind := ACTIVATIONS[getattr(op, name)]).smooth
        }
        if "clamp" in op.attribute_names():
            attributes["clamp"] = None
        if isinstance(op, o.Clip):
            attributes["limit"] = math.inf
        return replace(op, **attributes)

    return replace(program, blocks=tuple(replace(b, ops=tuple(map(change, b.ops))) for b in program.blocks))


def _perturbed(parameter: Tensor, name: str) -> Tensor:
    """`parameter` in float64, each element off by an eighth of its dtype's eps, up or down."""
    noise = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
    return parameter.double() * (1 + (noise - 0.5).sign() * torch.finfo(parameter.dtype).eps / 8)
