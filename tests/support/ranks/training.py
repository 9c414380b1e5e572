"""Training runs that the tests compare: as one rank of a plan, and unsharded."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from support.plans import moe_plan, moe_spec
from support.ranks.torch_optimizers import torch_optimizers
from torch import Tensor, nn

import moec
from moec.runtime.job.masters import local_part
from moec.runtime.job.reference import reference

STEPS = 8
MAX_NORM = 0.5


def batches(vocab: int, batch: int, sequence: int, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """The same few batches again and again, so that the loss falls; one label in ten ignored."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(3):
        tokens = torch.randint(vocab, (batch, sequence), generator=generator)
        labels = torch.randint(vocab, (batch, sequence), generator=generator)
        labels[torch.rand(batch, sequence, generator=generator) < 0.1] = -100
        found.append((tokens, labels))
    return [found[step % 3] for step in range(steps)]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """This rank's parts of the gradients, by the parameters' names."""
    return {name: local_part(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def share(tensor: Tensor, sizes: list[int] | None, rank: int, ranks: int) -> Tensor:
    """A rank's sequences: an equal part, or `sizes` many."""
    return tensor.split(sizes)[rank] if sizes else tensor.chunk(ranks)[rank]


def train_as_rank(
    options: dict[str, Any], sizes: list[int] | None = None, steps: int = STEPS, compiled: str = ""
) -> dict[str, Any]:
    """Trains as this process's rank of a plan; gives the curve, gradient norms, loads, final parameters and logits.

    `compiled` names a backend of `torch.compile`.
    """
    torch.set_num_threads(1)
    plan = moe_plan(**options)
    spec = plan.spec
    losses, norms, loads, drops = [], [], [], []
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        if compiled:
            # Dynamo checks for this and hides the warning.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            torch._dynamo.reset()
            model.compile(fullgraph=True, backend=compiled, dynamic=True)
        optimizer = job.optimizer(model)
        assert spec.train is not None
        for tokens, labels in batches(spec.model.vocab, spec.train.batch, spec.train.sequence, steps):
            mine = [share(t, sizes, job.data_rank, job.data_size) for t in (tokens, labels)]
            losses.append(job.step(model, *mine).item())
            norms.append(job.clip_grad_norm_(model, MAX_NORM).item())
            loads.append(job.expert_loads(model))
            drops.append(job.drop_rates(model))
            optimizer.step()
            optimizer.zero_grad()
        logits = job.whole_logits(model(mine[0]))
    parameters = {name: local_part(p).clone() for name, p in model.named_parameters()}
    return {
        "losses": losses,
        "norms": norms,
        "loads": loads,
        "drops": drops,
        "parameters": parameters,
        "logits": logits.detach(),
    }


def train_unsharded(options: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """The same training of the reference module, in this process."""
    spec = moe_spec(**options)
    assert spec.train is not None
    model = reference(spec, seed=1)
    named = dict(model.named_parameters())
    optimizers = torch_optimizers(spec.train.optimizer, named)
    losses, norms = [], []
    for tokens, labels in batches(spec.model.vocab, spec.train.batch, spec.train.sequence, steps):
        loss = model(tokens, labels).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(named.values(), MAX_NORM).item())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    parameters = {n: p.detach() for n, p in named.items()}
    return {"losses": losses, "norms": norms, "parameters": parameters, "logits": model(tokens).logits.detach()}


def backward_twice(options: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients after two plain backward passes without clearing, this rank's part of each batch."""
    plan = moe_plan(**options)
    spec = plan.spec
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        assert spec.train is not None
        for tokens, labels in batches(spec.model.vocab, spec.train.batch, spec.train.sequence, 2):
            mine = [share(t, None, job.data_rank, job.data_size) for t in (tokens, labels)]
            model(*mine).loss.backward()
        return gradients_of(model)


def accumulate(options: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    """A batch in micro-batches without clearing between: means of losses and drop rates, and of the gradients.

    Of every sequence one label is ignored, so that each micro-batch weighs as much.
    """
    plan = moe_plan(**options)
    spec = plan.spec
    assert spec.train is not None
    ((tokens, _),) = batches(spec.model.vocab, spec.train.batch, spec.train.sequence, 1)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    losses, drops = [], []
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        for part in zip(tokens.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            mine = [share(ids, None, job.data_rank, job.data_size) for ids in part]
            losses.append(job.step(model, *mine).item())
            drops.append(job.drop_rates(model))
    gradients = {name: gradient / micro_batches for name, gradient in gradients_of(model).items()}
    rates = {layer: sum(step[layer] for step in drops) / micro_batches for layer in drops[0]}
    return {"loss": sum(losses) / micro_batches, "drops": rates, "gradients": gradients}


def complain(options: dict[str, Any], bad_rank: int) -> tuple[str, str]:
    """One rank has ids out of range; returns every rank's error, and checks that the job still works."""
    plan = moe_plan(**options)
    with moec.launch(plan, device="cpu") as job:
        model = job.build(seed=1)
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        try:
            model(tokens + 99 if job.rank == bad_rank else tokens)
        except moec.DiagnosticError as error:
            said = error.diagnostics[0].message
        else:
            said = "nothing"
        return said, str(tuple(model(tokens).logits.shape))


def train_clipping_in_the_step(options: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """Trains as a rank twice: clipped before the step and in it. Gives both curves."""
    torch.set_num_threads(1)
    plan = moe_plan(**options)
    spec = plan.spec
    assert spec.train is not None
    curves: dict[str, Any] = {}
    with moec.launch(plan, device="cpu") as job:
        for where in ("before", "inside"):
            model = job.build(seed=1)
            optimizer = job.optimizer(model)
            losses, norms = [], []
            for tokens, labels in batches(spec.model.vocab, spec.train.batch, spec.train.sequence, steps):
                losses.append(
                    job.step(model, *(share(t, None, job.data_rank, job.data_size) for t in (tokens, labels))).item()
                )
                given = {"optimizer": optimizer} if where == "inside" else {}
                norms.append(job.clip_grad_norm_(model, MAX_NORM, **given).item())
                optimizer.step()
                optimizer.zero_grad()
            curves[where] = losses, norms
    return curves
