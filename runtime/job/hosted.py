"""For a plain PyTorch model that contains layers of `moec.layer`: finds experts and clips gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moec.runtime.calls import called
from moec.runtime.errors import JobError
from moec.runtime.job.gradients import require_max_norm
from moec.runtime.job.groups import resolve
from moec.runtime.job.layer import MoeLayer
from moec.runtime.job.layer_home import LayerHome
from moec.runtime.job.watch import collective


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's experts of every `moec.layer` in `model`, by their names in `model`.

    Hosts must ignore them: give DistributedDataParallel the names, and `fully_shard` the values (`ignored_params`).
    """
    experts = {id(parameter) for layer in _layers(model) for parameter in layer.expert_parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in experts}


@called("moec.end_step")
def end_step(model: nn.Module) -> None:
    """Says that a training step has ended: the biases of layers with `bias = online(…)` move towards equal loads.

    They move by the rows that experts got in training since the last call, of all ranks and micro-batches. A collective
    over the layers' ranks: every rank calls it once after each `optimizer.step()`. Without such layers it does nothing.
    Raises `JobError` (MOE0713) where none of them has had a forward pass in training since the last call. A layer whose
    optimizer steps without this call refuses the next pass in training.
    """
    biased = [layer for layer in _layers(model) if layer.biases.any]
    moved = [layer.end_step() for layer in biased]
    if biased and not any(moved):
        raise JobError(
            "MOE0713",
            "moec.end_step was called, and no forward pass in training came since the last step ended",
            "call it once after each `optimizer.step()`, with layers in `.train()`",
        )


@called("moec.clip_grad_norm_", max_norm="1.0 is usual")
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients of `model` to a norm of at most `max_norm`; returns the norm before, equal on every rank.

    `torch.nn.utils.clip_grad_norm_` misses the experts of other ranks, so each rank would scale by another factor. This
    is a collective over the layers' ranks. Every rank must call it, after the host has reduced the gradients.
    Raises `ValueError` for a negative `max_norm`.
    """
    require_max_norm(max_norm)
    experts = {id(parameter) for parameter in expert_parameters(model).values()}
    dense = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in experts]
    of_experts = [p.grad for p in model.parameters() if p.grad is not None and id(p) in experts]
    device = next(model.parameters()).device
    total = _squares_of_dense(dense, device) + _squares_of_experts(model, device)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*dense, *of_experts):
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        part.mul_(scale)
    return norm


def _squares_of_dense(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Squared norm of the gradients that the host has reduced: replicas, or DTensors sharded over ranks."""
    plain: list[Tensor] = []
    cut: dict[DeviceMesh, list[Tensor]] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            cut.setdefault(gradient.device_mesh, []).append(gradient)
        else:
            plain.append(gradient)
    total = _squares(plain, device)
    for parts in cut.values():
        norm = torch.nn.utils.get_total_norm(parts)
        total = total + (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    return total


def _squares_of_experts(model: nn.Module, device: torch.device) -> Tensor:
    """Squared norm of all experts' gradients, each once. One all_reduce for all layers over the same ranks."""
    by_group: dict[str, list[Tensor]] = {}
    counted: set[int] = set()
    names: dict[object, str] = {}
    for layer in _layers(model):
        home = layer._home
        name = home.expert_group if isinstance(home, LayerHome) else ""
        name = names.setdefault(resolve(name), name) if name else name
        # Experts that are tied between two layers count once.
        uncounted = [p for p in layer.expert_parameters() if p.grad is not None and id(p) not in counted]
        counted.update(map(id, uncounted))
        by_group.setdefault(name, []).extend(p.grad for p in uncounted if p.grad is not None)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for name, gradients in by_group.items():
        squares = _squares(gradients, device)
        if name:
            with collective("all_reduce", name, "gradient norm") as peers:
                dist.all_reduce(squares, group=peers)
        total = total + squares
    return total


def _squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum()


def _layers(model: nn.Module) -> list[MoeLayer]:
    return [module for module in model.modules() if isinstance(module, MoeLayer)]
