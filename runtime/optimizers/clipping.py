"""Clips gradients inside of the optimizer's update: the optimizer divides them while it reads them.

Between the clipping and `step()` a parameter's `grad` is a placeholder with the gradient and its divisor: `grad = None`
drops both, `step()` uses both, and reading or changing the placeholder is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from moec.runtime.errors import JobError
from moec.runtime.optimizers.closures import has_closure
from moec.runtime.optimizers.elementwise_optimizers import LocalAdamW, NarrowAdamW
from moec.runtime.optimizers.matrix_optimizer import MatrixOptimizer
from moec.runtime.weights.masters import local_part

_ZEROS = frozenset({torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default})


class HandedOver(Tensor):
    """The placeholder of a `gradient` that the optimizer will divide by `scale`."""

    gradient: Tensor
    scale: Tensor
    is_zero: bool

    @staticmethod
    def __new__(cls, gradient: Tensor, scale: Tensor) -> HandedOver:
        placeholder: HandedOver = torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device
        )
        placeholder.gradient, placeholder.scale, placeholder.is_zero = gradient, scale, False
        return placeholder

    def __init__(self, gradient: Tensor, scale: Tensor) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = self.unscaled().clone()
        if not self.is_zero:
            local_part(copied).div_(self.scale)
        return copied

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Allows `zero_`, which `zero_grad(set_to_none=False)` calls; refuses everything else."""
        if func not in _ZEROS:
            raise _refused()
        (argument,) = args
        for tensor in argument if isinstance(argument, list | tuple) else [argument]:
            if isinstance(tensor, HandedOver):
                tensor.is_zero = True
            else:
                tensor.zero_()
        return argument if isinstance(argument, Tensor) else None

    def to_local(self) -> Tensor:
        """Refused, as reading the placeholder of a plain tensor is."""
        raise _refused()

    def scaled(self) -> Tensor:
        """The clipped gradient, in place."""
        gradient = self.unscaled()
        if not self.is_zero:  # the scale of a norm that is NaN would make zeros NaN
            local_part(gradient).div_(self.scale)
        return gradient

    def unscaled(self) -> Tensor:
        """The gradient, not yet divided."""
        if self.is_zero:
            local_part(self.gradient).zero_()
        return self.gradient


def _refused() -> JobError:
    return JobError(
        "MOE0716",
        "job.clip_grad_norm_(…, optimizer=…) has handed this gradient to the optimizer, whose step() comes next",
        "read and change gradients before clipping, or clip without `optimizer=`",
    )


def watch_steps(optimizer: Optimizer) -> bool:
    """Makes the optimizer's steps accept gradients that are handed over. Returns whether they already did."""
    if optimizer in _watched:
        return True
    _watched.add(optimizer)
    optimizer.register_step_pre_hook(_give_scale)
    optimizer.register_step_post_hook(_release)
    return False


FUSED = Adam, AdamW, LocalAdamW, NarrowAdamW


def takes_scale(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the optimizer's next step can divide the gradients of all these parameters itself.

    The fused kernels of Adam and AdamW can, on one device; so can Muon and Adafactor. False in the closure of a running
    step; and in the first call, which begins to watch steps: a step may be running then.
    """
    fused = type(optimizer) in FUSED and all(group["fused"] for group in optimizer.param_groups)
    if not fused and not isinstance(optimizer, MatrixOptimizer):
        return False
    owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    if not owned.issuperset(with_gradient) or len({parameter.device for parameter in with_gradient}) != 1:
        return False
    return watch_steps(optimizer) and not getattr(optimizer, _IN_CLOSURE, False)


def hand_over(parameters: Iterable[nn.Parameter], scale: Tensor) -> None:
    """Makes the next step divide these gradients by `scale`, a 0-d fp32 tensor on their device."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = HandedOver(parameter.grad, scale)


def take_back(parameters: Iterable[nn.Parameter]) -> None:
    """Clips gradients that were handed over for a step that was not called."""
    for parameter in parameters:
        if isinstance(parameter.grad, HandedOver):
            parameter.grad = parameter.grad.scaled()


_watched: WeakSet[Optimizer] = WeakSet()
_HAD_SCALE = "_moec_had_grad_scale"
"""While a step uses our scale: whether the optimizer had an attribute `grad_scale`, which was None, before."""
_IN_CLOSURE = "_moec_in_closure"
"""Whether the running step has a closure; stays True after an exception, until the next step."""


def _give_scale(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Before a step: gives the optimizer its gradients and their scale, or clips them if it cannot use a scale."""
    _release(optimizer)
    closure = has_closure(arguments, keywords)
    setattr(optimizer, _IN_CLOSURE, closure)
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    handed_over = [parameter for parameter in owned if isinstance(parameter.grad, HandedOver)]
    scales = {id(parameter.grad.scale): parameter.grad.scale for parameter in handed_over}
    # A closure computes new gradients, `GradScaler` sets its own scale, and some gradients may not be handed over.
    has_own_scale = getattr(optimizer, "grad_scale", None) is not None
    is_partial = len(handed_over) < sum(parameter.grad is not None for parameter in owned)
    is_zeroed = any(parameter.grad.is_zero for parameter in handed_over)
    if not handed_over or closure or has_own_scale or is_partial or is_zeroed or len(scales) > 1:
        take_back(handed_over)
        return
    for parameter in handed_over:
        parameter.grad = parameter.grad.unscaled()
    (scale,) = scales.values()
    setattr(optimizer, _HAD_SCALE, "grad_scale" in vars(optimizer))
    setattr(optimizer, "grad_scale", scale)  # noqa: B010 - torch declares no such attribute


def _release(optimizer: Optimizer, *_: Any) -> None:
    """Removes the scale after its step; if that step raised, before the next one."""
    setattr(optimizer, _IN_CLOSURE, False)
    if _HAD_SCALE in vars(optimizer):
        had_attribute = vars(optimizer).pop(_HAD_SCALE)
        vars(optimizer).pop("grad_scale", None)  # `GradScaler` deletes its own scale after the step, and needs none
        if had_attribute:
            setattr(optimizer, "grad_scale", None)  # noqa: B010
