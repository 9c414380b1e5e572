"""The base class of optimizers of whole matrices: fixed parameters, and steps that are collectives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moec.runtime.errors import JobError
from moec.runtime.optimizers.closures import loss_of
from moec.runtime.weights.masters import Master

ATTRIBUTES_TO_COPY = ("_masters", "state_dtype")


class MatrixOptimizer(Optimizer):
    """Updates the parameters of `masters` and no others. `grad_scale`, where set, divides gradients.

    Parameters that require a gradient take part in the collectives of every `step`, which every rank calls; a parameter
    without a gradient is not changed.
    """

    grad_scale: Tensor | None = None

    def __init__(self, masters: Sequence[Master], groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self._masters = {master.parameter: master for master in masters}
        super().__init__(groups, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """The state of `Optimizer` and the attributes that it omits, for `copy.deepcopy`."""
        return {
            **super().__getstate__(),
            **{name: value for name, value in vars(self).items() if name in ATTRIBUTES_TO_COPY},
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `JobError` for parameters without a master: nothing states which matrices they have."""
        super().add_param_group(param_group)
        if not all(parameter in self._masters for parameter in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise JobError(
                "MOE0700",
                "an optimizer of whole matrices got a parameter that the plan does not have",
                "give the parameters of your own modules to an optimizer of torch",
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. A collective: every rank must call it, or none."""
        loss = loss_of(closure)
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """Updates every parameter group."""

    def taking_part(self, parameters: Sequence[nn.Parameter]) -> list[Master]:
        """The masters that take part in the collectives of a step; the same on every rank."""
        return [self._masters[p] for p in parameters if p.requires_grad or p.grad is not None]
