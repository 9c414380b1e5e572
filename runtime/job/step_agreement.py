"""The ranks' agreement on a step, before any of them computes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from moec.runtime.guards.every_guard import look_at, with_number
from moec.runtime.guards.guard import BatchAgreed
from moec.runtime.inputs.batches import device_of
from moec.runtime.inputs.forward_checks import batch_complaint
from moec.runtime.model.forward_agreement import claims, hooks_of_parameters
from moec.runtime.model.module import PlanModule
from moec.runtime.ranks.checks import Complaint, TpInputs

if TYPE_CHECKING:
    from moec.runtime.job.job import Job
    from moec.runtime.job.step import Step


class StepAgreement(NamedTuple):
    """The result of an agreement, equal on all ranks.

    `on_forward`: the first forward pass can skip its own agreement, because no user's code runs before it. `look`:
    values are checked. `num_labels`, `num_tokens`: valid labels and real tokens of all ranks, 0-d int64.
    """

    on_forward: bool
    look: bool
    num_labels: Tensor
    num_tokens: Tensor | None


def agree(job: Job, model: PlanModule, step: Step) -> StepAgreement:
    """One agreement on all micro-batches; raises `JobError` on every rank if one cannot take the step.

    On CPU it sums labels and tokens; elsewhere the model's collectives do, and the host does not wait for them.
    """
    device = device_of(step.tokens)
    look = job.checks.looks(model.seen, ("step", model.training, step.has_custom_loss), device)
    complaint, matching = claims(model, step.tokens, step.labels, step.extra, look=look)
    if complaint is None and (words := step.complaint()):
        complaint = Complaint("MOE0713", words)
    if complaint is None and step.microbatches > 1:
        parts = (model.limits.complaint(tokens, labels, look=False) for tokens, labels, *_ in step.parts())
        if words := next(filter(None, parts), None):
            complaint = batch_complaint(words)
    inputs = TpInputs((step.tokens, step.labels, *step.extra.by_name().values(), *step.inputs.values()), look)
    on_host = device.type == "cpu"
    counts = model.counters.local(step.tokens, step.labels, step.extra) if on_host and complaint is None else (0, 0)
    matching = (*matching, step.must_match())
    if complaint is None and step.microbatches > 1:
        matching = (*matching, hooks_of_parameters(model))  # after the number of micro-batches, which must match first
    runs_user_code = step.has_custom_loss or model.is_hooked
    local_tokens = model.limits.labels_of(step.tokens) * model.limits.tokens_per_label if complaint is None else 0
    event = BatchAgreed(
        model, job.world_size, job.data_size, step.tokens, step.labels, step.extra, inputs.tensors,
        custom=step.has_custom_loss, by_labels=step.count is None, look=look, seen=model.seen,
    )  # fmt: skip
    event = event if complaint is not None else with_number(event)
    *totals, numbers, squares = job.checks.require(
        "start of a step",
        complaint,
        *matching,
        inputs=inputs,
        counts=(int(runs_user_code), local_tokens, *counts, event.number, event.number**2),
    )
    sharers = job.plan.sharers
    job.count_tokens(local_tokens, totals[1] // sharers)
    if on_host:
        num_labels, num_tokens = torch.tensor(totals[2:]) // sharers
    else:
        counted = model.takes.real(step.extra, step.tokens) if model.takes.padding else step.tokens
        num_labels, num_tokens = model.counters.labels(step.labels), model.counters.tokens(counted)
    look_at(replace(event, num_labels=num_labels, sums=(numbers, squares)))
    return StepAgreement(totals[0] == 0, look, num_labels, num_tokens)
