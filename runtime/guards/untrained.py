"""Finds steps that would learn nothing: no label, no gradient of the logits, or a model in evaluation."""

from __future__ import annotations

from moec.runtime.guards.guard import BatchAgreed, Guard, StepEnds
from moec.runtime.ranks.checks import Complaint
from moec.runtime.script import warn_first


def no_label(step: BatchAgreed) -> Complaint | None:
    """The complaint about a batch without a valid label on any rank."""
    if step.num_labels is None or int(step.num_labels):
        return None
    return Complaint("MOE0713", "no label of the batch is valid, on any rank: there is nothing to learn from")


def warn_of_evaluation(step: BatchAgreed) -> None:
    """Warns of a step in `eval()`."""
    warn_first(
        "job.step trains a model in eval(): without jitter and balance terms, with the file's capacity for "
        "evaluation, and without updates of `online` biases; call `model.train()` before",
    )


def no_gradient(step: StepEnds) -> Complaint:
    """The complaint about a custom loss from which no gradient reaches the logits: only balance terms would train."""
    return Complaint(
        "MOE0713",
        "the loss does not depend on the model's logits on any rank: only balance terms would train",
        "compute it from `logits` or `logprobs` without `detach()`, `item()` or `no_grad`; zero the gradients",
    )


EVALUATION = Guard(
    event=BatchAgreed, look=warn_of_evaluation, when=lambda step: not step.model.training, once="step in evaluation"
)
NO_LABEL = Guard(event=BatchAgreed, look=no_label, when=lambda step: step.by_labels, code="MOE0713", waits=True)
NO_GRADIENT = Guard(event=StepEnds, look=no_gradient, when=lambda step: not step.depends_on_logits, code="MOE0713")
