"""Compares the rounding errors of a plan, in its dtype, with those of the unsharded model in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
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
from moec.runtime.verify.cluster.routes import Routes, shared_out
from moec.runtime.verify.cluster.virtual import VirtualCluster
from moec.runtime.verify.inputs import Inputs
from moec.runtime.verify.rounding_errors import RoundingErrors
from moec.runtime.verify.rounding_runs import UnshardedRun, confident_logits, loss_alone
from moec.runtime.verify.unsharded import Unsharded, states_of
from moec.runtime.verify.verify_report import Rounding

UNSHARDED_RUNS = 3
"""Runs of the unsharded model in a measurement: two in float64, and one in the plan's dtype."""


def measure_rounding(
    plan: Plan, model: Unsharded, inputs: Inputs, *, recompute: bool = False, watch: Watch | None = None
) -> Rounding:
    """Runs plan and unsharded model in the plan's dtype, from the parameters of `model`, and both against float64.

    All runs start from the same parameters, rounded once, send every token to the same experts, and run gelu where the
    model has relu, and attention without its clip.
    """
    program, plan = smooth(reference_program(plan.spec)), replace(plan, program=smooth(plan.program))
    narrow = {name: p.detach().to(DTYPES[plan.parameters[name].dtype]) for name, p in model.named_parameters()}
    dtype = DTYPES[plan.spec.subject.dtype]
    inputs = inputs.to(dtype)
    states = states_of(model)
    single = {name: state.float() for name, state in states.items()}
    doubled = Graphs(program, float64=True)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    exact = _run_exactly(doubled, narrow, states, inputs, Routes(), trained, watch)
    choices = {path: experts[0] for path, experts in exact.routes.experts.items()}
    again = {name: _rounded_again(p, name) for name, p in narrow.items()}
    perturbed = _run_exactly(doubled, again, states, inputs, Routes(_alone(choices)), trained, watch)
    same_dtype = UnshardedRun(Graphs(program, float64=False), narrow, single, Routes(_alone(choices)), trained, watch)
    same_dtype.run(inputs.to(dtype))
    routes = Routes(shared_out(plan, choices))
    cluster = VirtualCluster(plan, narrow, single, recompute=recompute, routes=routes, watch=watch)
    name = str(plan.spec.subject.dtype)
    confident = confident_logits(inputs, plan.spec.model.outputs, dtype) if plan.spec.has_model else None
    try:
        step = cluster.step(inputs.rank_given, inputs.rank_targets, beside=inputs.rank_beside)
        step.run()
        of_logits = None if confident is None else loss_alone(plan, cluster.lockstep, inputs, confident)
    except (StepError, BackwardError) as failure:
        off = math.inf
        return Rounding(
            ok=False,
            dtype=name,
            worst=f"a pass that stopped, at {failure}",
            output=off,
            gradient=off,
            mean=off,
            step=off,
        )
    found = RoundingErrors(plan, exact, same_dtype, perturbed)
    found.outputs(step.passes.result, step.passes.scalars)
    found.routers(routes)
    found.gradients(step.gradients)
    if confident is None:
        found.gradient_of_x(inputs)
    else:
        assert of_logits is not None
        found.loss_alone(of_logits, *(run.loss_alone(inputs, confident) for run in (exact, same_dtype)))
    found.step({name: p for name, p in narrow.items() if name in trained}, step.gradients)
    return found.report(name)


def _run_exactly(
    graphs: Graphs,
    parameters: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    inputs: Inputs,
    routes: Routes,
    trained: Container[str],
    watch: Watch | None,
) -> UnshardedRun:
    """The run of the unsharded model in float64, on these parameters and inputs, which are widened."""
    run = UnshardedRun(graphs, {name: p.double() for name, p in parameters.items()}, states, routes, trained, watch)
    run.run(inputs.to(torch.float64))
    return run


def smooth(program: Program) -> Program:
    """The same Program with gelu for relu, and so on (`ActivationKind.smooth`), and with clamps that cut nothing."""

    def change(op: Op) -> Op:
        words: dict[str, Any] = {
            name: kind.smooth
            for name in attributes_of_type(type(op), ActivationName)
            if (kind := ACTIVATIONS[getattr(op, name)]).smooth
        }
        if "clamp" in op.attribute_names():
            words["clamp"] = None
        if isinstance(op, o.Clip):
            words["limit"] = math.inf
        return replace(op, **words)

    return replace(program, blocks=tuple(replace(b, ops=tuple(map(change, b.ops))) for b in program.blocks))


def _alone(choices: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Choices of the global batch, for the one rank of an unsharded model."""
    return {path: [experts] for path, experts in choices.items()}


def _rounded_again(parameter: Tensor, name: str) -> Tensor:
    """`parameter` in float64, each element off by an eighth of its dtype's eps, up or down."""
    drawn = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
    return parameter.double() * (1 + (drawn - 0.5).sign() * torch.finfo(parameter.dtype).eps / 8)
