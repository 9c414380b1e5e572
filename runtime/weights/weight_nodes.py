"""The autograd nodes between a layer's parameters and its weights (`weights.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moec.runtime.action_log import note_action
from moec.runtime.refused_derivatives import once_differentiable
from moec.runtime.weight_queue import current_queue
from moec.runtime.weights.gathering import owner_of, version_of
from moec.runtime.weights.gradients import Bucket
from moec.runtime.weights.guests import Guests
from moec.runtime.weights.masters import local_part
from moec.runtime.weights.regathering import RegatheredWeights, changed
from moec.runtime.weights.weight_spec import WeightSpec

if TYPE_CHECKING:
    from moec.runtime.weights.weights import Weights


@dataclass(frozen=True, slots=True)
class UnwrappedParameters:
    """The parameters of a forward pass, and their local parts.

    Without a `forward_pass` no gradient is needed. `is_ready`: the graphs use the parameters themselves.
    """

    parameters: list[Tensor]
    local: Sequence[Tensor]
    forward_pass: ForwardPass | None = None
    is_ready: bool = False

    @property
    def has_same_needs(self) -> bool:
        """Whether the parameters that require a gradient are the same ones as at the start of this pass."""
        if self.is_ready or not torch.is_grad_enabled():
            return True
        needed = [parameter.requires_grad for parameter in self.parameters]
        return not any(needed) if self.forward_pass is None else needed == self.forward_pass.needed


class ForwardPass:
    """One forward pass: the layouts of its parameters, and the sums that its backward has started.

    `layouts`: the mesh and placements of each parameter, None for a plain tensor. `sums_at_once`: whether a parameter
    needs the gradient of this pass; if not, and the step has several passes (`in_several`), `collects_for` refers to
    the parameters. `regathered`: the weights that backward gathers again. `versions`: those of the DTensors whose parts
    the graphs use without a copy. Autograd notices changes of a part, but not those of its DTensor. `event`: what the
    log of actions calls its backward pass. `guests`: those whose weights it used, and whose gradients go home. `homes`:
    where experts were then, if they may move.
    """

    __slots__ = (
        "buckets",
        "collects_for",
        "event",
        "guests",
        "homes",
        "layouts",
        "needed",
        "regathered",
        "sums_at_once",
        "versions",
        "weights",
    )

    def __init__(self, weights: Weights, parameters: Sequence[Tensor], *, in_several: bool) -> None:
        self.weights = weights
        self.needed = [parameter.requires_grad for parameter in parameters]
        self.sums_at_once = weights.sums_every_pass
        collects = in_several and not self.sums_at_once
        self.collects_for = [ref(parameter) for parameter in parameters] if collects else []
        # Mesh and placements only: a reference to the parameter would make a cycle with its gradient.
        self.layouts = [(p.device_mesh, p.placements) if isinstance(p, DTensor) else None for p in parameters]
        self.buckets: list[Bucket] = []
        self.event = "backward" if current_queue() is None else "weights"
        self.regathered: RegatheredWeights | None = None
        self.guests: Guests | None = None
        self.homes = None if weights.homes is None else weights.homes.slots
        self.versions = [
            (ref(owner_of(parameter)), version_of(parameter))
            for parameter, spec in zip(parameters, weights.specs, strict=True)
            if isinstance(parameter, DTensor) and spec.zero is None and spec.dtype == parameter.dtype
        ]

    def require_unchanged(self) -> None:
        """Raises `JobError` if a DTensor in `versions` changed since forward, or experts have other homes.

        The weights that autograd saved share the DTensors' memory.
        """
        if self.weights.homes is not None and self.weights.homes.slots is not self.homes:
            raise changed(self.weights.specs[0].site)
        for reference, version in self.versions:
            if (parameter := reference()) is not None and version_of(parameter) != version:
                raise changed(self.weights.specs[0].site)

    def drop_regathered(self) -> None:
        """Frees the weights that backward has gathered again."""
        if self.regathered is not None:
            self.regathered.drop()


class Unwrap(torch.autograd.Function):
    """DTensors to this rank's parts; backward waits for the gradients' sums and wraps them as DTensors."""

    @staticmethod
    def forward(ctx: Any, forward_pass: ForwardPass, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.forward_pass = forward_pass
        ctx.set_materialize_grads(False)
        local = tuple(local_part(parameter) for parameter in parameters)
        ctx.mark_non_differentiable(*(p for p, needed in zip(local, forward_pass.needed, strict=True) if not needed))
        return local

    @staticmethod
    @once_differentiable("the gradient of a parameter that is cast, or summed over ranks,")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        forward_pass: ForwardPass = ctx.forward_pass
        results = list(gradients)
        buckets, forward_pass.buckets = forward_pass.buckets, []
        forward_pass.weights.finish_sums(results, buckets)
        return (None, *map(wrapped, results, forward_pass.weights.specs, forward_pass.layouts))


class Narrow(torch.autograd.Function):
    """This rank's parts to weights in the compute dtype; backward widens gradients and starts their sums."""

    @staticmethod
    def forward(
        ctx: Any, forward_pass: ForwardPass, unwrapped: UnwrappedParameters, *local: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.forward_pass, ctx.device = forward_pass, local[0].device
        ctx.dtypes = [torch.promote_types(part.dtype, torch.float32) for part in local]
        ctx.set_materialize_grads(False)
        weights = tuple(weight.detach() for weight in forward_pass.weights.weights(unwrapped, forward_pass.guests))
        ctx.mark_non_differentiable(*(p for p, needed in zip(weights, forward_pass.needed, strict=True) if not needed))
        return weights

    @staticmethod
    @once_differentiable("the gradient of a parameter that is cast, or summed over ranks,")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        forward_pass: ForwardPass = ctx.forward_pass
        forward_pass.require_unchanged()
        note_action(forward_pass.event, forward_pass.weights.unit)
        forward_pass.drop_regathered()
        wide_gradients = [
            gradient.to(dtype) if gradient is not None and needed else None
            for gradient, dtype, needed in zip(gradients, ctx.dtypes, forward_pass.needed, strict=True)
        ]
        results, forward_pass.buckets = forward_pass.weights.begin_sums(wide_gradients, forward_pass, ctx.device)
        return None, None, *results


def needs_gradient_at_once(parameter: Tensor | None) -> bool:
    """Whether the gradient of each pass goes elsewhere than into one sum of a step: to a hook, or into the graph of a
    tensor that a parametrization (for which `parameter` is None) or `functional_call` has made for this pass."""
    if parameter is None:
        return True
    hooked = bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
    return hooked or (parameter.requires_grad and not isinstance(parameter, torch.nn.Parameter))


def wrapped(gradient: Tensor | None, spec: WeightSpec, layout: tuple[Any, Any] | None) -> Tensor | None:
    """The gradient of this rank's part, scaled, as a DTensor where its parameter is one."""
    if gradient is None:
        return None
    if spec.scale != 1.0:
        gradient = gradient * spec.scale
    return gradient if layout is None else DTensor.from_local(gradient, *layout, run_check=False)


def finish(results: list[Tensor | None], buckets: Sequence[Bucket]) -> None:
    """Waits for the sums and writes them to `results`."""
    for bucket in buckets:
        for member, total in zip(bucket.members, bucket.finish(), strict=True):
            results[member.index] = total
