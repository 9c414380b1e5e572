"""Refuses passes that `torch.utils.checkpoint` computes again in backward, where the second would differ."""

from __future__ import annotations

from moec.runtime.guards.guard import Guard, LayerRecomputed, ModelRecomputed
from moec.runtime.ranks.checks import Complaint


def after_accumulate(_: ModelRecomputed) -> Complaint:
    """The complaint about a pass of `job.accumulate` that is computed again after its block."""
    return Complaint(
        "MOE0713",
        "a forward pass of the whole model is computed again after `with job.accumulate(…)`, which says what its loss "
        "is divided by",
        "call `backward()` inside of the block, or checkpoint the layers and not the whole model",
    )


def other_draws(_: ModelRecomputed) -> Complaint:
    """The complaint about a pass whose random numbers are functions of the step and the micro-batch."""
    return Complaint(
        "MOE0713",
        "a forward pass of the whole model is computed again, and it would draw other random numbers",
        "checkpoint the layers and not the whole model",
    )


def without_gradient(_: LayerRecomputed) -> Complaint:
    """The complaint about a reentrant checkpoint around a layer."""
    return Complaint(
        "MOE0711",
        "torch.utils.checkpoint(use_reentrant=True) made aux_loss without a gradient",
        "give it `use_reentrant=False`",
    )


DRAWS = Guard(event=ModelRecomputed, look=other_draws, when=lambda model: model.draws, code="MOE0713")
ACCUMULATED = Guard(event=ModelRecomputed, look=after_accumulate, when=lambda model: model.accumulated, code="MOE0713")
REENTRANT = Guard(event=LayerRecomputed, look=without_gradient, when=lambda layer: layer.lost_aux_loss, code="MOE0711")
