"""Functions that test_contract.py runs on the ranks of a job and on the unsharded model: PyTorch users' code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from support.plans import moe_plan
from support.ranks.training import gradients_of, parts_of_rank
from torch import Tensor, nn
from torch.nn.utils import parametrize

import moec
from moec.codegen.plan import Plan
from moec.runtime.job.job import Job
from moec.runtime.job.masters import local_part
from moec.runtime.job.module import PlanModule
from moec.runtime.job.reference import reference

ONE = {"ranks": 1, "ep": 1}
TWO = {"ranks": 2, "ep": 2}
FOUR = {"ranks": 4, "tp": 2, "ep": 2}
MIXED: dict[str, Any] = {"ranks": 2, "ep": None, "mixtures": ((8, 2), (8, 1))}
"""Experts that every rank has, and experts that one rank has."""
BATCH = (8, 8)

Gradients = Mapping[str, Tensor]
Run = Callable[[Job, PlanModule], Gradients]
Score = Callable[[PlanModule, Tensor, Tensor], Tensor]


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels of all ranks; most labels of the first half are ignored: the halves have other weights."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(32, BATCH, generator=generator) for _ in range(2))
    labels[: BATCH[0] // 2][torch.rand(BATCH[0] // 2, BATCH[1], generator=generator) < 0.9] = -100
    return tokens, labels


def mine(job: Job, *tensors: Tensor) -> list[Tensor]:
    """This rank's sequences: every other one, so that each rank has sequences of both halves."""
    return [tensor[job.data_rank :: job.data_size].contiguous() for tensor in tensors]


def parts_of(whole: Gradients, job: Job) -> dict[str, Tensor]:
    """This rank's expected parts of whole tensors."""
    return parts_of_rank(job.plan, whole, job.rank)


def distance(got: Gradients, wanted: Gradients) -> float:
    """The largest difference over the largest element, over all tensors; infinite where one is missing."""
    if got.keys() != wanted.keys():
        return float("inf")
    scale = max(float(tensor.abs().max()) for tensor in wanted.values())
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted) / scale


def whole_gradients(options: dict[str, Any], score: Score) -> Gradients:
    """The unsharded model's gradients of a loss over the whole batch, from the weights of `job.build(seed=1)`."""
    if score is plain:
        return _plain_gradients(tuple(options.items()))
    model = reference(plan_of(options).spec, seed=1)
    score(model, *batch()).backward()
    return gradients_of(model)


@cache
def _plain_gradients(options: tuple[tuple[str, Any], ...]) -> Gradients:
    model = reference(_plan(options).spec, seed=1)
    plain(model, *batch()).backward()
    return gradients_of(model)


def plan_of(options: dict[str, Any]) -> Plan:
    """The plan of these options, compiled once in this process: many claims are tried on few plans."""
    return _plan(tuple(options.items()))


@cache
def _plan(options: tuple[tuple[str, Any], ...]) -> Plan:
    return moe_plan(**dict(options))


