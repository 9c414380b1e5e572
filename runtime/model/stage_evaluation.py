"""Evaluation of a model in pipeline stages: one pass of the whole batch, stage after stage."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moec.passes.ir.interface import forwards
from moec.runtime.errors import JobError
from moec.runtime.inputs.extra_inputs import ExtraInputs
from moec.runtime.model.model_output import ModelOutput, OutputWithoutLogits
from moec.runtime.model.stage_messages import StageMessages
from moec.runtime.model.stage_pass import MicroBatch, stage_in_words, stage_pass
from moec.runtime.ranks.groups import PIPELINE
from moec.runtime.ranks.watch import collective
from moec.runtime.weights.rank import RankHome

if TYPE_CHECKING:
    from moec.runtime.model.module import PlanModule


def require_evaluation(model: PlanModule, labels: Tensor | None) -> None:
    """Raises `JobError` for a pass that only a model without stages can run: for gradients, or for logits alone."""
    call = "a forward pass"
    if model._counts.sequences is not None:
        call = "a forward pass inside of a step"
    elif model.training:
        call = "a forward pass in training mode"
    elif torch.is_grad_enabled():
        call = "a forward pass with gradients"
    elif labels is None:
        call = "a forward pass without labels"
    else:
        return
    message = f"{call}, of a model with {len(model.program.stages)} pipeline stages, of which no rank has all"
    raise JobError(
        "MOE0711",
        message,
        "`job.step` trains it, and between steps `model.eval()(tokens, labels).loss` under `torch.no_grad()` evaluates "
        "it; a plan without `pp` loads its checkpoints, and has no stages",
    )


def evaluate(
    model: PlanModule, tokens: Tensor, labels: Tensor, extra: ExtraInputs, *, reads_values: bool
) -> ModelOutput:
    """The losses of a batch on which all ranks agree; on the ranks of the last stage also its logits."""
    home, stages = model._home, model.program.stages
    assert isinstance(home, RankHome)
    messages = StageMessages(home.plan, home.rank, home.groups, tokens.device)
    batch = MicroBatch(tokens, labels, extra, model.sequence_numbers(tokens, labels))
    complaint, losses = None, torch.zeros(2, device=tokens.device)
    routes = _Routes(model, tokens) if model.takes.k else None
    for stage in sorted(home.stages):
        if stage > 0:
            messages.receive((stage, 0), tokens)
        received = messages.received((stage, 0)) if stage > 0 else {}
        result = stage_pass(model, stage, batch, received, reads_values=reads_values)
        complaint = complaint or result.complaint
        if routes is not None and result.routes is not None:
            routes.add(stage, result.routes)
        if stage < len(stages) - 1:
            messages.send((stage, 0), result.outputs)
    messages.finish()
    logits, balance = result.outputs.get("logits"), result.outputs.get("balance")
    if logits is not None:
        losses[0] = model.loss(logits, labels)
        if balance is not None:
            losses[1] = model.aux_loss(balance, model.takes.real(extra, tokens) if model.takes.padding else tokens)
    with collective("all_reduce", home.groups + PIPELINE, "the loss of an evaluation") as peers:
        dist.all_reduce(losses, group=peers)
        if routes is not None:
            dist.all_reduce(routes.whole, group=peers)
    loss, aux_loss = losses.unbind()
    if reads_values and loss.isnan():
        home.checks.require("end of a forward pass", complaint)
    others = loss, aux_loss if model.has_aux_loss else None, None if routes is None else routes.whole
    return OutputWithoutLogits(stage_in_words(stages[-1]), *others) if logits is None else ModelOutput(logits, *others)


class _Routes:
    """The routes of all mixtures, of which those of other ranks' stages are 0. `whole`: int64 `[batch, sequence,
    mixtures, k]`."""

    def __init__(self, model: PlanModule, tokens: Tensor) -> None:
        given = [forward.output("routes") for forward in forwards(model.program)]
        numbers = (int(routes.shape[2]) if routes is not None else 0 for routes in given)
        self._starts = [*accumulate(numbers, initial=0)]
        self.whole = tokens.new_zeros((*tokens.shape, len(model.takes.k), max(model.takes.k)))

    def add(self, stage: int, routes: Tensor) -> None:
        """Adds the routes of a stage's mixtures."""
        self.whole[:, :, self._starts[stage] : self._starts[stage + 1]] = routes
