"""Ways to gradients that test_contract.py runs on the ranks of a job: PyTorch users' code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks.contract import Gradients, batch, forward_backward, mine, plain
from support.ranks.training import gradients_of
from torch import Tensor, nn
from torch.nn.utils import parametrize

import moec
from moec.runtime.host.reference import reference
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule
from moec.runtime.weights.masters import local_part


class Boom(torch.autograd.Function):
    """Raises the error of a GPU that is out of memory, in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise torch.OutOfMemoryError("boom")


def after_an_exception(job: Job, model: PlanModule) -> Gradients:
    """Steps whose backward fails in the middle, then one step that succeeds."""

    def fail(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (Boom.apply(output[0]), *output[1:])

    for microbatches in (1, 2):
        handle = model.layers[1].register_forward_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            job.step(model, *mine(job, *batch()), microbatches=microbatches)
        handle.remove()
    model.zero_grad()
    job.step(model, *mine(job, *batch()))
    return gradients_of(model)


def after_an_exception_in_forward(job: Job, model: PlanModule) -> Gradients:
    """A forward pass that fails in the middle; parameters change before the next pass."""

    def fail(module: nn.Module, inputs: Any) -> None:
        raise KeyError("boom")

    handle = model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        job.step(model, *mine(job, *batch()), microbatches=2)
    handle.remove()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    return forward_backward(job, model)


def by_autograd_grad(job: Job, model: PlanModule) -> Gradients:
    loss = plain(model, *mine(job, *batch()))
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters)
    assert all(p.grad is None for p in parameters)
    return {name: local_part(gradient) for name, gradient in zip(names, found, strict=True)}


def of_a_deep_copy(job: Job, model: PlanModule) -> Gradients:
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    plain(model, *mine(job, *batch())).backward()
    return forward_backward(job, copied)


def halves(job: Job) -> list[tuple[Tensor, ...]]:
    """The tokens and labels of each half of this rank's sequences."""
    return list(zip(*(part.tensor_split(2) for part in mine(job, *batch())), strict=True))


def in_micro_batches(job: Job, model: PlanModule) -> Gradients:
    job.step(model, *mine(job, *batch()), microbatches=3)
    return gradients_of(model)


def accumulated_by_hand(job: Job, model: PlanModule) -> Gradients:
    pairs = halves(job)
    with job.accumulate(model, *(labels for _, labels in pairs)):
        for tokens, labels in pairs:
            plain(model, tokens, labels).backward()
    return gradients_of(model)


def one_backward_of_many_forwards(job: Job, model: PlanModule) -> Gradients:
    pairs = halves(job)
    with job.accumulate(model, *(labels for _, labels in pairs)):
        sum(plain(model, tokens, labels) for tokens, labels in pairs).backward()
    return gradients_of(model)


def retained(job: Job, model: PlanModule) -> Gradients:
    """Two backward passes of one forward pass add up."""
    loss = plain(model, *mine(job, *batch())) / 2
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients_of(model)


def checkpointed(job: Job, model: PlanModule) -> Gradients:
    """Layers recomputed in backward by `torch.utils.checkpoint`."""
    from torch.utils.checkpoint import checkpoint

    for layer in model.layers:
        inner = layer.forward
        layer.forward = lambda *inputs, inner=inner: checkpoint(inner, *inputs, use_reentrant=False)
    return forward_backward(job, model)


def wholly_checkpointed(job: Job, model: PlanModule) -> Gradients:
    """The whole model recomputed in backward, inside of `job.accumulate`."""
    from torch.utils.checkpoint import checkpoint

    pairs = halves(job)
    with job.accumulate(model, *(labels for _, labels in pairs)):
        losses = [checkpoint(plain, model, tokens, labels, use_reentrant=False) for tokens, labels in pairs]
        sum(losses).backward()
    return gradients_of(model)


def replaced(job: Job, model: PlanModule) -> Gradients:
    """A replaced parameter is used in training and in evaluation."""
    layer = model.layers[0]
    old = layer.get_parameter("attention.q.weight")
    with torch.no_grad():
        new = nn.Parameter(old.clone())
        old.fill_(99.0)
    layer.get_submodule("attention.q").weight = new
    model.eval()
    with torch.no_grad():
        evaluated = model(*mine(job, batch()[0])).logits
    model.train()
    assert evaluated.abs().max() < 10
    return forward_backward(job, model)


