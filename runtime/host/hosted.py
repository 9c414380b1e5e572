"""Functions for a plain PyTorch model that contains layers of `moec.layer`, its host."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moec.runtime.calls import called
from moec.runtime.errors import JobError
from moec.runtime.host.layer import MoeLayer
from moec.runtime.ranks.norms_over_ranks import by_span, canonical, norms
from moec.runtime.weights.gradients import EPS, require_max_norm


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's experts of every `moec.layer` in `model`, by their names in `model`.

    Hosts must ignore them: give DistributedDataParallel the names, and `fully_shard` the values (`ignored_params`).
    """
    experts = {id(parameter) for layer in _layers(model) for parameter in layer.expert_parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in experts}


@called("moec.end_step")
def end_step(model: nn.Module) -> None:
    """Ends a training step: the biases of layers with `bias = online(…)` move towards equal loads.

    They move by the rows that experts got in training since the last call, of all ranks and micro-batches. A collective
    over the layers' ranks: every rank calls it once after each `optimizer.step()`. Without such layers it does nothing.
    Raises `JobError` (MOE0713) if none of them has had a forward pass in training since the last call. A layer whose
    optimizer steps without this call refuses the next pass in training.
    """
    layers = [layer for layer in _layers(model) if layer.biases.any]
    had_passes = [layer.end_step() for layer in layers]
    if layers and not any(had_passes):
        raise JobError(
            "MOE0713",
            "moec.end_step was called, and no forward pass in training came since the last step ended",
            "call it once after each `optimizer.step()`, with layers in `.train()`",
        )


@called("moec.clip_grad_norm_", max_norm="1.0 is usual")
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients of `model` to a norm of at most `max_norm`; returns the norm before, equal on every rank.

    The norm counts every parameter once: the experts of all ranks, and whole DTensors. This is a collective over the
    layers' ranks. Every rank must call it, after the host has reduced the gradients. The norm is taken in fp32, also of
    gradients in bf16. Raises `ValueError` for a negative `max_norm`.
    """
    require_max_norm(max_norm)
    device = next(model.parameters()).device
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    layers = _layers(model)
    names = canonical(layer._home.expert_group for layer in layers)
    groups = {
        id(parameter.grad): names[layer._home.expert_group]
        for layer in layers
        for parameter in layer.expert_parameters()
        if parameter.grad is not None
    }
    # Every rank calls the collectives of all layers, even without a gradient: other ranks wait for it.
    parts = by_span(gradients, groups, first=names.values())
    norm: Tensor = torch.stack(norms(parts, lambda part: _norm(part, device))).norm()
    scale = (max_norm / (norm + EPS)).clamp(max=1.0)
    for gradient in gradients:
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        part.mul_(scale)
    return norm


def _norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The norm of this rank's gradients in fp32, a scalar; a DTensor if they are DTensors."""
    if not gradients:
        return torch.zeros((), dtype=torch.float32, device=device)
    if isinstance(gradients[0], DTensor):
        return torch.nn.utils.get_total_norm(gradients)
    norm: Tensor = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).norm()
    return norm


def _layers(model: nn.Module) -> list[MoeLayer]:
    return [module for module in model.modules() if isinstance(module, MoeLayer)]
