"""How the ranks agree on a forward pass before any of them computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moec.runtime.errors import JobError
from moec.runtime.guards.every_guard import first_complaint
from moec.runtime.guards.guard import StatesRead
from moec.runtime.inputs.batches import device_of
from moec.runtime.inputs.extra_inputs import ExtraInputs
from moec.runtime.inputs.forward_checks import HOOKS, Claims, batch_complaint, same_inputs, same_mode
from moec.runtime.inputs.settings import same_on_ranks
from moec.runtime.model.step_counts import is_step_pass
from moec.runtime.ranks.checks import Complaint, MustMatch, SharedInputs
from moec.runtime.refused_derivatives import in_vmap

if TYPE_CHECKING:
    from moec.runtime.model.module import PlanModule


def require_batch(model: PlanModule, tokens: Tensor, labels: Tensor | None, extra: ExtraInputs) -> bool:
    """Raises `JobError` for an invalid batch; returns whether this pass checks tensors' values."""
    agreed, model._agreed_pass = model._agreed_pass, None
    if agreed is not None and agreed[0] is tokens:
        return agreed[1]
    checks = model._home.checks
    kind = ("forward", model.training, labels is not None)
    reads_values = not in_vmap() and checks.reads_values(model.seen, kind, device_of(tokens))
    complaint, matching = claims(model, tokens, labels, extra, reads_values=reads_values)
    # The labels that `job.accumulate` counts: those of `StepCounts.add`.
    counts = model._counts.labels is not None and labels is not None and is_step_pass(model.training)
    num_labels = model.limits.labels_of(tokens) if counts and complaint is None else 0
    inputs = SharedInputs((tokens, labels, *extra.by_name().values()), reads_values)
    (total,) = checks.require("start of a forward pass", complaint, *matching, inputs=inputs, counts=(num_labels,))
    model._counts.global_num_labels += total
    return reads_values


def claims(
    model: PlanModule, tokens: Tensor, labels: Tensor | None, extra: ExtraInputs, *, reads_values: bool
) -> Claims:
    """The first error of this rank's batch or parameters, and the values that must match on all ranks.

    Without `reads_values` it reads no tensor's values.
    """
    words = _device_complaint(model, tokens) or model.limits.complaint(tokens, labels, reads_values=reads_values)
    complaint = batch_complaint(words) if words else model.takes.complaint(extra, tokens, reads_values=reads_values)
    states_read = StatesRead(lambda: model._updates.states(model.layers), reads_values=reads_values)
    complaint = complaint or first_complaint(states_read)
    needed, gathered = list[bool](), list[bool]()
    try:
        if model._home.checks.compares:
            needed = [requires_grad for weights in model.all_weights() for requires_grad in weights.needed()]
            for weights in model.all_weights(wrapped=True):
                gathered += weights.has_step_weights, model._open_step.has_several_passes and weights.sums_every_pass
    except JobError as error:
        complaint = complaint or Complaint.of(error)
    one_shape = model._places_by_shape or (model.draws and model.training)
    shape = tuple(tokens.shape) if one_shape and complaint is None else (0, 0)
    modes = *same_inputs(labels, extra), *same_mode(model.training, needed, gathered)
    settings = same_on_ranks(model.settings if model.draws else {})
    return Claims(complaint, (MustMatch("MOE0702", model._one_shape, shape), *modes, settings))


def _device_complaint(model: PlanModule, tokens: object) -> str | None:
    """Describes a batch on another device than the model's, or None. Checked first: `meta` has no values to read."""
    device = next(model.parameters()).device
    if not isinstance(tokens, Tensor) or tokens.device.type == device.type:
        return None
    return f"tokens are on {tokens.device}, and the model on {device}: `tokens.to({str(device)!r})`"


def hooks_of_parameters(model: PlanModule) -> MustMatch:
    """The layers that sum gradients in every micro-batch, for hooks or parametrizations: the same on every rank."""
    hooked = tuple(weights.sums_every_pass for weights in model.all_weights(wrapped=True))
    return MustMatch("MOE0713", HOOKS, (sum(hooked), hash(hooked)), in_stage=True)