def loaded_after_the_optimizer(job: Job, model: PlanModule) -> Gradients:
    """The next step uses weights that were loaded after the optimizer was made."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = job.optimizer(model)
    for _ in range(2):
        job.step(model, *mine(job, *batch(1)))
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    return forward_backward(job, model)


def whole_state_loaded(job: Job, model: PlanModule) -> Gradients:
    """Of an unsharded model's `state_dict` every rank takes its part."""
    other = job.build(seed=2)
    other.load_state_dict(reference(job.plan.spec, seed=1).state_dict())
    return forward_backward(job, other)


def through_distributed_checkpoint(job: Job, model: PlanModule, folder: str) -> Gradients:
    """Saved and loaded by torch's resharding checkpoint."""
    import torch.distributed.checkpoint as dcp

    dcp.save(model.state_dict(), checkpoint_id=folder)
    other = job.build(seed=2)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    return forward_backward(job, other)


def of_wrapped_layers(job: Job, model: PlanModule) -> Gradients:
    """Layers wrapped in user modules: earlier steps, one of which fails, and new weights do not change the result."""

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *inputs: Tensor) -> Any:
            return self.inner(*inputs)

    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = list(model.layers)
    for number, layer in enumerate(layers):
        model.layers[number] = Wrapped(layer)
    fails = iter((False, True))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if next(fails):
            raise KeyError("boom")
        return logits.float().square().sum()

    with pytest.raises(KeyError):
        job.step(model, *mine(job, *batch(1)), loss=loss, microbatches=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.zero_grad()
    job.step(model, *mine(job, *batch(1)))
    for number, layer in enumerate(layers):
        model.layers[number] = layer
    model.load_state_dict(state)
    for number, layer in enumerate(layers):
        model.layers[number] = Wrapped(layer)
    model.zero_grad()
    job.step(model, *mine(job, *batch()), microbatches=2)
    return {name.replace(".inner", ""): gradient for name, gradient in gradients_of(model).items()}


def skipped_in_the_last_micro_batch(job: Job, model: PlanModule) -> Gradients:
    """A layer that only the first of two micro-batches runs keeps its gradient: LayerDrop, with a scale of nothing.

    One of its parameters is computed by a parametrization from another, which gets the gradient.
    """
    module = model.layers[0].get_submodule("attention.q")
    parametrize.register_parametrization(module, "weight", nn.Identity())
    calls = iter(range(100))

    def skip(module: nn.Module, inputs: Any, output: Any) -> Any:
        # The second micro-batch skips the layer.
        return output if next(calls) % 2 == 0 else inputs[0]

    handle = model.layers[0].register_forward_hook(skip)
    tokens, labels = mine(job, *batch())
    job.step(model, tokens, labels, microbatches=2)
    handle.remove()
    found = gradients_of(model)
    return {name.replace("parametrizations.weight.original", "weight"): g for name, g in found.items()}


def skipped_unsharded(model: PlanModule, tokens: Tensor, labels: Tensor, ranks: int) -> Tensor:
    """The expected gradients: the second half of every data-parallel rank's sequences skips layer 0."""
    halves = second_halves(len(tokens), ranks)

    def skip(module: nn.Module, inputs: Any, output: Any) -> Any:
        return torch.where(halves[:, None, None], inputs[0], output)

    handle = model.layers[0].register_forward_hook(skip)
    loss = plain(model, tokens, labels)
    handle.remove()
    return loss


def second_halves(sequences: int, ranks: int) -> Tensor:
    """The sequences of the batch that are in the second micro-batch of their rank, as `mine` assigns them."""
    found = torch.zeros(sequences, dtype=torch.bool)
    for rank in range(ranks):
        own = torch.arange(sequences)[rank::ranks]
        found[own.tensor_split(2)[1]] = True
    return found


def another_models_weights(options: dict[str, Any]) -> float:
    """A custom loss that runs the model with other weights: the largest difference from the logits of these weights."""
    worst = []
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model, other = job.build(seed=1), job.build(seed=2)
        tokens, labels = mine(job, *batch())
        weights = dict(other.named_parameters())
        with torch.no_grad():
            expected = other(tokens).logits

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                found = torch.func.functional_call(model, weights, (tokens,)).logits
            worst.append(float((found - expected).abs().max()))
            return logits.float().sum()

        job.step(model, tokens, labels, loss=loss)
    return max(worst)


def hooks_see_every_gradient(options: dict[str, Any]) -> bool:
    """Whether hooks of parameters get tensors, and `.grad` exists after each micro-batch."""
    seen: list[bool] = []
    with moec.launch(moe_plan(**options), device="cpu") as job:
        model = job.build(seed=1)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: seen.append(isinstance(gradient, Tensor)))
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
        job.step(model, *mine(job, *batch()), microbatches=2)
    return bool(seen) and all(seen)
