"""Runs that save and load checkpoints, as this process's rank of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from support.plans import moe_plan
from support.ranks.training import batches, own_part
from torch import Tensor
from torch.optim import Optimizer

from moec.codegen.plan import Plan
from moec.passes.ir import local_slices
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule
from moec.runtime.weights.masters import local_part

STEPS = 2
GATE = "topk(2, score = sigmoid, normalize = true, bias = online(0.002))"
OF_FILES = {
    "muon": "muon(lr = 0.02)",
    "adafactor": "adafactor(lr = 0.01)",
    "narrow adamw": "adamw(lr = 3e-3); state = bf16",
    "lion": "lion(lr = 1e-3)",
    "narrow lion": "lion(lr = 1e-3); state = bf16",
    "narrow muon": "muon(lr = 0.02); state = bf16",
}
Options = dict[str, Any]


def plan_of(options: Options, optimizer: str = "adamw") -> Plan:
    """A plan of the one model of these tests, whatever the degrees."""
    written = OF_FILES.get(optimizer, "adamw(lr = 3e-3)")
    return moe_plan(**{"gate": GATE, "optimizer": written, **options})


def optimizer_of(job: Job, model: PlanModule, kind: str) -> Optimizer:
    """The file's, or another of torch's."""
    if kind == "adamw" or kind in OF_FILES:
        return job.optimizer(model)
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    return torch.optim.NAdam(model.parameters(), lr=1e-3, foreach=True)


def train(job: Job, model: PlanModule, optimizer: Optimizer, first: int, steps: int = STEPS) -> list[float]:
    """The losses of `steps` steps from number `first` on."""
    losses = []
    for tokens, labels in batches(32, 8, 8, first + steps)[first:]:
        mine = own_part(job, tokens, labels)
        losses.append(job.step(model, *mine).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def values_of(model: PlanModule, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of this rank's parts of parameters, states and the optimizer's tensors."""
    found = {name: local_part(p).clone() for name, p in model.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}|{key}"] = local_part(value).clone() if isinstance(value, Tensor) else torch.tensor(value)
    return found


def whole_shape(plan: Plan, name: str) -> list[int]:
    """The shape of a whole tensor. Adafactor's factors have size 1 in a matrix's columns or rows."""
    parameter, _, state = name.partition("|")
    data = plan.parameters[parameter]
    dims = {"row_var": data.matrices.dims_of_columns(len(data.shape)), "col_var": data.matrices.dims_of_rows()}
    return [1 if dim in dims.get(state, ()) else size for dim, size in enumerate(data.shape)]


def part_of_rank(plan: Plan, name: str, whole: Tensor, rank: int) -> Tensor:
    """A rank's part of a whole tensor: its place by the plan's layouts."""
    data = plan.parameters.get(name.partition("|")[0])
    if data is None or whole.dim() == 0:
        return whole
    index = local_slices(data.shape, data.master, plan.meshes[data.mesh], rank)
    shape = whole_shape(plan, name)
    return whole[tuple(part if size > 1 else slice(0, 1) for part, size in zip(index, shape, strict=True))]


def assembled(plan: Plan, of_ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' parts."""
    wholes = {}
    for name, part in of_ranks[0].items():
        if name.partition("|")[0] not in plan.parameters or part.dim() == 0:
            wholes[name] = part
            continue
        wholes[name] = torch.full(whole_shape(plan, name), torch.nan)
        for rank, values in enumerate(of_ranks):
            part_of_rank(plan, name, wholes[name], rank).copy_(values[name])
    return wholes
