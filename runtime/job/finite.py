"""What a job does with losses and gradients that are NaN or infinite: `moec.launch(on_nonfinite=…)`."""

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
from moec.runtime.ranks.running_job import RunningJob
from moec.runtime.weights.masters import has_closure, local_part

MODES = ("raise", "skip", "ignore")

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
        require_one_of("moec.launch", "on_nonfinite", mode, MODES)
        self._job, self.mode, self.skipped = job, mode, 0
        self._normed: WeakKeyDictionary[nn.Module, dict[nn.Parameter, GradientStamp]] = WeakKeyDictionary()
        """The gradients whose norm was finite."""
        self._left_out: WeakSet[nn.Module] = WeakSet()
        """Models whose step was skipped, and whose optimizer has not been called since."""

    @property
    def skips(self) -> bool:
        """Whether training goes on after such a step."""
        return self.mode == "skip"

    def leaves_out(self, model: nn.Module, loss: Tensor) -> bool:
        """Whether to leave out the step of this global loss."""
        self._left_out.discard(model)
        return self._leaves_out(model, LossSummed(self._job.steps, loss, look=self.mode != "ignore"))

    def leaves_out_norm(self, model: nn.Module, norm: Tensor, gradients: Mapping[str, Tensor]) -> bool:
        """Whether to leave out the step of this global norm. `gradients`: this rank's parts, to name one of them."""
        look, site = self.mode != "ignore", "gradient norm"
        return self._leaves_out(model, NormTaken(self._job.steps, norm, gradients, look=look, site=site))

    def _leaves_out(self, model: nn.Module, event: LossSummed | NormTaken) -> bool:
        """Whether a guard complains about a step that is to be skipped. Raises `JobError` for others."""
        if not self.skips:
            look_at(event, self._job.checks)
            return False
        if first_complaint(event) is None:
            return False
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
            complaint = first_complaint(OptimizerSteps(self._job.steps, model, owned, look=True))
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

    def _skip(self, model: nn.Module) -> None:
        self.skipped += 1
        self._left_out.add(model)
        _drop(model.parameters())


def _drop(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
