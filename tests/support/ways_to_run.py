"""Every way to run a batch with something beside its ids, compared by gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule


def require_every_way_alike(job: Job, model: PlanModule, tokens: Tensor, labels: Tensor, **beside: Tensor) -> None:
    """Fails unless steps, micro-batches, a custom loss and accumulation give the gradients of one backward pass.

    `beside`: `segments`, `padding` or `routes` of the batch.
    """

    def nll(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def accumulated() -> None:
        halves = [
            dict(zip(beside, part, strict=True))
            for part in zip(*(each.chunk(2) for each in beside.values()), strict=True)
        ]
        counted = {"padding": beside["padding"].chunk(2)} if "padding" in beside else {}
        with job.accumulate(model, *labels.chunk(2), **counted):
            for own_tokens, own_labels, half in zip(tokens.chunk(2), labels.chunk(2), halves, strict=True):
                model(own_tokens, own_labels, **half).loss.backward()

    ways: dict[str, Callable[[], object]] = {
        "a step": lambda: job.step(model, tokens, labels, **beside),
        "micro-batches": lambda: job.step(model, tokens, labels, **beside, microbatches=3),
        "a custom loss": lambda: job.step(model, tokens, labels, **beside, loss=nll, microbatches=2),
        "accumulate": accumulated,
    }
    model(tokens, labels, **beside).loss.backward()
    expected = gradients(model)
    for name, way in ways.items():
        way()
        for parameter, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-6, msg=f"{name}: {parameter}")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, which it takes out of the model."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
