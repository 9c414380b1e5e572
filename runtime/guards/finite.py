"""Keeps losses and gradients that are NaN or infinite from the weights: `moec.launch(on_nonfinite=…)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moec.runtime.errors import JobError, one_of
from moec.runtime.optimizers.clipping import HandedOver
from moec.runtime.ranks.checks import Complaint
from moec.runtime.ranks.running_job import RunningJob
from moec.runtime.weights.masters import has_closure, local_part

MODES = ("raise", "skip", "ignore")

HELP = (
    "weights and optimizer states are as before: go on from them with a lower learning rate or with clipped gradients; "
    '`moec.launch(…, on_nonfinite="skip")` leaves such steps out, and "ignore" turns this check off'
)


OF_SCALER = "grad_scale", "found_inf"
"""What torch's `GradScaler` sets on an optimizer, and takes away after a step that raises nothing."""


@dataclass(frozen=True, slots=True)
class GradientStamp:
    """A gradient and the count of its changes: of a DTensor, and of this rank's part."""

    gradient: ReferenceType[Tensor]
    versions: tuple[int, int]

    @classmethod
    def of(cls, gradient: Tensor) -> GradientStamp:
        """The stamp of a gradient as it is now."""
        return cls(ref(gradient), _versions(gradient))

    def is_of(self, gradient: Tensor | None) -> bool:
        """Whether this is the same gradient, unchanged."""
        return gradient is not None and self.gradient() is gradient and self.versions == _versions(gradient)


def _versions(gradient: Tensor) -> tuple[int, int]:
    return gradient._version, local_part(gradient)._version


class Finite:
    """What a job does with a step whose loss or gradients are not finite, and how many it has `skipped`.

    "raise": `JobError` on every rank. "skip": all gradients of the model become None, so that the optimizer changes
    nothing. "ignore": nothing is looked at. The loss and the norm of `clip_grad_norm_` are equal on every rank and need
    no collective. An optimizer of the job looks at gradients that no norm was taken of, in one small all_reduce.
    """

    def __init__(self, job: RunningJob, mode: str) -> None:
        one_of("moec.launch", "on_nonfinite", mode, MODES)
        self._job, self.mode, self.skipped = job, mode, 0
        self._normed: WeakKeyDictionary[nn.Module, dict[nn.Parameter, GradientStamp]] = WeakKeyDictionary()
        """The gradients whose norm was finite."""
        self._left_out: WeakSet[nn.Module] = WeakSet()
        """Models whose step was skipped, and whose optimizer has not been called since."""

    @property
    def skips(self) -> bool:
        """Whether training goes on after such a step."""
        return self.mode == "skip"

    def stops_at_loss(self, model: nn.Module, loss: Tensor) -> bool:
        """Whether to leave out the step of this global loss."""
        self._left_out.discard(model)
        if self.mode == "ignore" or bool(loss.isfinite()):
            return False
        if not self.skips:
            raise JobError("MOE0723", f"{self._step()}the loss is {float(loss)}", HELP)
        self._skip(model)
        return True

    def stops_at_norm(self, model: nn.Module, norm: Tensor, gradients: Mapping[str, Tensor]) -> bool:
        """Whether to leave out the step of this global norm. `gradients`: this rank's parts, to name one of them."""
        if self.mode == "ignore" or bool(norm.isfinite()):
            return False
        if not self.skips:
            self._job.checks.require("gradient norm", self._complaint(gradients))
            raise JobError("MOE0723", f"{self._step()}the gradient norm is {float(norm)}", HELP)
        self._skip(model)
        return True

    def saw(self, model: nn.Module) -> None:
        """Remembers the model's gradients, whose norm is finite: the optimizer need not look at these."""
        self._normed[model] = {p: GradientStamp.of(p.grad) for p in model.parameters() if p.grad is not None}

    def _has_seen(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these parameters' gradients are those of the last `saw`, unchanged."""
        stamps = self._normed.pop(model, None)
        graded = [p for p in parameters if p.grad is not None]
        return stamps is not None and all(p in stamps and stamps[p].is_of(p.grad) for p in graded)

    def guard(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Makes each `step()` look at gradients that `clip_grad_norm_` has not seen; one with a closure looks at none.

        Then `step()` is a collective.
        """

        def look(_: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if model in self._left_out:  # also parameters of the script's own, which `_skip` did not know
                self._left_out.discard(model)
                _drop(owned)
                return
            handed_over = any(isinstance(parameter.grad, HandedOver) for parameter in owned)
            if has_closure(arguments, named) or handed_over or self._has_seen(model, owned):
                return
            complaint = None if _have_finite_norms(owned) else self._complaint(_gradients(owned, model))
            counts, refused = (int(complaint is not None),), None if self.skips else complaint
            try:
                (wrong,) = self._job.checks.require("optimizer.step", refused, counts=counts)
            except JobError:
                for name in OF_SCALER:
                    vars(optimizer).pop(name, None)
                raise
            if wrong:
                self._skip(model)
                self._left_out.discard(model)
                _drop(owned)

        if self.mode != "ignore":
            optimizer.register_step_pre_hook(look)

    def _complaint(self, gradients: Mapping[str, Tensor]) -> Complaint | None:
        """Names this rank's first gradient that is not finite."""
        wrong = next((name for name, gradient in gradients.items() if not gradient.isfinite().all()), None)
        words = f"{self._step()}the gradient of {wrong} is NaN or infinite"
        return None if wrong is None else Complaint("MOE0723", words, HELP)

    def _skip(self, model: nn.Module) -> None:
        self.skipped += 1
        self._left_out.add(model)
        _drop(model.parameters())

    def _step(self) -> str:
        return f"step {self._job.steps}: " if self._job.steps else ""


def _drop(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _gradients(parameters: Sequence[nn.Parameter], model: nn.Module) -> dict[str, Tensor]:
    """This rank's parts of the gradients, by the parameters' names in `model`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names.get(parameter, f"parameter {index} of the optimizer"): local_part(parameter.grad)
        for index, parameter in enumerate(parameters)
        if parameter.grad is not None
    }


def _have_finite_norms(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether this rank's gradients have finite norms: then all elements are. Waits for the device once."""
    parts = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not parts:
        return True
    # The Euclidean norm: on CPU the maximum norm takes forty times as long.
    norms = torch._foreach_norm(parts, 2)
    return bool(torch.stack([each.to(parts[0].device, torch.float32) for each in norms]).isfinite().all())
