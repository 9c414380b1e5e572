"""One training step: micro-batches, the model's loss or a custom one, and its divisor."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moec.passes.place.pipeline_orders import takes_microbatches
from moec.passes.place.schedule import is_last_backward, order_of_step
from moec.runtime.action_log import note_action
from moec.runtime.errors import is_whole
from moec.runtime.guards.every_guard import look_at
from moec.runtime.guards.guard import StepEnds
from moec.runtime.inputs.extra_inputs import NO_EXTRA_INPUTS, ExtraInputs
from moec.runtime.job.custom_loss import custom_count
from moec.runtime.job.passes import Passes
from moec.runtime.job.stage_passes import StagePasses
from moec.runtime.job.step_agreement import StepAgreement, agree
from moec.runtime.model.module import PlanModule
from moec.runtime.ranks.checks import MustMatch
from moec.runtime.ranks.groups import require_no_messages

if TYPE_CHECKING:
    from moec.runtime.job.job import Job

Loss = Callable[..., Tensor]
"""`(logits or logprobs, labels, **inputs) → sum over tokens`, a scalar."""

Counter = Callable[..., Any]
"""`(labels, **inputs) → number`, or with `logits` before labels."""


Part = tuple[Tensor, Tensor, ExtraInputs, dict[str, Tensor]]
"""Tokens, labels, extra inputs and loss inputs of a micro-batch."""


@dataclass(frozen=True)
class Step:
    """The arguments of `Job.step`."""

    tokens: Tensor
    labels: Tensor
    microbatches: int
    loss: Loss | None
    logprob_loss: Loss | None
    count: Counter | None
    inputs: Mapping[str, Tensor]
    extra: ExtraInputs = NO_EXTRA_INPUTS

    @property
    def count_takes_logits(self) -> bool:
        """Whether the count needs the logits of a forward pass."""
        return callable(self.count) and "logits" in inspect.signature(self.count).parameters

    @property
    def has_custom_loss(self) -> bool:
        """Whether a user's function computes the loss or its divisor."""
        return self.loss is not None or self.logprob_loss is not None or self.count is not None

    def complaint(self) -> str | None:
        """Describes the first wrong argument, or None; reads no tensor's values."""
        if not torch.is_grad_enabled():
            return (
                "job.step computes gradients, and was called under torch.no_grad; for the loss alone there is "
                "`model.eval()(tokens, labels)`"
            )
        labels: object = self.labels
        if labels is None:
            return "job.step needs labels; to compute logits alone, call `model(tokens)`"
        for name in ("loss", "logprob_loss", "count"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                return f"{name} must be a function that gives a sum over tokens, not {function!r}"
        if self.loss is not None and self.logprob_loss is not None:
            return "job.step takes one of loss and logprob_loss, not both"
        if not is_whole(self.microbatches) or self.microbatches < 1:
            return f"microbatches must be an integer of at least 1, not {self.microbatches!r}"
        sequences = self.tokens.shape[0] if self.tokens.dim() else 0
        if self.microbatches > max(1, sequences):
            return (
                f"{sequences} sequences cannot be cut into {self.microbatches} micro-batches: `microbatches=…` of "
                "job.step replaces the plan's number"
            )
        if self.microbatches > 1 and self.count_takes_logits:
            return (
                "a count that takes logits is known only after the forward pass, and several micro-batches are "
                "divided by it before: take one micro-batch, or count by labels and inputs"
            )
        if self.inputs and not self.has_custom_loss:
            names = ", ".join(self.inputs)
            return f"job.step got the inputs {names}, but no loss, logprob_loss or count that takes them"
        for name, tensor in self.inputs.items():
            if not isinstance(tensor, Tensor) or tensor.shape[: self.labels.dim()] != self.labels.shape:
                shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                shape_rule = "[batch, sequence, …] as tokens" if self.labels.dim() == 2 else "[batch, …] as labels"
                return f"inputs[{name!r}] is {shape}, and must be {shape_rule} {list(self.labels.shape)}"
        return None

    def must_match(self) -> MustMatch:
        """The arguments that must be the same on every rank."""
        functions = [function is not None for function in (self.loss, self.logprob_loss, self.count)]
        names = zlib.crc32(" ".join(self.inputs).encode())
        return MustMatch(
            "MOE0713",
            "ranks differ in `microbatches`, in which of loss, logprob_loss and count are given, or in names of inputs",
            (
                self.microbatches if isinstance(self.microbatches, int) else 0,
                *map(int, [*functions, self.count_takes_logits]),
                names,
            ),
        )

    def parts(self) -> Iterator[Part]:
        """The micro-batches. Sizes differ by at most one sequence, larger ones first."""
        extra = iter(self.extra.parts(self.microbatches))
        names, tensors = list(self.inputs), [self.tokens, self.labels, *self.inputs.values()]
        for tokens, labels, *inputs in zip(*(t.tensor_split(self.microbatches) for t in tensors), strict=True):
            yield tokens, labels, next(extra), dict(zip(names, inputs, strict=True))


def run_step(job: Job, model: PlanModule, step: Step) -> Tensor:
    """Runs the actions of a step in the plan's order; returns the global loss, detached.

    The script itself runs the last two: `job.clip_grad_norm_` and the optimizer.
    """
    require_no_messages(job.number)
    taken = takes_microbatches(model.program, step.microbatches)  # if not, `agree` raises
    order = order_of_step(
        model.program, step.microbatches if taken else model.program.microbatches, model._home.stages[0]
    )
    with ExitStack() as contexts:
        for action in order:
            if action.kind in ("agree", "loss", "sum", "states"):
                note_action(action.kind)
            match action.kind:
                case "agree":
                    agreement = agree(job, model, step)
                    total = _divisor(job, step, agreement)
                    open_step = contexts.enter_context(model.one_step())
                    contexts.enter_context(_counting(job, model, step, agreement))
                    given = job, model, step, agreement, total
                    passes = StagePasses(*given, order) if job.plan.pipeline > 1 else Passes(*given)
                    contexts.callback(passes.drop)
                case "backward" | "inputs" | "weights":
                    with open_step.backward(is_last=is_last_backward(order, action)):
                        passes.take(action)
                case "sum":
                    open_step.finish()
                    loss = passes.end()
                    look_at(StepEnds(passes.depends_on_logits, seen=model.seen))
                    stops = job.finite.skips_loss(model, loss)
                case "states" if not stops:
                    model.update_states()
                case "clip" | "update" | "states":
                    pass
                case _:
                    passes.take(action)
    return loss


def _divisor(job: Job, step: Step, agreement: StepAgreement) -> Tensor:
    if step.count is not None and not step.count_takes_logits:
        return custom_count(job, step, None, step.inputs)
    return agreement.num_labels.float()


def _counting(job: Job, model: PlanModule, step: Step, agreement: StepAgreement) -> AbstractContextManager[Any]:
    labels = None if step.has_custom_loss else agreement.num_labels
    return model.counting(
        labels, agreement.num_tokens, step.tokens.shape[0], passes=step.microbatches, skips=job.finite.skips
    )
