"""Between a layer's parameters and what it computes with: fp32 masters outside, plain narrow tensors inside.

Forward takes the local part of each parameter (a DTensor where there are several ranks) and narrows it to the dtype in
which the layer computes. Backward widens the gradients to fp32 and sums them over the ranks, as the plan says. Both are
part of autograd's graph, so that `torch.autograd.grad`, exceptions, hooks and `copy.deepcopy` find nothing beside it.

Two autograd nodes do it. Gradients reach `_Narrow` first, which starts their sums; `_Unwrap` waits for these. It was
made before the layers ran, so the engine runs it after the backward of all other layers: sums and backward overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from moec.runtime.errors import JobError
from moec.runtime.gradients import Bucket, Summed, by_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """A parameter as a layer computes with it.

    `name` is relative to the module that owns it, `shape` that of this rank's part, `groups` those over which its
    gradient is summed, `site` what of the model uses it, in words. `scale` multiplies the gradient's sum.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    groups: tuple[str, ...] = ()
    site: str = ""
    scale: float = 1.0


@dataclass(slots=True)
class Microbatches:
    """What the layers of a model share while one step runs over several micro-batches."""

    keep: bool = False
    """Whether narrow copies are kept for the next micro-batch."""
    more: bool = False
    """Whether another micro-batch comes, so that gradients are only collected."""


class Weights:
    """The parameters of one module, to be called once in each of its forward passes."""

    def __init__(self, owner: nn.Module, specs: Sequence[WeightSpec], microbatches: Microbatches) -> None:
        self.specs = tuple(specs)
        self._owner = owner
        self._microbatches = microbatches
        self._paths = [spec.name.rpartition(".")[::2] for spec in specs]
        self._buckets = by_groups(Summed(i, spec.shape, spec.groups) for i, spec in enumerate(specs))
        self._narrow: list[Tensor] | None = None
        self._collected: list[Tensor | None] | None = None
        self._begun: tuple[_Pass | None, Sequence[Tensor]] | None = None

    def needed(self) -> list[bool]:
        """Which of the parameters want a gradient."""
        return [self._parameter(i).requires_grad for i in range(len(self.specs))]

    def begin(self) -> None:
        """Makes the node that waits for the sums, for the next call; before the layers run, so that it comes last."""
        self._begun = self._pass()

    def drop_begun(self) -> None:
        """Drops what `begin` made where no call took it: an exception came between."""
        self._begun = None

    def forget(self) -> None:
        """Drops what one step left behind."""
        self._narrow = self._collected = None

    def __call__(self) -> Sequence[Tensor]:
        """The parameters as plain tensors of the dtype in which the module computes, differentiable."""
        begun, self._begun = self._begun, None
        found, local = begun or self._pass()
        if found is None:
            return local
        result: tuple[Tensor, ...] = _Narrow.apply(found, *local)  # type: ignore[no-untyped-call]
        return result

    def narrow(self, local: Sequence[Tensor]) -> list[Tensor]:
        """The compute copies of this rank's parts: the same memory where the dtype is the same."""
        if self._narrow is not None:
            return self._narrow
        narrow = [part.detach().to(spec.dtype) for part, spec in zip(local, self.specs, strict=True)]
        if self._microbatches.keep:
            self._narrow = narrow
        return narrow

    def _pass(self) -> tuple[_Pass | None, Sequence[Tensor]]:
        """The parameters of a forward pass: to be narrowed, or where nothing is to be done, what the module takes."""
        parameters = [self._parameter(i) for i in range(len(self.specs))]
        if all(map(_as_it_is, parameters, self.specs)):
            return None, parameters
        if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in parameters):
            return None, self.narrow([_local(parameter) for parameter in parameters])
        found = _Pass(self, parameters)
        return found, _Unwrap.apply(found, *parameters)  # type: ignore[no-untyped-call]

    def _parameter(self, index: int) -> Tensor:
        path, name = self._paths[index]
        module = self._owner
        for part in path.split(".") if path else ():
            module = module._modules[part]  # type: ignore[assignment]
        # Not `get_parameter`: a parametrization, or `torch.func.functional_call`, puts something else here.
        parameter: Tensor = getattr(module, name)
        spec = self.specs[index]
        shape = tuple(parameter._local_tensor.shape if isinstance(parameter, DTensor) else parameter.shape)
        if shape != spec.shape:
            raise JobError(
                "MOE0710",
                f"{spec.name} ({spec.site}) was replaced: this rank's part has shape {list(shape)}, "
                f"and the plan wants {list(spec.shape)}",
                "on several ranks parameters are DTensors: `torch.distributed.tensor.distribute_tensor(whole, "
                "old.device_mesh, old.placements)` makes one like the old",
            )
        return parameter

    def begin_sums(
        self, gradients: Sequence[Tensor | None], needed: Sequence[bool], device: torch.device
    ) -> tuple[list[Tensor | None], list[Bucket]]:
        """Starts the sums of a backward pass's gradients; gives where they will be. Nothing while more are to come.

        Every rank starts the same sums: of all parameters that need a gradient, whether or not this rank has one.
        """
        if self._collected is not None:
            gradients = [_added(one, other) for one, other in zip(self._collected, gradients, strict=True)]
            self._collected = None
        if self._microbatches.more:
            self._collected = list(gradients)
            return [None] * len(gradients), []
        results = list(gradients)
        buckets = []
        for groups, summed in self._buckets.items():
            members = [member for member in summed if needed[member.index]]
            if not groups or not members:
                continue
            first = self.specs[members[0].index]
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            wide = torch.promote_types(first.dtype, torch.float32)
            bucket = Bucket(members, f"gradient of {first.name}{more}, {first.site}", wide, device)
            for member, place in zip(members, bucket.begin(gradients), strict=True):
                results[member.index] = place
            buckets.append(bucket)
        return results, buckets


