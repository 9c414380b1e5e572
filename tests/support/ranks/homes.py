"""Training while experts change homes in every step, with all that scripts do between steps."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.ranks.guests import RandomGuests
from support.ranks.training import batches_of, own_part
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

import moec
from moec.codegen.plan import Plan

STEPS = 6
TORCH = {
    "torch AdamW": lambda parameters: AdamW(parameters, lr=1e-2, foreach=False),
    "torch SGD": lambda parameters: SGD(parameters, lr=1e-1, momentum=0.9),
}


def whole(values: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of the whole tensors among these. A collective of all ranks."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in tensors.items()}


def states_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """The whole states of an optimizer, by the number of the parameter and their names."""
    states = optimizer.state_dict()["state"]
    return whole({f"{number}.{name}": value for number, of in states.items() for name, value in of.items()})


def train_and_read(plan: Plan, kind: str, folder: str) -> dict[str, dict[str, Tensor]]:
    """All that a script has read of a run in which experts move in every step, if `plan` has `greedy`.

    The optimizer steps on gradients of two steps; a moving average follows; the state of the second step is loaded at
    the end.
    """
    moves = plan.spec.adapt is not None
    random = mock.patch("moec.runtime.job.job.PlacementPolicy", RandomGuests) if moves else nullcontext()
    found: dict[str, dict[str, Tensor]] = {"losses": {}}
    with random, moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        optimizer = TORCH[kind](model.parameters()) if kind in TORCH else job.optimizer(model)
        average = AveragedModel(model, multi_avg_fn=None, avg_fn=lambda a, b, _: a + 0.25 * (b - a))
        for step, batch in enumerate(batches_of(plan.spec, STEPS), 1):
            found["losses"][str(step)] = job.step(model, *own_part(job, *batch))
            assert model.layers[1]._weights.homes.have_moved if moves else True
            if step % 2:
                continue
            job.clip_grad_norm_(model, 1e9, optimizer=optimizer)  # a norm that clips has another order of sums
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            if step == 2:
                kept = {name: value.clone() for name, value in model.state_dict().items()}
                found["state_dict"] = whole(kept)
            if step == 2 and kind in TORCH:  # torch gives the other optimizer the same tensors
                other = TORCH[kind](model.parameters())
                other.load_state_dict(optimizer.state_dict())
            if step == 4:
                job.save(Path(folder) / "step-4", model, optimizer).wait()
            if step == 6:
                job.save(Path(folder) / "average", average.module).wait()
        found["optimizer"] = states_of(optimizer)
        found["average"] = whole(average.module.state_dict())
        job.step(model, *own_part(job, *batch))
        job.restore_homes(model)
        found["gradients"] = whole({name: p.grad for name, p in model.named_parameters()})
        model.load_state_dict(kept)
        found["loaded"] = whole(dict(model.named_parameters()))
    return found


def train_in_turns(plan: Plan) -> dict[str, dict[str, Tensor]]:
    """The parameters of two models that train in turns, each with two optimizers of one kind. Experts of a layer join
    late; then states are loaded into optimizers that ranks make in different orders."""
    moves = plan.spec.adapt is not None
    random = mock.patch("moec.runtime.job.job.PlacementPolicy", RandomGuests) if moves else nullcontext()
    with random, moec.launch(plan, device="cpu") as job:
        models = [job.build(seed=1), job.build(seed=2)]
        optimizers = [optimizers_of(model, in_order=True) for model in models]
        for step, batch in enumerate(batches_of(plan.spec, 8)):
            model = models[step % 2]
            job.step(model, *own_part(job, *batch))
            if step == 2:
                optimizers[0][0].add_param_group({"params": list(model.layers[2].moe.experts.parameters())})
            for optimizer in optimizers[step % 2]:
                optimizer.step()
                optimizer.zero_grad()
            if step == 4:
                states = [optimizer.state_dict() for optimizer in optimizers[0]]
                optimizers[0] = optimizers_of(model, in_order=job.rank == 0)
                optimizers[0][0].add_param_group({"params": list(model.layers[2].moe.experts.parameters())})
                for optimizer, state in zip(optimizers[0], states, strict=True):
                    optimizer.load_state_dict(state)
        models[1].layers[2] = models[0].layers[2]  # whose experts are away
        job.restore_homes(models[1])
        found = {"a layer of another model": whole(dict(models[1].named_parameters()))}
        return found | {str(number): whole(model.state_dict()) for number, model in enumerate(models)}


def optimizers_of(model: nn.Module, *, in_order: bool) -> list[Optimizer]:
    """An optimizer of the experts of layer 1, and one of all that is not an expert of layers 1 and 2, made in this
    order or in the other one."""
    experts = list(model.layers[1].moe.experts.parameters())
    others = set(model.parameters()).difference(experts, model.layers[2].moe.experts.parameters())
    groups = [experts, [parameter for parameter in model.parameters() if parameter in others]]
    made = [AdamW(group, lr=1e-2) for group in (groups if in_order else reversed(groups))]
    return made if in_order else made[::-1]


def load_and_read(plan: Plan, path: str) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint gives a model and its optimizer, before and after a step of it."""
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=2)
        optimizer = job.optimizer(model)
        job.load(path, model, *([] if path.endswith("average") else [optimizer]))
        found = {"parameters": whole(dict(model.named_parameters())), "optimizer": states_of(optimizer)}
        job.step(model, *own_part(job, *batches_of(plan.spec, 1)[0]))
        optimizer.step()
        return found | {"after": whole(model.state_dict())}


