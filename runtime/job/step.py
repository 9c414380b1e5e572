"""One training step: micro-batches, the model's loss or a custom one, and its divisor."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moec.runtime.errors import JobError, is_whole
from moec.runtime.guards.every_guard import look_at
from moec.runtime.guards.guard import StepEnds
from moec.runtime.inputs.beside import NOTHING, Beside
from moec.runtime.job.custom_loss import custom_count, custom_loss
from moec.runtime.job.step_agreement import agree
from moec.runtime.model.module import PlanModule
from moec.runtime.ranks.checks import MustMatch

if TYPE_CHECKING:
    from moec.runtime.job.job import Job

Loss = Callable[..., Tensor]
"""`(logits or logprobs, labels, **inputs) → sum over tokens`, a scalar."""

Counter = Callable[..., Any]
"""`(labels, **inputs) → number`, or with `logits` before labels."""


Part = tuple[Tensor, Tensor, Beside, dict[str, Tensor]]
"""Tokens, labels, what is beside them, and inputs of a micro-batch."""


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
    beside: Beside = NOTHING

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
            if not callable(getattr(self, name) or sum):
                return f"{name} must be a function that gives a sum over tokens, not {getattr(self, name)!r}"
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
                wanted = "[batch, sequence, …] as tokens" if self.labels.dim() == 2 else "[batch, …] as labels"
                return f"inputs[{name!r}] is {shape}, and must be {wanted} {list(self.labels.shape)}"
        return None

    def must_match(self) -> MustMatch:
        """The arguments that must be the same on every rank."""
        given = (self.loss is not None, self.logprob_loss is not None, self.count is not None, self.count_takes_logits)
        names = zlib.crc32(" ".join(self.inputs).encode())
        return MustMatch(
            "MOE0713",
            "ranks differ in `microbatches`, in which of loss, logprob_loss and count are given, or in names of inputs",
            (self.microbatches if isinstance(self.microbatches, int) else 0, *map(int, given), names),
        )

    def parts(self) -> Iterator[Part]:
        """The micro-batches. Sizes differ by at most one sequence, larger ones first."""
        beside = iter(self.beside.parts(self.microbatches))
        names, tensors = list(self.inputs), [self.tokens, self.labels, *self.inputs.values()]
        for tokens, labels, *inputs in zip(*(t.tensor_split(self.microbatches) for t in tensors), strict=True):
            yield tokens, labels, next(beside), dict(zip(names, inputs, strict=True))


def run_step(job: Job, model: PlanModule, step: Step) -> Tensor:
    """Forward and backward of every micro-batch; returns the global loss, detached."""
    agreed = agree(job, model, step)
    total = agreed.num_labels.float()
    if step.count is not None and not step.count_takes_logits:
        total = custom_count(job, step, None, step.inputs)
    sum_of_losses, graded = torch.zeros((), dtype=torch.float32, device=step.tokens.device), False
    labels = None if step.has_custom_loss else agreed.num_labels
    with (
        model.one_step() as microbatches,
        model.counting(
            labels, agreed.num_tokens, step.tokens.shape[0], passes=step.microbatches, skips=job.finite.skips
        ),
    ):
        for index, part in enumerate(step.parts()):
            microbatches.more = index < step.microbatches - 1
            if agreed.on_forward and index == 0:
                model.agreed(part[0], agreed.look)
            loss, depends = _loss(job, model, step, part, total)
            graded |= depends
            loss.backward()  # type: ignore[no-untyped-call]
            sum_of_losses += loss.detach()
        look_at(StepEnds(model.seen, graded))
        microbatches.finish()
        if not job.finite.stops_at_loss(model, sum_of_losses):
            model.update_states()
    return sum_of_losses


def _loss(job: Job, model: PlanModule, step: Step, part: Part, total: Tensor) -> tuple[Tensor, bool]:
    """The loss of a micro-batch, divided, and whether it depends on the model's logits on any rank."""
    tokens, labels, beside, inputs = part
    if step.has_custom_loss:
        loss, depends = custom_loss(job, model, step, (tokens, labels), beside, inputs, total)
    else:
        output = model(tokens, labels, **beside.given())
        assert output.loss is not None
        loss, depends = output.loss, True
    if not loss.requires_grad:
        raise JobError("MOE0713", "no parameter of the model has `requires_grad`: all are frozen")
    return loss, depends
