"""The ranks' agreement on a step, before any of them computes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from moec.passes.place.pipeline_orders import takes_microbatches
from moec.runtime.guards.every_guard import look_at, with_number
from moec.runtime.guards.guard import BatchAgreed
from moec.runtime.inputs.batches import device_of
from moec.runtime.inputs.forward_checks import batch_complaint
from moec.runtime.model.forward_agreement import claims, hooks_of_parameters
from moec.runtime.model.module import PlanModule
from moec.runtime.ranks.checks import Complaint, SharedInputs
from moec.runtime.weights.weight_nodes import needs_gradient_at_once

if TYPE_CHECKING:
    from moec.runtime.job.job import Job
    from moec.runtime.job.step import Step


class Totals(NamedTuple):
    """Counts of this rank, or their sums over all ranks, in which a part of the batch counts once for each sharer.

    `user_code`: 1 if the step calls a user's function or hook. `labels`, `real_tokens`: valid labels and real tokens, 0
    if the device counts them. `number`: that of the guards (`BatchAgreed`), with its `square`.
    """

    user_code: int
    tokens: int
    labels: int
    real_tokens: int
    number: int
    square: int


class StepAgreement(NamedTuple):
    """The result of an agreement, equal on all ranks.

    `forward_may_skip`: the first forward pass can skip its own agreement, because no user's code runs before it.
    `reads_values`: values are checked. `num_labels`, `num_tokens`: valid labels and real tokens of all ranks, 0-d
    int64.
    """

    forward_may_skip: bool
    reads_values: bool
    num_labels: Tensor
    num_tokens: Tensor | None


def agree(job: Job, model: PlanModule, step: Step) -> StepAgreement:
    """One agreement on all micro-batches; raises `JobError` on every rank if one cannot take the step.

    On CPU it sums labels and tokens; elsewhere the model's collectives do, and the host does not wait for them.
    """
    device = device_of(step.tokens)
    reads_values = job.checks.reads_values(model.seen, ("step", model.training, step.has_custom_loss), device)
    complaint, matching = claims(model, step.tokens, step.labels, step.extra, reads_values=reads_values)
    if complaint is None and job.plan.pipeline > 1 and step.count_takes_logits:
        help = "count by labels and inputs"
        complaint = Complaint("MOE0700", "a count that takes logits, which only the last pipeline stage has", help)
    if complaint is None and (words := step.complaint()):
        complaint = Complaint("MOE0713", words)
    if complaint is None and job.plan.pipeline > 1:
        complaint = _hook_complaint(job, model)
    if complaint is None and not takes_microbatches(model.program, step.microbatches):
        words = f"the schedule `{model.program.schedule}` of this plan takes no {step.microbatches} micro-batches"
        help = (
            f"take {model.program.microbatches}, as compiled; `interleaved` and `zero_bubble` take equal rounds, "
            "`dual_pipe_v` at least 2 * pp"
        )
        complaint = Complaint("MOE0713", words, help)
    if complaint is None and step.microbatches > 1:
        parts = (model.limits.complaint(tokens, labels, reads_values=False) for tokens, labels, *_ in step.parts())
        if words := next(filter(None, parts), None):
            complaint = batch_complaint(words)
    inputs = SharedInputs(
        (step.tokens, step.labels, *step.extra.by_name().values(), *step.inputs.values()), reads_values
    )
    on_host = device.type == "cpu"
    counts_here = on_host and complaint is None
    labels, real_tokens = model.counters.local(step.tokens, step.labels, step.extra) if counts_here else (0, 0)
    matching = (*matching, step.must_match())
    if complaint is None and step.microbatches > 1:
        matching = (*matching, hooks_of_parameters(model))  # after the number of micro-batches, which must match first
    runs_user_code = step.has_custom_loss or model.is_hooked
    local_tokens = model.limits.labels_of(step.tokens) * model.limits.tokens_per_label if complaint is None else 0
    event = BatchAgreed(
        model, job.world_size, job.data_size, step.tokens, step.labels, step.extra, inputs.tensors,
        custom=step.has_custom_loss, by_labels=step.count is None, reads_values=reads_values, seen=model.seen,
    )  # fmt: skip
    event = event if complaint is not None else with_number(event)
    counts = Totals(
        user_code=int(runs_user_code), tokens=local_tokens, labels=labels, real_tokens=real_tokens,
        number=event.number, square=event.number**2,
    )  # fmt: skip
    totals = Totals(*job.checks.require("start of a step", complaint, *matching, inputs=inputs, counts=counts))
    readers = job.plan.readers
    job.count_tokens(local_tokens, totals.tokens // readers)
    if on_host:
        num_labels, num_tokens = torch.tensor((totals.labels, totals.real_tokens)) // readers
    else:
        counted = model.takes.real(step.extra, step.tokens) if model.takes.padding else step.tokens
        num_labels, num_tokens = model.counters.labels(step.labels), model.counters.tokens(counted)
    look_at(replace(event, num_labels=num_labels, sums=(totals.number, totals.square)))
    return StepAgreement(totals.user_code == 0, reads_values, num_labels, num_tokens)


def _hook_complaint(job: Job, model: PlanModule) -> Complaint | None:
    """The complaint about hooks that would not run, or see a part of a gradient.

    Torch's hooks of all modules run for layers: tools such as `FlopCounterMode` work by them.
    """
    hooks = model._forward_pre_hooks, model._forward_hooks, model._backward_pre_hooks, model._backward_hooks
    if any(hooks) or "forward" in vars(model):
        words = "the model has a hook or a `forward` of the script, and a pipeline runs stages, never the whole model"
        return Complaint("MOE0711", words, "register hooks on layers, on the ranks that have them")
    parts = [weights.registered() for top in model.tops.values() for weights in top.weights]
    hooked = [name for part in parts for name, p in part.items() if name in job.plan.tied and needs_gradient_at_once(p)]
    if not hooked:
        return None
    words = f"{hooked[0]} has a hook or is parametrized, and would have the gradient of each stage's use alone"
    return Complaint("MOE0711", words, "change its `.grad`, or step its optimizer, after `job.step`")
