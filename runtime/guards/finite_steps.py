"""Finds losses, gradients and their norms that are NaN or infinite, before an optimizer reads them.

What a job does then, `moec.launch(on_nonfinite=…)` says (`runtime/job/finite.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from moec.runtime.guards.guard import Guard, LossSummed, NormTaken, OptimizerSteps
from moec.runtime.ranks.checks import Complaint
from moec.runtime.weights.masters import local_part

HELP = (
    "weights and optimizer states are as before: go on from them with a lower learning rate or with clipped gradients; "
    '`moec.launch(…, on_nonfinite="skip")` leaves such steps out, and "ignore" turns this check off'
)


def bad_loss(summed: LossSummed) -> Complaint | None:
    """The complaint about the loss, which is equal on every rank."""
    return None if bool(summed.loss.isfinite()) else _complaint(summed.steps, f"the loss is {float(summed.loss)}")


def bad_norm(taken: NormTaken) -> Complaint:
    """The complaint about the norm, which is equal on every rank."""
    return _complaint(taken.steps, f"the gradient norm is {float(taken.norm)}")


def bad_gradient(steps: int, gradients: Mapping[str, Tensor]) -> Complaint | None:
    """Names this rank's first gradient that is not finite."""
    name = next((name for name, gradient in gradients.items() if not gradient.isfinite().all()), None)
    return None if name is None else _complaint(steps, f"the gradient of {name} is NaN or infinite")


def bad_gradient_of_optimizer(event: OptimizerSteps) -> Complaint | None:
    """Names this rank's first gradient that is not finite, and that no norm was taken of."""
    if _have_finite_norms(event.parameters):
        return None
    names = {parameter: name for name, parameter in event.model.named_parameters()}
    gradients = {
        names.get(parameter, f"parameter {index} of the optimizer"): local_part(parameter.grad)
        for index, parameter in enumerate(event.parameters)
        if parameter.grad is not None
    }
    return bad_gradient(event.steps, gradients)


def _complaint(steps: int, message: str) -> Complaint:
    return Complaint("MOE0723", f"step {steps}: {message}" if steps else message, HELP)


def _have_finite_norms(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether this rank's gradients have finite norms: then all elements are. Waits for the device once."""
    parts = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not parts:
        return True
    # The Euclidean norm: on CPU the maximum norm takes forty times as long.
    norms = torch._foreach_norm(parts, 2)
    return bool(torch.stack([norm.to(parts[0].device, torch.float32) for norm in norms]).isfinite().all())


LOSS = Guard(event=LossSummed, look=bad_loss, code="MOE0723", waits=True)
GRADIENT = Guard(
    event=NormTaken, look=lambda taken: bad_gradient(taken.steps, taken.gradients),
    when=lambda taken: not taken.norm.isfinite(), code="MOE0723", agreed=True, waits=True,
)  # fmt: skip
NORM = Guard(event=NormTaken, look=bad_norm, when=lambda taken: not taken.norm.isfinite(), code="MOE0723", waits=True)
GRADIENTS = Guard(event=OptimizerSteps, look=bad_gradient_of_optimizer, code="MOE0723", agreed=True, waits=True)
