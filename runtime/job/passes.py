"""The forward passes, losses and backward passes of a step whose model is on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moec.passes.ir.order import Action
from moec.runtime.errors import JobError
from moec.runtime.job.custom_loss import CustomLoss
from moec.runtime.job.step_agreement import StepAgreement
from moec.runtime.model.model_output import ModelOutput
from moec.runtime.model.module import PlanModule

if TYPE_CHECKING:
    from moec.runtime.job.job import Job
    from moec.runtime.job.step import Part, Step

ALL_FROZEN = "no parameter of the model has `requires_grad`: all are frozen"


class Passes:
    """The passes of one step; `total` divides its losses."""

    def __init__(self, job: Job, model: PlanModule, step: Step, agreement: StepAgreement, total: Tensor) -> None:
        self._job, self._model, self._step, self._agreement, self._total = job, model, step, agreement, total
        self._parts = step.parts()
        self._forwarded: dict[int | None, tuple[Part, ModelOutput]] = {}
        self._losses = dict[int | None, Tensor]()
        self._sum_of_losses = torch.zeros((), dtype=torch.float32, device=step.tokens.device)
        self.depends_on_logits = False
        """Whether the loss depends on the model's logits on any rank."""

    def take(self, action: Action) -> None:
        """Takes an action of a micro-batch."""
        match action.kind:
            case "forward":
                self._forwarded[action.microbatch] = self._forward(is_first=action.microbatch == 0)
            case "loss":
                self._losses[action.microbatch] = self._loss(*self._forwarded.pop(action.microbatch))
            case "backward":
                loss = self._losses.pop(action.microbatch)
                loss.backward()  # type: ignore[no-untyped-call]
                self._sum_of_losses += loss.detach()

    def drop(self) -> None:
        """Does nothing: autograd's graphs go with the losses."""

    def end(self) -> Tensor:
        """The global loss of the step, after its last backward pass."""
        return self._sum_of_losses

    def _forward(self, *, is_first: bool) -> tuple[Part, ModelOutput]:
        part = tokens, labels, extra, _ = next(self._parts)
        if self._agreement.forward_may_skip and is_first:
            self._model.skip_agreement(tokens, self._agreement.reads_values)
        given = (tokens,) if self._step.has_custom_loss else (tokens, labels)
        return part, self._model(*given, **extra.by_name())

    def _loss(self, part: Part, output: ModelOutput) -> Tensor:
        """The loss of a micro-batch, divided."""
        _, labels, _, inputs = part
        if self._step.has_custom_loss:
            loss, depends = CustomLoss(self._job, self._model, self._step, self._total).of_all_ranks(
                output, labels, inputs
            )
            self.depends_on_logits = self.depends_on_logits or depends
        else:
            assert output.loss is not None
            loss, self.depends_on_logits = output.loss, True
        if not loss.requires_grad:
            raise JobError("MOE0713", ALL_FROZEN)
        return loss