def train_with_unmovable(plan: Plan, kind: str) -> None:
    """Training with something of experts that cannot move with them, or that does not wait for them."""
    with (
        mock.patch("moec.runtime.job.job.PlacementPolicy", RandomGuests),
        moec.launch(plan, device="cpu") as job,
    ):
        model = job.build(seed=1)
        up = model.layers[1].moe.experts.up
        if kind == "a parametrization":
            nn.utils.parametrize.register_parametrization(up, "weight", nn.Identity())
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step, batch in enumerate(batches_of(plan.spec, 3)):
            if kind == "a copy on one rank" and job.rank == 0:
                average = AveragedModel(model)
                assert average is not None
            job.step(model, *own_part(job, *batch))
            optimizer.step()
            if kind == "a state of its own":
                optimizer.state[up.weight]["blocks"] = torch.ones(3)
            if kind == "an optimizer that comes late" and step == 1:
                late = SGD(model.parameters(), lr=0.1, momentum=0.9)
                late.state[up.weight]["momentum_buffer"] = torch.zeros_like(up.weight)
                late.step()
            if kind == "copies of model and optimizer" and step == 1:
                pair = copy.deepcopy((model, optimizer))
                model.state_dict()
                assert pair
            if kind == "a copy of a part":
                copy.deepcopy(model.layers[1].moe).state_dict()
            if kind == "one parameter of two layers":
                job.restore_homes(model)
                model.layers[2].moe.experts.up.weight = up.weight
            if kind == "a state_dict in a backward pass" and step == 1:
                up.weight.register_post_accumulate_grad_hook(lambda _: model.state_dict() and None)
            if kind == "a state_dict on one rank" and step == 1 and job.rank == 0:
                model.state_dict()
            if kind == "a state_dict on one rank before clipping" and step == 1:
                model.state_dict() if job.rank == 0 else job.clip_grad_norm_(model, 1.0)
            if kind == "a state without ranks":
                rows = torch.zeros(8, 1, 1)
                optimizer.state[up.weight]["rows"] = DTensor.from_local(rows, up.weight.device_mesh, [Replicate()])
            if kind == "a value that differs":
                optimizer.state[up.weight]["norm"] = float(job.rank)
            if kind == "another parameter" and step == 1:
                up.weight = nn.Parameter(up.weight.detach().clone())
            if kind == "another parameter of a copy" and step == 1:
                late = copy.deepcopy(model)
                late.layers[1].moe.experts.up.weight = nn.Parameter(up.weight.detach().clone())
                job.restore_homes(late)
            if kind == "optimizers in another order" and step == 0:
                others = [SGD([up.weight], lr=lr, momentum=0.9) for lr in (0.1, 0.2)]
                for other in others if job.rank == 0 else others[::-1]:
                    other.step()
            if kind == "states of other names":
                optimizer.state[up.weight][f"of {job.rank}"] = torch.zeros_like(up.weight)