def plain(model: PlanModule, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = model(tokens, labels).loss
    assert loss is not None
    return loss


def forward_backward(job: Job, model: PlanModule) -> Gradients:
    """The gradients of one plain backward pass."""
    model.zero_grad()
    plain(model, *mine(job, *batch())).backward()
    return gradients_of(model)


def off(options: dict[str, Any], run: Run, score: Score = plain) -> float:
    """`distance` of the gradients that `run` gives from the unsharded model's gradients of `score`."""
    torch.set_num_threads(1)
    with moec.launch(plan_of(options), device="cpu") as job:
        return _off(job, options, run, score)


def errors(options: dict[str, Any], cases: Mapping[str, tuple[Run, Score]]) -> dict[str, float | str]:
    """`off` of each case by its name, or what it raised: all in one job, each with a model of its own."""
    torch.set_num_threads(1)
    found: dict[str, float | str] = {}
    with moec.launch(plan_of(options), device="cpu") as job:
        for name, (run, score) in cases.items():
            try:
                found[name] = _off(job, options, run, score)
            except Exception as error:  # noqa: BLE001 - one case fails no other
                found[name] = f"{type(error).__name__}: {error}"
    return found


def _off(job: Job, options: dict[str, Any], run: Run, score: Score) -> float:
    return distance(run(job, job.build(seed=1)), parts_of(whole_gradients(options, score), job))


# ---- the claims, each as a function of (job, model) -----------------------------------------------------


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
        try:
            job.step(model, *mine(job, *batch()), microbatches=microbatches)
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("backward did not fail")
        handle.remove()
    model.zero_grad()
    job.step(model, *mine(job, *batch()))
    return gradients_of(model)


def after_an_exception_in_forward(job: Job, model: PlanModule) -> Gradients:
    """A forward pass that fails in the middle; parameters change before the next pass."""

    def fail(module: nn.Module, inputs: Any) -> None:
        raise KeyError("boom")

    handle = model.layers[2].register_forward_pre_hook(fail)
    try:
        job.step(model, *mine(job, *batch()), microbatches=2)
    except KeyError:
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


def in_micro_batches(job: Job, model: PlanModule) -> Gradients:
    job.step(model, *mine(job, *batch()), microbatches=3)
    return gradients_of(model)


def accumulated_by_hand(job: Job, model: PlanModule) -> Gradients:
    pairs = list(zip(*(part.tensor_split(2) for part in mine(job, *batch())), strict=True))
    with job.accumulate(model, *(labels for _, labels in pairs)):
        for tokens, labels in pairs:
            plain(model, tokens, labels).backward()
    return gradients_of(model)


def one_backward_of_many_forwards(job: Job, model: PlanModule) -> Gradients:
    pairs = list(zip(*(part.tensor_split(2) for part in mine(job, *batch())), strict=True))
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

    pairs = list(zip(*(part.tensor_split(2) for part in mine(job, *batch())), strict=True))
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

    try:
        job.step(model, *mine(job, *batch(1)), loss=loss, microbatches=2)
    except KeyError:
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


# ---- custom losses ----------------------------------------------------------------------------------------


def smoothed(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """A weighted loss of every token: label smoothing, which needs the whole vocabulary."""
    each = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100, label_smoothing=0.1
    )
    return (each * weights.flatten()).sum()


def sequence_loss(logprobs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """A loss that is no sum over tokens: a function of each sequence's log-probability."""
    return (-(logprobs * weights).sum(1)).sigmoid().sum()


def weight_sum(labels: Tensor, weights: Tensor) -> float:
    return float((weights * (labels != -100)).sum())


def token_weights() -> Tensor:
    return torch.rand(BATCH, generator=torch.Generator().manual_seed(7))


def own_loss(job: Job, model: PlanModule, microbatches: int) -> Gradients:
    tokens, labels, weights = mine(job, *batch(), token_weights())
    job.step(
        model, tokens, labels, loss=smoothed, count=weight_sum, inputs={"weights": weights}, microbatches=microbatches
    )
    return gradients_of(model)


def own_loss_unsharded(model: PlanModule, tokens: Tensor, labels: Tensor) -> Tensor:
    output, weights = model(tokens), token_weights()
    assert output.aux_loss is not None
    return smoothed(output.logits, labels, weights) / weight_sum(labels, weights) + output.aux_loss


def own_logprob_loss(job: Job, model: PlanModule, microbatches: int) -> Gradients:
    tokens, labels, weights = mine(job, *batch(), token_weights())
    job.step(model, tokens, labels, logprob_loss=sequence_loss, inputs={"weights": weights}, microbatches=microbatches)
    return gradients_of(model)


def own_logprob_loss_unsharded(model: PlanModule, tokens: Tensor, labels: Tensor) -> Tensor:
    output, weights, valid = model(tokens), token_weights(), labels != -100
    picked = output.logits.float().log_softmax(-1).gather(-1, labels.where(valid, 0)[..., None])[..., 0]
    assert output.aux_loss is not None
    return sequence_loss(picked.where(valid, 0), labels, weights) / int(valid.sum()) + output.aux_loss


def own_backward(job: Job, model: PlanModule) -> Gradients:
    """A loss outside of `job.step`, of logits and balance terms, without labels."""
    tokens, labels = mine(job, *batch())
    output = model(tokens)
    summed = F.cross_entropy(job.whole_logits(output).flatten(0, 1), labels.flatten(), reduction="sum")
    assert output.aux_loss is not None
    (summed / (batch()[1] != -100).sum() + output.aux_loss).backward()
    return gradients_of(model)


def constant_on_one_rank(job: Job, model: PlanModule) -> Gradients:
    """A loss that is constant on the first data-parallel rank, none of whose tokens count."""
    tokens, labels = mine(job, *batch())

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if job.data_rank == 0 and job.data_size > 1:
            return torch.zeros(())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    job.step(model, tokens, labels, loss=loss, count=lambda labels: 10 / job.data_size)
    return gradients_of(model)


def constant_unsharded(model: PlanModule, tokens: Tensor, labels: Tensor, ranks: int) -> Tensor:
    output, labels = model(tokens), labels.clone()
    if ranks > 1:
        labels[::ranks] = -100
    assert output.aux_loss is not None
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum") / 10 + output.aux_loss
