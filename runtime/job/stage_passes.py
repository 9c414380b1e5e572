"""The passes of a step on the ranks of a pipeline: of this rank's stages, over each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moec.passes.ir.order import Action, Order
from moec.runtime.action_log import note_action
from moec.runtime.errors import JobError
from moec.runtime.job.custom_functions import require_with_cause
from moec.runtime.job.custom_loss import CustomLoss
from moec.runtime.job.passes import ALL_FROZEN
from moec.runtime.job.step_agreement import StepAgreement
from moec.runtime.model.model_output import ModelOutput
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_names import by_plan_names
from moec.runtime.model.stage_messages import StageBatch, StageMessages, Values
from moec.runtime.model.stage_pass import MicroBatch, stage_pass
from moec.runtime.model.step_counts import sequence_numbers
from moec.runtime.ranks.checks import Complaint
from moec.runtime.ranks.groups import PIPELINE, TIED
from moec.runtime.ranks.watch import collective
from moec.runtime.weight_queue import WeightQueue
from moec.runtime.weights.gathering import Snapshot
from moec.runtime.weights.masters import local_part

if TYPE_CHECKING:
    from moec.runtime.job.job import Job
    from moec.runtime.job.step import Step

CHANGED = "a hook changed a parameter of pipeline stage {} while micro-batches were between their passes"
WITHOUT_HOOKS = "step after `job.step`, or take one micro-batch; some have stepped: go on from the last checkpoint"
CHANGED_TIED = "a hook changed {}, of which several pipeline stages have a copy, before they summed its gradients"
AFTER_STEP = "change it after `job.step`; some have changed it: go on from the last checkpoint"


class StagePasses:
    """The passes of one step. No collective of all ranks runs between its agreement and its end."""

    def __init__(
        self, job: Job, model: PlanModule, step: Step, agreement: StepAgreement, total: Tensor, order: Order
    ) -> None:
        self._job, self._model, self._step, self._total = job, model, step, total
        self._reads_values = agreement.reads_values
        parts = [*step.parts()]
        self._inputs = [inputs for *_, inputs in parts]
        numbered = accumulate((tokens.shape[0] for tokens, *_ in parts), initial=0)
        self._batches = [
            MicroBatch(tokens, labels, extra, self._numbers(tokens, before))
            for (tokens, labels, extra, _), before in zip(parts, numbered, strict=False)
        ]
        self._last = len(model.program.stages) - 1
        self._messages = StageMessages(job.plan, job.rank, job.number, step.tokens.device)
        self._received, self._outputs = dict[StageBatch, Values](), dict[StageBatch, Values]()
        self._losses = dict[int, Tensor]()
        self._queues = {(a.stage, a.microbatch): WeightQueue() for a in order if a.kind == "weights"}
        """The products that wait, for each pass whose backward is in two parts."""
        self._sum_of_losses = torch.zeros((), dtype=torch.float32, device=step.tokens.device)
        self.depends_on_logits = False
        """Whether the loss depends on the model's logits: on this rank, and after `end` on any."""
        self._routers: Complaint | None = None
        """The first complaint about router logits, which a job may skip."""
        self._complaint: Complaint | None = None
        """The first complaint that ends the step."""
        self._cause: Exception | None = None
        self._tied, _ = by_plan_names(model, model.named_parameters(), job.plan.owners_of_tied)
        self._earlier = {name: local_part(p.grad).clone() for name, p in self._tied.items() if p.grad is not None}
        """The gradients of tied parameters before the step."""
        self._tied_before = {name: Snapshot([parameter]) for name, parameter in self._tied.items()}
        several = step.microbatches > 1  # with one, a hook may step as soon as a gradient is there
        self._before = {
            stage: Snapshot([*model.parameters_of_stage(top)]) for stage, top in model.tops.items() if several
        }
        """The parameters of each stage before the step."""

    def take(self, action: Action) -> None:
        """Takes an action of a micro-batch."""
        assert action.microbatch is not None
        if action.kind in ("receive", "send", "receive_gradients", "send_gradients"):
            note_action(str(action))
        place = self._last if action.stage is None else action.stage, action.microbatch
        batch = self._batches[action.microbatch]
        match action.kind:
            case "receive":
                self._messages.receive(place, batch.tokens)
            case "forward":
                self._forward(place, batch)
            case "send":
                self._messages.send(place, self._outputs[place])
            case "loss":
                self._loss(action.microbatch, batch)
            case "receive_gradients":
                self._messages.receive(place, batch.tokens, gradients=True)
            case "backward" | "inputs" | "weights":
                self._take_backward(action.kind, place)
            case "send_gradients":
                received = self._received.pop(place)
                gradients = {
                    role: torch.zeros_like(value) if value.grad is None else value.grad
                    for role, value in received.items()
                    if value.requires_grad
                }
                self._messages.send(place, gradients, gradients=True)
            case _:
                raise AssertionError(action)

    def _numbers(self, tokens: Tensor, before: int) -> Tensor | None:
        """The numbers of a micro-batch's sequences, `before` of this rank's come before it; None for a model that draws
        nothing."""
        if not self._model.draws:
            return None
        in_step = self._step.tokens.shape[0]
        return sequence_numbers(self._job.data_rank, in_step, tokens.shape[0], numbered=before, device=tokens.device)

    def _forward(self, place: StageBatch, batch: MicroBatch) -> None:
        stage, _ = place
        received = self._messages.received(place) if stage else {}
        for value in received.values():
            value.requires_grad_(value.is_floating_point())
        queue = self._queues.get(place)
        with nullcontext() if queue is None else queue.forward():
            result = stage_pass(self._model, stage, batch, received, reads_values=self._reads_values)
        self._routers = self._routers or result.complaint
        self._received[place], self._outputs[place] = received, dict(result.outputs)

    def _loss(self, microbatch: int, batch: MicroBatch) -> None:
        outputs, model, step = self._outputs.pop((self._last, microbatch)), self._model, self._step
        balance = model.aux_loss(outputs["balance"], batch.tokens) if "balance" in outputs else None
        output = ModelOutput(outputs["logits"], aux_loss=balance)
        if step.has_custom_loss:
            custom = CustomLoss(self._job, model, step, self._total)
            loss, depends, complaint, error = custom.of_last_stage(output, batch.labels, self._inputs[microbatch])
            self.depends_on_logits = self.depends_on_logits or depends
            if self._complaint is None:
                self._complaint, self._cause = complaint, error
        else:
            loss, self.depends_on_logits = model.loss(output.logits, batch.labels), True
            loss = loss if balance is None or not model.training else loss + balance
        self._losses[microbatch] = loss

    def _take_backward(self, kind: str, place: StageBatch) -> None:
        """A backward pass, or one of its two parts.

        After a hook has changed parameters of the stage its gradients are worthless, but it runs on, and errors that
        autograd and moec raise of such a change wait: other ranks need its messages until all hear the complaint.
        """
        self._notes_change(place[0])
        try:
            if kind == "weights":
                self._queues[place].to_weights()
            else:
                self._backward(place, torch.autograd.backward if kind == "backward" else self._queues[place].to_inputs)
        except (RuntimeError, JobError) as error:
            if type(error) not in (RuntimeError, JobError) or not self._notes_change(place[0]):
                raise
            self._cause = self._cause or error

    def _notes_change(self, stage: int) -> bool:
        """Whether a parameter of this stage has changed since the step began; notes the complaint."""
        changed = stage in self._before and self._before[stage].has_changed
        if changed:
            self._complaint = self._complaint or Complaint("MOE0722", CHANGED.format(stage), WITHOUT_HOOKS)
        return changed

    def _backward(self, place: StageBatch, run: Callable[..., None]) -> None:
        stage, microbatch = place
        if stage == self._last:
            loss = self._losses.pop(microbatch)
            self._sum_of_losses += loss.detach()
            outputs, gradients = [loss], None
        else:
            sent_back = self._messages.received(place, gradients=True)
            values = self._outputs.pop(place)
            differentiable = [role for role, value in values.items() if value.requires_grad]
            outputs, gradients = [values[role] for role in differentiable], [sent_back[role] for role in differentiable]
        if any(output.requires_grad for output in outputs):
            run(outputs, gradients)

    def drop(self) -> None:
        """Drops what waits for an action, if an exception has ended the step."""
        for queue in self._queues.values():
            queue.drop()

    def end(self) -> Tensor:
        """The global loss of the step, which the last stage tells the others; raises what a stage complains of."""
        self._messages.finish()
        self._sum_tied()
        routers = None if self._job.finite.skips else self._routers
        trains = any(parameter.requires_grad for parameter in self._model.parameters())
        complaint, counts = self._complaint or routers, (int(trains), int(self.depends_on_logits))
        training, depending = require_with_cause(self._job.checks, "end of a step", complaint, self._cause, counts)
        if not training:
            raise JobError("MOE0713", ALL_FROZEN)
        self.depends_on_logits = depending > 0
        loss = self._sum_of_losses
        with collective("all_reduce", self._job.number + PIPELINE, "the loss of a step") as peers:
            dist.all_reduce(loss, group=peers)
        return loss

    def _sum_tied(self) -> None:
        """Sums the gradients of parameters that stages on several ranks have, each a copy."""
        plan = self._job.plan
        for name, parameter in self._tied.items():
            if plan.parameters[name].frozen:
                continue
            owners = plan.owners_of_tied[name]
            trains = torch.tensor(int(parameter.requires_grad), device=self._sum_of_losses.device)
            with collective("all_reduce", self._job.number + TIED, f"stages that train {name}") as peers:
                dist.all_reduce(trains, group=peers)
            if int(trains) not in (0, len(owners)):
                words = f"{name} is of several pipeline stages, of which {int(trains)} of {len(owners)} train it"
                help = "call `requires_grad_` on every rank or on none"
                self._complaint = self._complaint or Complaint("MOE0702", words, help, True)
            elif parameter.requires_grad:
                if self._tied_before[name].has_changed:
                    self._complaint = self._complaint or Complaint("MOE0722", CHANGED_TIED.format(name), AFTER_STEP)
                earlier = self._earlier.get(name)
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif earlier is not None:
                    local_part(parameter.grad).sub_(earlier)
                with collective("all_reduce", self._job.number + TIED, f"gradient of {name}") as peers:
                    dist.all_reduce(local_part(parameter.grad), group=peers)
                if earlier is not None:
                    local_part(parameter.grad).add_(earlier)
