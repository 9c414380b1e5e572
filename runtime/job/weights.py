"""Converts the parameters of a module to its graphs' inputs: fp32 masters to plain tensors of the compute dtype.

Forward narrows the local part of each parameter (a DTensor if there are several ranks) to the compute dtype. Backward
widens the gradients to fp32 and sums them over the ranks. Both are autograd nodes, not hooks: `torch.autograd.grad`,
exceptions and `copy.deepcopy` need no special case.

Backward runs `_Narrow` first, which starts the sums, and later `_Unwrap`, which waits for them. `_Unwrap` is made
before the layers run, so the engine runs it after the backward of all layers: sums and backward overlap.
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
from moec.runtime.job.gradients import Bucket, Summed, by_groups
from moec.runtime.job.names import read_parameter, registered_parameter, split_name


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """A parameter as a layer computes with it.

    `name` is relative to its module, `shape` is that of this rank's part, `groups` sum its gradient, `site` is the part
    of the model that uses it. `scale` multiplies the gradient's sum. `master` is the dtype that the parameter must
    have; None if a host may convert it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    groups: tuple[str, ...] = ()
    site: str = ""
    scale: float = 1.0
    master: torch.dtype | None = None


class Microbatches:
    """State of one step over several micro-batches, common to all layers of a model."""

    def __init__(self) -> None:
        self.more = False
        """Whether another micro-batch follows: then gradients are collected and not summed."""
        self.pending: dict[Weights, None] = {}
        """The layers with collected gradients, in the order of backward."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Microbatches:
        return Microbatches()  # a copy of a model belongs to no open step

    def finish(self) -> None:
        """Sums the remaining collected gradients: of layers that the last backward skipped, or frozen parameters."""
        begun = [(weights, *weights.begin_collected()) for weights in self.pending if weights.has_collected]
        for weights, results, buckets in begun:
            weights.add_to_parameters(results, buckets)

    def drop(self) -> None:
        """Drops the collected gradients of a step."""
        self.more = False
        for weights in self.pending:
            weights.forget()
        self.pending.clear()


class Weights:
    """The parameters of one module. A call, once per forward pass, returns its graphs' inputs."""

    def __init__(self, owner: nn.Module, specs: Sequence[WeightSpec], microbatches: Microbatches) -> None:
        self.specs = tuple(specs)
        self._owner = owner
        self._microbatches = microbatches
        self._paths = [split_name(spec.name) for spec in specs]
        self._buckets = by_groups(Summed(i, spec.shape, spec.groups) for i, spec in enumerate(specs))
        self._collected: _Collected | None = None
        self._begun: tuple[list[Tensor], _Pass | None, Sequence[Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which belong to no open step."""
        return self.__dict__ | {"_collected": None, "_begun": None}

    def needed(self) -> list[bool]:
        """For each parameter, whether it requires a gradient."""
        return [parameter.requires_grad for parameter in self._parameters()]

    def begin(self) -> None:
        """Makes the `_Unwrap` node of the next call. Called before the layers run, so that its backward runs last."""
        parameters = self._parameters()
        self._begun = parameters, *self._pass(parameters)

    def drop_begun(self) -> None:
        """Drops the node of `begin`, if an exception prevented the call that uses it."""
        self._begun = None

    def forget(self) -> None:
        """Drops the collected gradients of a step."""
        self._collected = None

    def __call__(self) -> Sequence[Tensor]:
        """The parameters as plain, differentiable tensors of the compute dtype."""
        begun, self._begun = self._begun, None
        # A hook may have replaced a parameter since `begin`.
        if begun is not None and all(map(self._is_still, self._paths, begun[0])):
            _, one_pass, local = begun
        else:
            one_pass, local = self._pass(self._parameters())
        if one_pass is None:
            return local
        result: tuple[Tensor, ...] = _Narrow.apply(one_pass, *local)  # type: ignore[no-untyped-call]
        return result

    def narrow(self, local: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts in the compute dtype; no copy where the dtype is the same."""
        return [part.detach().to(spec.dtype) for part, spec in zip(local, self.specs, strict=True)]

    def _is_still(self, path: tuple[Sequence[str], str], parameter: Tensor) -> bool:
        registered = registered_parameter(self._owner, *path)
        return registered is parameter or registered is None  # None if a parametrization computes it

    def _parameters(self) -> list[Tensor]:
        return [self._parameter(i) for i in range(len(self.specs))]

    def _pass(self, parameters: Sequence[Tensor]) -> tuple[_Pass | None, Sequence[Tensor]]:
        """The parameters of a forward pass, to be narrowed; without a `_Pass` they are ready for the graphs."""
        if all(map(_is_ready, parameters, self.specs)):
            return None, parameters
        if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in parameters):
            return None, self.narrow([_local(parameter) for parameter in parameters])
        one_pass = _Pass(self, parameters)
        return one_pass, _Unwrap.apply(one_pass, *parameters)  # type: ignore[no-untyped-call]

    def _parameter(self, index: int) -> Tensor:
        parameter, spec = read_parameter(self._owner, *self._paths[index]), self.specs[index]
        shape = parameter._local_tensor.shape if isinstance(parameter, DTensor) else parameter.shape
        if shape != spec.shape:
            raise JobError(
                "MOE0710",
                f"{spec.name} ({spec.site}) was replaced: this rank's part has shape {list(shape)}, "
                f"but the plan wants {list(spec.shape)}",
                "on several ranks parameters are DTensors: use `torch.distributed.tensor.distribute_tensor(whole, "
                "old.device_mesh, old.placements)`",
            )
        # A parametrization or `functional_call` may compute with another dtype: then the parameter is elsewhere.
        if spec.master is not None and parameter.dtype != spec.master and isinstance(parameter, nn.Parameter):
            raise JobError(
                "MOE0710",
                f"{spec.name} ({spec.site}) was converted to {parameter.dtype}, but an optimizer updates masters in "
                f"{spec.master}",
                f"layers compute in the file's `dtype`; leave the parameters {str(spec.master).removeprefix('torch.')}",
            )
        return parameter

    def begin_sums(
        self, gradients: Sequence[Tensor | None], one_pass: _Pass, device: torch.device
    ) -> tuple[list[Tensor | None], list[Bucket]]:
        """Starts the sums of a backward pass's gradients. Returns the tensors that will hold them, and the buckets.

        Before the last micro-batch it only collects the gradients, unless a parameter's hook needs them.
        """
        collected, needed = self._collected, one_pass.needed
        if self._microbatches.more and not one_pass.hooked:
            self._collect(gradients, needed, device)
            return [None] * len(gradients), []
        if collected is not None and collected.needed == needed:
            gradients, self._collected = collected.plus(gradients), None
        return self._start(gradients, needed, device)

    def _collect(self, gradients: Sequence[Tensor | None], needed: Sequence[bool], device: torch.device) -> None:
        if self._collected is None:
            self._collected = _Collected(list(gradients), tuple(needed), device)
        else:
            both = tuple(one or other for one, other in zip(self._collected.needed, needed, strict=True))
            self._collected = _Collected(self._collected.plus(gradients), both, device)
        self._microbatches.pending[self] = None

    @property
    def has_collected(self) -> bool:
        """Whether gradients of earlier micro-batches await their sum."""
        return self._collected is not None

    def begin_collected(self) -> tuple[list[Tensor | None], list[Bucket]]:
        """Starts the sums of the collected gradients, outside of any backward pass."""
        assert self._collected is not None
        collected, self._collected = self._collected, None
        return self._start(collected.gradients, collected.needed, collected.device)

    @torch.no_grad()
    def add_to_parameters(self, results: list[Tensor | None], buckets: Sequence[Bucket]) -> None:
        """Waits for the sums of `begin_collected` and adds them to the parameters' gradients."""
        _finish(results, buckets)
        for index, gradient in enumerate(results):
            with torch.enable_grad():
                parameter = self._parameter(index)
            layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            added = _wrapped(gradient, self.specs[index], layout)
            if added is None:
                continue
            added = added.to(parameter.dtype)
            if parameter.grad_fn is not None:  # a parametrization computes it
                torch.autograd.backward(parameter, added)
            else:
                parameter.grad = added if parameter.grad is None else parameter.grad + added

    def _start(
        self, gradients: Sequence[Tensor | None], needed: Sequence[bool], device: torch.device
    ) -> tuple[list[Tensor | None], list[Bucket]]:
        """Starts the sums of all parameters that need a gradient, also without one on this rank: ranks must match."""
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


@dataclass(frozen=True, slots=True)
class _Collected:
    """Summed gradients of earlier micro-batches, and which parameters needed one in any of them."""

    gradients: list[Tensor | None]
    needed: tuple[bool, ...]
    device: torch.device

    def plus(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds another micro-batch's gradients."""
        return [_added(one, other) for one, other in zip(self.gradients, gradients, strict=True)]


class _Pass:
    """One forward pass: its parameters, and the sums that its backward has started.

    `hooked`: whether a parameter has hooks, which need its gradient.
    """

    __slots__ = ("buckets", "hooked", "needed", "parameters", "weights")

    def __init__(self, weights: Weights, parameters: Sequence[Tensor]) -> None:
        self.weights = weights
        self.needed = tuple(parameter.requires_grad for parameter in parameters)
        self.hooked = any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)
        # Mesh and placements only: a reference to the parameter would make a cycle with its gradient.
        self.parameters = [(p.device_mesh, p.placements) if isinstance(p, DTensor) else None for p in parameters]
        self.buckets: list[Bucket] = []


class _Unwrap(torch.autograd.Function):
    """DTensors to this rank's parts; backward waits for the gradients' sums and wraps them as DTensors."""

    @staticmethod
    def forward(ctx: Any, one_pass: _Pass, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.one_pass = one_pass
        ctx.set_materialize_grads(False)
        local = tuple(_local(parameter).detach() for parameter in parameters)
        ctx.mark_non_differentiable(*(p for p, needed in zip(local, one_pass.needed, strict=True) if not needed))
        return local

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        one_pass: _Pass = ctx.one_pass
        results = list(gradients)
        buckets, one_pass.buckets = one_pass.buckets, []
        _finish(results, buckets)
        return (None, *map(_wrapped, results, one_pass.weights.specs, one_pass.parameters))


class _Narrow(torch.autograd.Function):
    """This rank's parts to the compute dtype; backward widens gradients and starts their sums."""

    @staticmethod
    def forward(ctx: Any, one_pass: _Pass, *local: Tensor) -> tuple[Tensor, ...]:
        ctx.one_pass, ctx.device = one_pass, local[0].device
        ctx.dtypes = [torch.promote_types(part.dtype, torch.float32) for part in local]
        ctx.set_materialize_grads(False)
        narrow = tuple(part.detach() for part in one_pass.weights.narrow(local))
        ctx.mark_non_differentiable(*(p for p, needed in zip(narrow, one_pass.needed, strict=True) if not needed))
        return narrow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        one_pass: _Pass = ctx.one_pass
        wide = [
            gradient.to(dtype) if gradient is not None and needed else None
            for gradient, dtype, needed in zip(gradients, ctx.dtypes, one_pass.needed, strict=True)
        ]
        results, one_pass.buckets = one_pass.weights.begin_sums(wide, one_pass, ctx.device)
        return None, *results


def _is_ready(parameter: Tensor, spec: WeightSpec) -> bool:
    """Whether the parameter needs no unwrapping, narrowing or sum."""
    return not isinstance(parameter, DTensor) and (parameter.dtype, spec.groups, spec.scale) == (spec.dtype, (), 1.0)


def _local(parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        local: Tensor = parameter.to_local()
        return local
    return parameter


def _wrapped(gradient: Tensor | None, spec: WeightSpec, mesh: tuple[Any, Any] | None) -> Tensor | None:
    """The gradient of this rank's part, scaled, as a DTensor where its parameter is one."""
    if gradient is None:
        return None
    if spec.scale != 1.0:
        gradient = gradient * spec.scale
    return gradient if mesh is None else DTensor.from_local(gradient, *mesh, run_check=False)


def _finish(results: list[Tensor | None], buckets: Sequence[Bucket]) -> None:
    """Waits for the sums and writes them to `results`."""
    for bucket in buckets:
        for member, total in zip(bucket.members, bucket.finish(), strict=True):
            results[member.index] = total


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other
