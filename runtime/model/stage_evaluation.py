"""Evaluation of a model in pipeline stages: one pass of the whole batch, stage after stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moec.passes.ir.interface import forwards
from moec.runtime.inputs.extra_inputs import ExtraInputs
from moec.runtime.model.model_output import ModelOutput, OutputWithoutLogits
from moec.runtime.model.stage_messages import StageMessages, Values
from moec.runtime.model.stage_pass import MicroBatch, needs_all_stages, stage_in_words, stage_pass
from moec.runtime.ranks.groups import PIPELINE, require_no_messages
from moec.runtime.ranks.watch import collective
from moec.runtime.weights.rank import RankHome

if TYPE_CHECKING:
    from moec.runtime.model.module import PlanModule

EVALUATE = (
    "`job.step` trains it, and between steps `model.eval()(tokens, labels).loss` under `torch.no_grad()` evaluates it"
)


def require_evaluation(model: PlanModule, labels: Tensor | None) -> None:
    """Raises `JobError` unless the pass is an evaluation with labels, without gradients, and between whole steps."""
    refused = {
        "inside of a step": model._counts.sequences is not None,
        "in training mode": model.training,
        "with gradients": torch.is_grad_enabled(),
        "without labels": labels is None,
    }
    if (reason := next((reason for reason, is_so in refused.items() if is_so), None)) is not None:
        raise needs_all_stages(model.program, f"a forward pass {reason}", EVALUATE)
    require_no_messages(model._home.groups)


def evaluate(
    model: PlanModule, tokens: Tensor, labels: Tensor, extra: ExtraInputs, *, reads_values: bool
) -> ModelOutput:
    """Evaluates a batch that `require_batch` has checked.

    Every rank gets the losses and the routes, ranks of the last stage the logits too. Raises `JobError` on every rank
    for router logits that are not finite.
    """
    home, stages = model._home, model.program.stages
    assert isinstance(home, RankHome)
    messages = StageMessages(home.plan, home.rank, home.groups, tokens.device)
    batch = MicroBatch(tokens, labels, extra, model.sequence_numbers(tokens, labels))
    complaint, routes = None, dict[int, Tensor]()
    for stage in home.stages:
        received: Values = {}
        if stage > 0:
            messages.receive((stage, 0), tokens)
            received = messages.received((stage, 0))
        result = stage_pass(model, stage, batch, received, reads_values=reads_values)
        complaint = complaint or result.complaint
        if result.routes is not None:
            routes[stage] = result.routes
        if stage < len(stages) - 1:
            messages.send((stage, 0), result.outputs)
    messages.finish()
    if reads_values:
        home.checks.require("end of a forward pass", complaint)
    logits, balance = result.outputs.get("logits"), result.outputs.get("balance")
    losses = torch.zeros(2, device=tokens.device)
    if logits is not None:
        losses[0] = model.loss(logits, labels)
        if balance is not None:
            losses[1] = model.aux_loss(balance, model.takes.inputs(extra, tokens).get("real", tokens))
    all_routes = _all_routes(model, tokens, routes) if model.takes.k else None
    with collective("all_reduce", home.groups + PIPELINE, "the loss and the routes of an evaluation") as peers:
        dist.all_reduce(losses, group=peers)
        if all_routes is not None:
            dist.all_reduce(all_routes, group=peers)
    loss, aux_loss = losses[0], losses[1] if model.has_aux_loss else None
    if logits is None:
        return OutputWithoutLogits(stage_in_words(stages[-1]), loss, aux_loss, all_routes)
    return ModelOutput(logits, loss, aux_loss, all_routes)


def _all_routes(model: PlanModule, tokens: Tensor, of_stages: Mapping[int, Tensor]) -> Tensor:
    """The routes of all mixtures, int64 `[batch, sequence, mixtures, k]`; 0 for mixtures of other ranks' stages."""
    routes, start = tokens.new_zeros((*tokens.shape, len(model.takes.k), max(model.takes.k))), 0
    for stage, forward in enumerate(forwards(model.program)):
        output = forward.output("routes")
        end = start + (int(output.shape[2]) if output is not None else 0)
        if stage in of_stages:
            routes[:, :, start:end] = of_stages[stage]
        start = end
    return routes
