"""A job's handling of losses and gradients that are NaN or infinite: `moec.launch(on_nonfinite=…)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from moec.runtime.errors import JobError, require_one_of
from moec.runtime.guards.every_guard import first_complaint, look_at
from moec.runtime.guards.guard import LossSummed, NormTaken, OptimizerSteps
from moec.runtime.optimizers.clipping import HandedOver
from moec.runtime.optimizers.closures import has_closure
from moec.runtime.ranks.running_job import RunningJob
from moec.runtime.weights.masters import local_part

MODES = ("raise", "skip", "ignore")

SCALER_ATTRIBUTES = "grad_scale", "found_inf"
"""Attributes that torch's `GradScaler` sets on an optimizer, and deletes after a step that raises nothing."""


@dataclass(frozen=True, slots=True)
class GradientStamp:
    """A gradient and the count of its changes: of a DTensor, and of this rank's part."""

    gradient: ReferenceType[Tensor]
    versions: tuple[int, int]

    @classmethod
    def of(cls, gradient: Tensor) -> GradientStamp:
        """The stamp of a gradient's current value."""
        return cls(ref(gradient), _versions(gradient))

    def is_of(self, gradient: Tensor | None) -> bool:
        """Whether this is the same gradient, unchanged."""
        return gradient is not None and self.gradient() is gradient and self.versions == _versions(gradient)


def _versions(gradient: Tensor) -> tuple[int, int]:
    return gradient._version, local_part(gradient)._version


class Finite:
    """Handles steps with a loss or gradients that are not finite; `skipped` counts the skipped steps.

    "raise": `JobError` on every rank. "skip": all gradients of the model become None, so that the optimizer changes
    nothing. "ignore": no check. The loss and the norm of `clip_grad_norm_` are equal on every rank and need no
    collective. An optimizer of the job checks gradients whose norm was not computed, in one small all_reduce.
    """

    def __init__(self, job: RunningJob, mode: str) -> None:
        require_one_of("moec.launch", "on_nonfinite", mode, MODES)
        self._job, self.mode, self.skipped = job, mode, 0
        self._normed: WeakKeyDictionary[nn.Module, dict[nn.Parameter, GradientStamp]] = WeakKeyDictionary()
        """The gradients whose norm was finite."""
        self._skipped_models: WeakSet[nn.Module] = WeakSet()
        """Models whose step was skipped, and whose optimizer has not been called since."""

    @property
    def skips(self) -> bool:
        """Whether training continues after a step that is not finite."""
        return self.mode == "skip"

    def skips_loss(self, model: nn.Module, loss: Tensor) -> bool:
        """Whether to skip the step of this global loss."""
        self._skipped_models.discard(model)
        return self._skips(model, LossSummed(self._job.steps, loss, reads_values=self.mode != "ignore"))

    def skips_norm(self, model: nn.Module, norm: Tensor, gradients: Mapping[str, Tensor]) -> bool:
        """Whether to skip the step of this global norm. `gradients`: this rank's parts, for the error's message."""
        reads_values, site = self.mode != "ignore", "gradient norm"
        return self._skips(model, NormTaken(self._job.steps, norm, gradients, reads_values=reads_values, site=site))

    def _skips(self, model: nn.Module, event: LossSummed | NormTaken) -> bool:
        """Whether a guard complains about `event`: the step is skipped, or in mode "raise" `JobError` is raised."""
        if not self.skips:
            look_at(event, self._job.checks)
            return False
        if first_complaint(event) is None:
            return False
        self._skip(model)
        return True

    def remember(self, model: nn.Module) -> None:
        """Remembers the model's gradients, whose norm is finite: the optimizer need not check them."""
        self._normed[model] = {p: GradientStamp.of(p.grad) for p in model.parameters() if p.grad is not None}

    def _are_remembered(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these parameters' gradients are those of the last `remember`, unchanged."""
        stamps = self._normed.pop(model, None)
        with_gradient = [p for p in parameters if p.grad is not None]
        return stamps is not None and all(p in stamps and stamps[p].is_of(p.grad) for p in with_gradient)

    def guard(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Makes each `step()` check the gradients that `clip_grad_norm_` has not checked, in a collective.

        A `step` with a closure checks none.
        """

        def look(_: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if model in self._skipped_models:  # `_skip` has not dropped gradients of the script's own parameters
                self._skipped_models.discard(model)
                _drop(owned)
                return
            handed_over = any(isinstance(parameter.grad, HandedOver) for parameter in owned)
            if has_closure(arguments, keywords) or handed_over or self._are_remembered(model, owned):
                return
            complaint = first_complaint(OptimizerSteps(self._job.steps, model, owned, reads_values=True))
            counts, refused = (int(complaint is not None),), None if self.skips else complaint
            try:
                (ranks_with_faults,) = self._job.checks.require("optimizer.step", refused, counts=counts)
            except JobError:
                for name in SCALER_ATTRIBUTES:
                    vars(optimizer).pop(name, None)
                raise
            if ranks_with_faults:
                self._skip(model)
                self._skipped_models.discard(model)
                _drop(owned)

        if self.mode != "ignore":
            optimizer.register_step_pre_hook(look)

    def _skip(self, model: nn.Module) -> None:
        self.skipped += 1
        self._skipped_models.add(model)
        _drop(model.parameters())


def _drop(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
