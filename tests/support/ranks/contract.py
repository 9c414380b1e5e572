"""A plan, a batch and its gradients, sharded and unsharded: what tests of PyTorch users' code compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.plans import moe_plan
from support.ranks.training import gradients_of, parts_of_rank
from torch import Tensor

import moec
from moec.codegen.plan import Plan
from moec.runtime.host.reference import reference
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule

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


@cache
def plan_of(**options: Any) -> Plan:
    """The plan of these options, compiled once in this process: many claims are tried on few plans."""
    return moe_plan(**options)


def plain(model: PlanModule, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = model(tokens, labels).loss
    assert loss is not None
    return loss


@cache
def whole_gradients(score: Score = plain, **options: Any) -> Gradients:
    """The unsharded model's gradients of a loss over the whole batch, from the weights of `job.build(seed=1)`."""
    model = reference(plan_of(**options).spec, seed=1)
    score(model, *batch()).backward()
    return gradients_of(model)


def forward_backward(job: Job, model: PlanModule) -> Gradients:
    """The gradients of one plain backward pass."""
    model.zero_grad()
    plain(model, *mine(job, *batch())).backward()
    return gradients_of(model)


def off(options: dict[str, Any], run: Run, score: Score = plain) -> float:
    """`distance` of the gradients that `run` gives from the unsharded model's gradients of `score`."""
    with moec.launch(plan_of(**options), device="cpu") as job:
        return _off(job, options, run, score)


def errors(options: dict[str, Any], cases: Mapping[str, tuple[Run, Score]]) -> dict[str, float | str]:
    """`outcomes` of `off` of each case: all in one job, each with a model of its own."""
    with moec.launch(plan_of(**options), device="cpu") as job:
        return outcomes({name: partial(_off, job, options, *case) for name, case in cases.items()})


def outcomes(cases: Mapping[str, Callable[[], float]]) -> dict[str, float | str]:
    """What each case gives, by its name, or what it raised: one case fails no other."""
    found: dict[str, float | str] = {}
    for name, case in cases.items():
        try:
            found[name] = case()
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _off(job: Job, options: dict[str, Any], run: Run, score: Score) -> float:
    return distance(run(job, job.build(seed=1)), parts_of(whole_gradients(score, **options), job))
