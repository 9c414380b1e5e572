"""What a job takes as its model: layers in wrappers, but no wrapper around the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.plans import layer_text, moe_plan
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import moec
from moec.runtime.errors import JobError
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_names import parameters_by_name, states_by_name

TOKENS = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
PLAN = {"ranks": 1, "ep": 1, "gate": "topk(2, normalize = true, bias = online(1e-3))"}


class Around(nn.Module):
    """Calls a layer; with `dim` it has parameters of its own."""

    def __init__(self, layer: nn.Module, dim: int | None = None) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"layer": layer})
        self.attention = None if dim is None else nn.Linear(dim, dim)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *inputs: Tensor) -> Any:
        self.calls += 1
        return self.inside["layer"](*inputs)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint_wrapper": checkpoint_wrapper,
    "a module": Around,
    "two modules": lambda layer: Around(checkpoint_wrapper(layer)),
}


def train(job: Job, model: PlanModule) -> tuple[list[Tensor], list[Tensor]]:
    """The norms and the parameters after two steps with clipped gradients and compared replicas."""
    optimizer, norms = job.optimizer(model), []
    for _ in range(2):
        job.step(model, TOKENS, TOKENS.roll(-1, 1))
        norms.append(job.clip_grad_norm_(model, 0.1))
        optimizer.step()
        optimizer.zero_grad()
        job.check_replicas(model)
    return norms, [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_job_trains_wrapped_layers_as_it_trains_plain_ones(kind: str) -> None:
    with moec.launch(moe_plan(**PLAN), device="cpu") as job:
        plain, wrapped = job.build(seed=1), job.build(seed=1)
        for number in (0, 2):
            wrapped.layers[number] = WRAPPERS[kind](wrapped.layers[number])
        for found, wanted in zip(train(job, wrapped), train(job, plain), strict=True):
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert parameters_by_name(wrapped, job.plan).keys() == job.plan.parameters.keys()
        states, plain_states = states_by_name(wrapped, job.plan), states_by_name(plain, job.plan)
        assert states.keys() == plain_states.keys() == job.plan.states.keys()
        assert all(torch.equal(states[name], plain_states[name]) and states[name].any() for name in states)


CALLS: dict[str, Callable[[Job, Any], object]] = {
    "optimizer": lambda job, model: job.optimizer(model),
    "clip_grad_norm_": lambda job, model: job.clip_grad_norm_(model, 1.0),
    "check_replicas": lambda job, model: job.check_replicas(model),
    "step": lambda job, model: job.step(model, TOKENS, TOKENS),
    "update_states": lambda job, model: job.update_states(model),
    "expert_loads": lambda job, model: job.expert_loads(model),
    "head_loads": lambda job, model: job.head_loads(model),
    "drop_rates": lambda job, model: job.drop_rates(model),
}
OTHERS: dict[str, Callable[[Job], nn.Module]] = {
    "OptimizedModule": lambda job: torch.compile(job.build(), backend="eager"),
    "Linear": lambda _: nn.Linear(2, 2),
    "MoeLayer": lambda _: moec.layer(layer_text(ranks=None)),
}


@pytest.mark.parametrize("call", ["optimizer", "clip_grad_norm_", "check_replicas"])
def test_parameters_that_the_plan_does_not_have_are_refused(call: str) -> None:
    """`attention.…` of the wrapper is also the start of names in the plan."""
    with moec.launch(moe_plan(**PLAN), device="cpu") as job:
        model = job.build()
        model.layers[1] = Around(model.layers[1], dim=16)
        words = r"MOE0710.*the plan has no parameter layers\.1\.attention\.weight and 1 more"
        with pytest.raises(JobError, match=words) as error:
            CALLS[call](job, model)
        assert "torch over `model.parameters()`" in error.value.diagnostics[0].help


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_model_of_a_job_is_refused(call: str, kind: str) -> None:
    with moec.launch(moe_plan(**PLAN), device="cpu") as job:
        other = OTHERS[kind](job)
        with pytest.raises(JobError, match=f"MOE0714.*not an object of class {kind}") as error:
            CALLS[call](job, other)
        assert "`model.compile()` compiles it in place" in error.value.diagnostics[0].help


def test_the_optimizer_takes_a_model_of_no_job_and_a_copy() -> None:
    plan = moe_plan(**PLAN)
    with moec.launch(plan, device="cpu") as job:
        for model in (moec.reference(plan.spec), copy.deepcopy(job.build())):
            assert sum(len(group["params"]) for group in job.optimizer(model).param_groups) == len(plan.parameters)