class _Pass:
    """One forward pass: which parameters it met, and the sums that its backward has begun."""

    __slots__ = ("buckets", "needed", "parameters", "weights")

    def __init__(self, weights: Weights, parameters: Sequence[Tensor]) -> None:
        self.weights = weights
        self.needed = tuple(parameter.requires_grad for parameter in parameters)
        # Mesh and placements alone: the parameter itself would make a cycle with its gradient.
        self.parameters = [(p.device_mesh, p.placements) if isinstance(p, DTensor) else None for p in parameters]
        self.buckets: list[Bucket] = []


class _Unwrap(torch.autograd.Function):
    """DTensors to this rank's parts; backward waits for the sums of their gradients and wraps them again."""

    @staticmethod
    def forward(ctx: Any, found: _Pass, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.found = found
        ctx.set_materialize_grads(False)
        local = tuple(_local(parameter).detach() for parameter in parameters)
        ctx.mark_non_differentiable(*(p for p, needed in zip(local, found.needed, strict=True) if not needed))
        return local

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        found: _Pass = ctx.found
        results = list(gradients)
        buckets, found.buckets = found.buckets, []
        for bucket in buckets:
            for member, total in zip(bucket.members, bucket.finish(), strict=True):
                results[member.index] = total
        return (None, *map(_wrapped, results, found.weights.specs, found.parameters))


class _Narrow(torch.autograd.Function):
    """This rank's parts in the dtype in which the layer computes; backward widens gradients and starts their sums."""

    @staticmethod
    def forward(ctx: Any, found: _Pass, *local: Tensor) -> tuple[Tensor, ...]:
        ctx.found, ctx.device = found, local[0].device
        ctx.dtypes = [torch.promote_types(part.dtype, torch.float32) for part in local]
        ctx.set_materialize_grads(False)
        narrow = tuple(part.detach() for part in found.weights.narrow(local))
        ctx.mark_non_differentiable(*(p for p, needed in zip(narrow, found.needed, strict=True) if not needed))
        return narrow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        found: _Pass = ctx.found
        wide = [
            gradient.to(dtype) if gradient is not None and needed else None
            for gradient, dtype, needed in zip(gradients, ctx.dtypes, found.needed, strict=True)
        ]
        results, found.buckets = found.weights.begin_sums(wide, found.needed, ctx.device)
        return None, *results


def _as_it_is(parameter: Tensor, spec: WeightSpec) -> bool:
    """Whether there is nothing to unwrap, narrow or sum."""
    return not isinstance(parameter, DTensor) and (parameter.dtype, spec.groups, spec.scale) == (spec.dtype, (), 1.0)


def _local(parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        local: Tensor = parameter.to_local()
        return local
    return parameter


def _wrapped(gradient: Tensor | None, spec: WeightSpec, mesh: tuple[Any, Any] | None) -> Tensor | None:
    """A gradient of this rank's part as its parameter wants it."""
    if gradient is None:
        return None
    if spec.scale != 1.0:
        gradient = gradient * spec.scale
    return gradient if mesh is None else DTensor.from_local(gradient, *mesh, run_check=False)


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other
