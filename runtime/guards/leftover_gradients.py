"""Finds steps whose gradients add up because nothing zeroes them in between, as after an error."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from moec.runtime.guards.guard import BatchAgreed, Guard, Guarded, StepBegins
from moec.runtime.script import warn_first

STEP_RAISED = "a step that raised"
"""In `seen`: the last step raised an error, perhaps in the middle of its backward pass."""
FIRST_STEP = "first step"
SECOND_STEP = "second step"


def warn_after_error(step: StepBegins) -> None:
    """Warns in the step after one that has raised an error if gradients are there."""
    step.seen.discard(STEP_RAISED)
    if has_gradients(step.model):
        step.seen.add(SECOND_STEP)  # one warning is enough
        warn_first(
            "the last step raised an error; gradients, possibly incomplete, are still there, and those of this one are "
            "added to them: call `optimizer.zero_grad()` when a step has failed",
            stage_size=step.model.program.stages[0].num_ranks,
        )


def warn_of_leftover(step: BatchAgreed) -> None:
    """Warns in a model's second step if the gradients of the first are still there."""
    if FIRST_STEP not in step.seen:
        step.seen.add(FIRST_STEP)
        return
    step.seen.add(SECOND_STEP)
    if has_gradients(step.model):
        warn_first(
            "the gradients of an earlier job.step are still there, and those of this one are added to them: call "
            "`optimizer.zero_grad()` after each `optimizer.step()`; micro-batches of one step are "
            "`job.step(…, microbatches=…)`, which divides the loss",
            stage_size=step.model.program.stages[0].num_ranks,
        )


def has_gradients(model: Guarded) -> bool:
    """Whether the first gradient of this rank is not zero: `zero_grad(set_to_none=False)` leaves zeros."""
    gradient = next((p.grad for p in model.parameters() if p.grad is not None), None)
    if gradient is None:
        return False
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(local.any())


AFTER_ERROR = Guard(event=StepBegins, look=warn_after_error, when=lambda step: STEP_RAISED in step.seen)
LEFTOVER = Guard(event=BatchAgreed, look=warn_of_leftover, when=lambda step: SECOND_STEP not in step.seen)
