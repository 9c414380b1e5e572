"""Losses of a user's own, on the ranks of a job and of the unsharded model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.ranks.contract import BATCH, Gradients, batch, mine
from support.ranks.training import gradients_of
from torch import Tensor

from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule


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
