"""Finds steps whose gradients add up because nothing zeroes them in between, as after an error."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from moec.runtime.job.module import STEP_RAISED, PlanModule
from moec.runtime.script import warn_first


def warn_after_error(model: PlanModule) -> None:
    """Warns in the step after one that has raised an error if gradients are there. Reads one, as `warn_of_leftover`."""
    if STEP_RAISED not in model.seen:
        return
    model.seen.discard(STEP_RAISED)
    if has_gradients(model):
        model.seen.add("second step")  # one warning is enough
        warn_first(
            "the last step raised an error and left gradients, perhaps a part of its own, and those of this one are "
            "added to them: call `optimizer.zero_grad()` when a step has failed"
        )


def warn_of_leftover(model: PlanModule) -> None:
    """Warns in a model's second step if the gradients of the first are still there.

    Reads the values of one gradient, which on a GPU waits for it: in that step alone.
    """
    if "second step" in model.seen:
        return
    if "first step" not in model.seen:
        model.seen.add("first step")
        return
    model.seen.add("second step")
    if has_gradients(model):
        warn_first(
            "the gradients of an earlier job.step are still there, and those of this one are added to them: call "
            "`optimizer.zero_grad()` after each `optimizer.step()`; micro-batches of one step are "
            "`job.step(…, microbatches=…)`, which divides the loss",
        )


def has_gradients(model: PlanModule) -> bool:
    """Whether the first gradient of this rank is not zero: `zero_grad(set_to_none=False)` leaves zeros."""
    gradient = next((p.grad for p in model.parameters() if p.grad is not None), None)
    if gradient is None:
        return False
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(local.any())
