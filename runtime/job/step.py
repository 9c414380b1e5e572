"""One training step: micro-batches, the model's loss or a custom one, and its divisor."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moec.passes.ir import Shard
from moec.runtime.errors import JobError, is_whole
from moec.runtime.job.batches import device_of
from moec.runtime.job.beside import NOTHING, Beside
from moec.runtime.job.checks import Complaint, MustMatch, TpInputs
from moec.runtime.job.custom_functions import complaint_of, require_with_cause, result_of
from moec.runtime.job.equal_batches import mark_of, warn_of_equal
from moec.runtime.job.first_batch import warn_of_batch
from moec.runtime.job.forward_checks import batch_complaint
from moec.runtime.job.groups import HOST
from moec.runtime.job.leftover_gradients import warn_of_leftover
from moec.runtime.job.logprobs import label_log_probabilities
from moec.runtime.job.mean_losses import warn_of_mean
from moec.runtime.job.module import ModelOutput, PlanModule
from moec.runtime.job.padded_labels import warn_of_padded
from moec.runtime.job.tp_losses import unlike_in_group
from moec.runtime.job.watch import collective
from moec.runtime.ops.dense_collectives import all_reduce
from moec.runtime.script import warn_first

if TYPE_CHECKING:
    from moec.runtime.job.job import Job

Loss = Callable[..., Tensor]
"""`(logits or logprobs, labels, **inputs) → sum over tokens`, a scalar."""

Counter = Callable[..., Any]
"""`(labels, **inputs) → number`, or with `logits` before labels."""


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

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Beside, dict[str, Tensor]]]:
        """Tokens, labels, what is beside them, and inputs of each micro-batch.

        Sizes differ by at most one sequence, larger ones first.
        """
        beside = iter(self.beside.parts(self.microbatches))
        names, tensors = list(self.inputs), [self.tokens, self.labels, *self.inputs.values()]
        for tokens, labels, *inputs in zip(*(t.tensor_split(self.microbatches) for t in tensors), strict=True):
            yield tokens, labels, next(beside), dict(zip(names, inputs, strict=True))


def run_step(job: Job, model: PlanModule, step: Step) -> Tensor:
    """Forward and backward of every micro-batch; returns the global loss, detached."""
    agreed, look, num_labels, num_tokens = _begin(job, model, step)
    _warn_of_evaluation(model)
    warn_of_leftover(model)
    if not step.has_custom_loss:
        warn_of_batch(model, step.tokens, step.labels, job.data_size)
        warn_of_padded(model, step.tokens, step.labels, step.beside)
    total = num_labels.float()
    if step.count is not None and not step.count_takes_logits:
        total = _count(job, step, None, step.inputs)
    elif step.count is None and look and int(num_labels) == 0:
        raise JobError("MOE0713", "no label of the batch is valid, on any rank: there is nothing to learn from")
    sum_of_losses, graded = torch.zeros((), dtype=torch.float32, device=step.tokens.device), False
    with (
        model.one_step() as microbatches,
        model.counting(
            None if step.has_custom_loss else num_labels,
            num_tokens,
            step.tokens.shape[0],
            passes=step.microbatches,
            skips=job.finite.skips,
        ),
    ):
        for index, (tokens, labels, beside, inputs) in enumerate(step.parts()):
            microbatches.more = index < step.microbatches - 1
            if agreed and index == 0:
                model.agreed(tokens, look)
            if step.has_custom_loss:
                loss, depends = _custom_loss(job, model, step, (tokens, labels), beside, inputs, total)
                graded |= depends
            else:
                output = model(tokens, labels, **beside.given())
                assert output.loss is not None
                loss, graded = output.loss, True
            if not loss.requires_grad:
                raise JobError("MOE0713", "no parameter of the model has `requires_grad`: all are frozen")
            loss.backward()  # type: ignore[no-untyped-call]
            sum_of_losses += loss.detach()
        if not graded:
            raise JobError(
                "MOE0713",
                "the loss does not depend on the model's logits on any rank: only balance terms would train",
                "compute it from `logits` or `logprobs` without `detach()`, `item()` or `no_grad`; zero the gradients",
            )
        microbatches.finish()
        if not job.finite.stops_at_loss(model, sum_of_losses):
            model.update_states()
    return sum_of_losses


def _begin(job: Job, model: PlanModule, step: Step) -> tuple[bool, bool, Tensor, Tensor | None]:
    """Ranks agree once on all micro-batches; raises `JobError` on every rank if one cannot take the step.

    Returns whether the first forward pass can skip its agreement, because no user's code runs before it; whether values
    are checked; and the global numbers of valid labels and real tokens. On CPU the agreement sums these; elsewhere the
    model's collectives do, and the host does not wait for them.
    """
    device = device_of(step.tokens)
    look = job.checks.looks(model.seen, ("step", model.training, step.has_custom_loss), device)
    complaint, matching = model.claims(step.tokens, step.labels, step.beside, look=look)
    if complaint is None and (words := step.complaint()):
        complaint = Complaint("MOE0713", words)
    if complaint is None and step.microbatches > 1:
        parts = (model.limits.complaint(tokens, labels, look=False) for tokens, labels, *_ in step.parts())
        if words := next(filter(None, parts), None):
            complaint = batch_complaint(words)
    inputs = TpInputs((step.tokens, step.labels, *step.beside.given().values(), *step.inputs.values()), look)
    on_host = device.type == "cpu"
    counts = model.local_counts(step.tokens, step.labels, step.beside) if on_host and complaint is None else (0, 0)
    matching = (*matching, step.must_match())
    if complaint is None and step.microbatches > 1:
        matching = (*matching, model.hooks_of_parameters())  # after the number of micro-batches, which must match first
    users_code = step.has_custom_loss or model.is_hooked
    given = model.limits.labels_of(step.tokens) * model.limits.tokens_per_label if complaint is None else 0
    mark = mark_of(model, inputs.tensors, job.data_size) if complaint is None else 0
    *totals, marks, squares = job.checks.require(
        "start of a step",
        complaint,
        *matching,
        inputs=inputs,
        counts=(int(users_code), given, *counts, mark, mark**2),
    )
    warn_of_equal(mark, marks, squares, job.world_size, job.data_size)
    agreed, tp = totals[0] == 0, job.plan.meshes["dense"].size("tp")  # the ranks of a tp group count the same sequences
    job.count_tokens(given, totals[1] // tp)
    if on_host:
        num_labels, num_tokens = torch.tensor(totals[2:]) // tp
        return agreed, look, num_labels, num_tokens
    counted = model.takes.real(step.beside, step.tokens) if model.takes.padding else step.tokens
    return agreed, look, model.count_labels(step.labels), model.count_tokens(counted)


def _warn_of_evaluation(model: PlanModule) -> None:
    """Warns once per model of a step in `eval()`."""
    if not model.training and "step in evaluation" not in model.seen:
        model.seen.add("step in evaluation")
        warn_first(
            "job.step trains a model in eval(): without jitter and balance terms, with the file's capacity for "
            "evaluation, and without updates of `online` biases; call `model.train()` before",
        )


def _custom_loss(
    job: Job,
    model: PlanModule,
    step: Step,
    batch: tuple[Tensor, Tensor],
    beside: Beside,
    inputs: Mapping[str, Tensor],
    total: Tensor,
) -> tuple[Tensor, bool]:
    """The custom loss of a micro-batch, divided by `total` or by the count that takes logits.

    Also returns whether any rank's loss depends on the model.
    """
    tokens, labels = batch
    trains = tuple(parameter.requires_grad for parameter in model.parameters())
    output: ModelOutput = model(tokens, **beside.given())
    if step.count_takes_logits:
        total = _count(job, step, job.whole_logits(output).detach(), inputs)
    name, function = (
        ("loss", step.loss) if step.loss is not None else ("logprob_loss", step.logprob_loss or _negative_sum)
    )
    if step.loss is not None:
        given = {"logits": job.whole_logits(output), "labels": labels}
    else:
        tp = job.plan.result_layout.get("tp")
        cut = tp.dim if isinstance(tp, Shard) else None
        logprobs = label_log_probabilities(output.logits, labels, cut, f"{job.number}tp")
        given = {"logprobs": logprobs, "labels": labels}
    summed, error = result_of(function, given, inputs)
    complaint = _scalar_complaint(summed)
    if tuple(p.requires_grad for p in model.parameters()) != trains:
        help = "freeze and unfreeze between steps"
        complaint = Complaint("MOE0713", f"`{name}` changed `requires_grad` of the model's parameters", help)
    if error is not None:
        complaint = complaint_of(error, name, "a scalar: the sum over tokens, which moec divides", given, inputs)
    unlike = unlike_in_group(job, None if complaint or error else summed)
    del given  # whole logits: not held while ranks agree
    depends = isinstance(summed, Tensor) and summed.requires_grad
    (graded,) = require_with_cause(job.checks, "a custom loss", complaint or unlike, error, counts=(int(depends),))
    if step.count is None and depends:
        warn_of_mean(model, name, summed, labels)
    if not summed.requires_grad and output.logits.requires_grad:
        # Other ranks' losses depend on this rank's logits: their backward needs this rank's backward.
        summed = summed + output.logits[..., :0].sum()
    if job.data_size > 1:
        # The sum's backward is the identity, so that no gradient is summed twice.
        summed = all_reduce(summed.float(), f"{job.number}dp", "a custom loss")
    loss: Tensor = summed / total
    return loss + output.aux_loss if model.training and output.aux_loss is not None else loss, graded > 0


def _negative_sum(logprobs: Tensor, labels: Tensor, **inputs: Tensor) -> Tensor:
    return -logprobs.sum()


def _scalar_complaint(summed: object) -> Complaint | None:
    if isinstance(summed, Tensor) and summed.dim() == 0 and summed.is_floating_point():
        return None
    found = f"{summed.dtype} {list(summed.shape)}" if isinstance(summed, Tensor) else type(summed).__name__
    is_unsummed = isinstance(summed, Tensor) and summed.dim() > 0
    help = "sum it: `.sum()` of what the function returns, or `reduction='sum'`" if is_unsummed else ""
    return Complaint("MOE0713", f"the loss gave {found}, and must give a scalar tensor: a sum over tokens", help)


def _count(job: Job, step: Step, logits: Tensor | None, inputs: Mapping[str, Tensor]) -> Tensor:
    """The sum of all ranks' custom counts: 0-d fp32."""
    assert step.count is not None
    given = {"labels": step.labels} if logits is None else {"logits": logits, "labels": step.labels}
    counted, error = result_of(step.count, given, inputs)
    if error is not None:
        complaint = complaint_of(error, "count", "a number, of this rank's tokens", given, inputs)
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
    total = torch.tensor(number, dtype=torch.float64)
    if job.world_size > 1:
        with collective("all_reduce", job.number + HOST, "a custom count") as peers:
            dist.all_reduce(total, group=peers)
        total /= job.plan.meshes["dense"].size("tp")  # the ranks of a tp group count the same tokens
    if float(total) == 0:
        raise JobError("MOE0713", "the count is 0 on every rank: there is nothing to divide the loss by")
    return total.to(step.tokens.device, torch.float32)
