"""A loss that a user's function computes from logits or log-probabilities, and the count that divides it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moec.runtime.errors import JobError
from moec.runtime.guards.every_guard import first_complaint
from moec.runtime.guards.guard import LossComputed
from moec.runtime.job.custom_functions import call_complaint, call_user_function, require_with_cause
from moec.runtime.job.logprobs import label_log_probabilities
from moec.runtime.model.model_output import ModelOutput
from moec.runtime.model.module import PlanModule
from moec.runtime.ops.dense_collectives import all_reduce
from moec.runtime.ranks.checks import Complaint
from moec.runtime.ranks.groups import HOST
from moec.runtime.ranks.watch import collective

if TYPE_CHECKING:
    from moec.runtime.job.job import Job
    from moec.runtime.job.step import Step


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """The custom loss of a step's micro-batches. `total` divides it, unless its count takes logits."""

    job: Job
    model: PlanModule
    step: Step
    total: Tensor

    def of_all_ranks(self, output: ModelOutput, labels: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, bool]:
        """The loss of a micro-batch's `output`, and whether any rank's depends on the logits.

        Raises `JobError` on every rank for a function that raises an error or gives no scalar.
        """
        total = self.total
        if self.step.count_takes_logits:
            total = custom_count(self.job, self.step, self.job.whole_logits(output).detach(), inputs)
        summed, complaint, error = self._summed(output, labels, inputs)
        counts = (int(_depends_on_logits(summed)),)
        (depending_ranks,) = require_with_cause(self.job.checks, "a custom loss", complaint, error, counts=counts)
        return self._divided(output, summed, total), depending_ranks > 0

    def of_last_stage(
        self, output: ModelOutput, labels: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, bool, Complaint | None, Exception | None]:
        """The loss on the ranks of the last pipeline stage, and whether this rank's depends on the logits. With a
        complaint, which is raised on every rank at the end of the step, it is 0, and adds nothing to gradients. Also
        returns the error of the script's function."""
        summed, complaint, error = self._summed(output, labels, inputs, every_error=True)
        depends = _depends_on_logits(summed)
        if complaint is not None:
            output = ModelOutput(output.logits)  # without balance terms
            summed = output.logits.sum() * 0.0
        return self._divided(output, summed, self.total), depends, complaint, error

    def _summed(
        self, output: ModelOutput, labels: Tensor, inputs: Mapping[str, Tensor], *, every_error: bool = False
    ) -> tuple[Any, Complaint | None, Exception | None]:
        """What the user's function gave, the complaint about it, and the error that it raised."""
        job, model, step = self.job, self.model, self.step
        required_gradients = tuple(parameter.requires_grad for parameter in model.parameters())
        if step.loss is not None:
            name, function = "loss", step.loss
            tensors = {"logits": job.whole_logits(output), "labels": labels}
        else:
            name, function = "logprob_loss", _negative_sum if step.logprob_loss is None else step.logprob_loss
            logprobs = label_log_probabilities(output.logits, labels, job.plan.result_layout, job.number)
            tensors = {"logprobs": logprobs, "labels": labels}
        summed, error = call_user_function(function, tensors, inputs, every=every_error)
        complaint = _scalar_complaint(summed)
        if tuple(p.requires_grad for p in model.parameters()) != required_gradients:
            help = "freeze and unfreeze between steps"
            complaint = Complaint("MOE0713", f"`{name}` changed `requires_grad` of the model's parameters", help)
        if error is not None:
            complaint = call_complaint(
                error, name, "a scalar: the sum over tokens, which moec divides", tensors, inputs
            )
        del tensors  # frees the whole logits before the ranks agree
        computed = LossComputed(
            name, None if complaint or error else summed, labels, by_labels=step.count is None,
            group=job.number + job.plan.sharing_axis, group_size=job.plan.sharers, stage_size=job.plan.stage_size,
            seen=model.seen, reads_values=job.checks.reads_values(model.seen, ("custom loss", name), labels.device),
        )  # fmt: skip
        guard_complaint = first_complaint(computed)  # a collective, also on a rank that has a complaint
        return summed, complaint or guard_complaint, error

    def _divided(self, output: ModelOutput, summed: Tensor, total: Tensor) -> Tensor:
        """The loss of all ranks' sums, with balance terms in training."""
        if not summed.requires_grad and output.logits.requires_grad:
            # Other ranks' losses depend on this rank's logits, and their backward needs this rank's.
            summed = summed + output.logits[..., :0].sum()
        if self.job.data_size > 1:
            # The sum's backward is the identity, so that no gradient is summed twice.
            summed = all_reduce(summed.float(), f"{self.job.number}dp", "a custom loss")
        loss: Tensor = summed / total
        return loss + output.aux_loss if self.model.training and output.aux_loss is not None else loss


def _negative_sum(logprobs: Tensor, labels: Tensor, **inputs: Tensor) -> Tensor:
    return -logprobs.sum()


def _depends_on_logits(summed: object) -> bool:
    return isinstance(summed, Tensor) and summed.requires_grad


def _scalar_complaint(summed: object) -> Complaint | None:
    if isinstance(summed, Tensor) and summed.dim() == 0 and summed.is_floating_point():
        return None
    got = f"{summed.dtype} {list(summed.shape)}" if isinstance(summed, Tensor) else type(summed).__name__
    is_unsummed = isinstance(summed, Tensor) and summed.dim() > 0
    help = "sum it: `.sum()` of what the function returns, or `reduction='sum'`" if is_unsummed else ""
    return Complaint("MOE0713", f"the loss gave {got}, and must give a scalar tensor: a sum over tokens", help)


def custom_count(job: Job, step: Step, logits: Tensor | None, inputs: Mapping[str, Tensor]) -> Tensor:
    """The sum of all ranks' custom counts: 0-d fp32."""
    assert step.count is not None
    tensors = {"labels": step.labels} if logits is None else {"logits": logits, "labels": step.labels}
    counted, error = call_user_function(step.count, tensors, inputs)
    if error is not None:
        complaint = call_complaint(error, "count", "a number, of this rank's tokens", tensors, inputs)
        require_with_cause(job.checks, "a custom count", complaint, error)
    try:
        number = float(counted)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    is_bool = isinstance(counted, bool) or (isinstance(counted, Tensor) and counted.dtype == torch.bool)
    wrong = is_bool or not 0 <= number < math.inf
    words = f"the count gave {counted!r}, and must give a number from 0 on"
    help = "count them: `(labels != -100).sum()`" if is_bool else ""
    job.checks.require("a custom count", Complaint("MOE0713", words, help) if wrong else None)
    total = torch.tensor(number, dtype=torch.float64, device="cpu")
    if job.world_size > 1:
        with collective("all_reduce", job.number + HOST, "a custom count") as peers:
            dist.all_reduce(total, group=peers)
        total /= job.plan.readers
    if float(total) == 0:
        raise JobError("MOE0713", "the count is 0 on every rank: there is nothing to divide the loss by")
    return total.to(step.tokens.device, torch.float32)
