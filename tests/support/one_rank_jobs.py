"""A batch, optimizers and steps of jobs of a single rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support.plans import moe_plan

import moec
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule

TOKENS = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))

OPTIMIZERS = {
    "adamw": "adamw(lr = 1e-2)",
    "sgd": "sgd(lr = 0.1, momentum = 0.9)",
    "adafactor": "adafactor(lr = 0.1)",
    "muon": "muon(adamw = adamw(lr = 1e-2))",
    "lion": "lion(lr = 4e-3)",
}
"""Every optimizer of the language."""


def job_and_model(optimizer: str, **options: Any) -> tuple[Job, PlanModule]:
    """A job of one rank that has begun, and its model; `ending` ends it."""
    job = moec.launch(moe_plan(ranks=1, ep=1, optimizer=optimizer, **options), device="cpu").__enter__()
    return job, job.build(seed=1)


@contextmanager
def ending(job: Job) -> Iterator[None]:
    """Ends a job that has begun."""
    try:
        yield
    finally:
        job.__exit__(None, None, None)


def take_steps(job: Job, model: PlanModule, optimizer: Any, steps: int = 2) -> list[float]:
    """Trains on `TOKENS`; returns the losses."""
    losses = []
    for _ in range(steps):
        losses.append(job.step(model, TOKENS, TOKENS).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
