"""Converts the parameters of a module to its graphs' inputs: fp32 masters to plain tensors of the compute dtype.

Forward narrows the local part of each parameter (a DTensor if there are several ranks) to the compute dtype, and
gathers what ZeRO cuts. Backward widens the gradients to fp32 and sums them over the ranks. Both are autograd nodes, not
hooks: `torch.autograd.grad`, exceptions and `copy.deepcopy` need no special case.

Backward runs `Narrow` first, which starts the sums, and later `Unwrap`, which waits for them. `Unwrap` is made
before the layers run, so the engine runs it after the backward of all layers: sums and backward overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moec.runtime.action_log import note_action
from moec.runtime.refused_derivatives import beyond_backward
from moec.runtime.weight_queue import current_queue
from moec.runtime.weights.backward_pass import in_backward
from moec.runtime.weights.gathering import Gathering, Snapshot, StepWeights
from moec.runtime.weights.gradients import Bucket, SummedGradient, accumulate, by_groups
from moec.runtime.weights.guests import Guests
from moec.runtime.weights.homes import ExpertHomes
from moec.runtime.weights.masters import local_part
from moec.runtime.weights.names import read_parameter, registered_parameter, requires_grad, split_name
from moec.runtime.weights.open_step import CollectedGradients, OpenStep
from moec.runtime.weights.regathering import Handles, RegatheredWeights
from moec.runtime.weights.usable import require_no_derivative, require_usable
from moec.runtime.weights.weight_nodes import (
    ForwardPass,
    Narrow,
    Unwrap,
    UnwrappedParameters,
    finish,
    needs_gradient_at_once,
    wrapped,
)
from moec.runtime.weights.weight_spec import WeightSpec


class Weights:
    """The parameters of one module. A call, once per forward pass, returns its graphs' inputs."""

    def __init__(self, owner: nn.Module, unit: str, specs: Sequence[WeightSpec], open_step: OpenStep) -> None:
        self.unit = unit
        """The name of these parameters in a schedule (`moec.passes.place.schedule.Unit`)."""
        self.specs = tuple(specs)
        # Weak: autograd's nodes refer to this object, and the layer to `aux_loss`: a cycle that Python cannot collect.
        self._owner = ref(owner)
        self._open_step = open_step
        self.group_owner: object = None
        """The owner of the process groups: groups stay open while a backward pass still refers to these weights."""
        self._paths = [split_name(spec.name) for spec in specs]
        self._sum_groups = by_groups(SummedGradient(i, s.shape, s.groups, s.zero) for i, s in enumerate(specs))
        self.gathers = any(spec.zero is not None for spec in specs)
        """Whether ZeRO cuts one of the parameters."""
        self._per_use = [i for i, spec in enumerate(specs) if spec.zero is not None and spec.zero.per_use]
        self.gathers_per_use = bool(self._per_use)
        """Whether every use gathers the weights again (ZeRO 3)."""
        self._collected: CollectedGradients | None = None
        self._unwrapped: UnwrappedParameters | None = None
        self._prefetched: Gathering | None = None
        self._step_weights: StepWeights | None = None
        self.homes: ExpertHomes | None = None  # if experts may move

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        """The weights of a copied module, which belongs to no open step."""
        copied = memo[id(self)] = Weights.__new__(Weights)
        copied.__dict__ |= self.__dict__
        copied._collected = copied._unwrapped = copied._prefetched = copied._step_weights = None
        copied._owner = ref(deepcopy(self._module(), memo))
        copied._open_step = deepcopy(self._open_step, memo)
        if self.homes is not None:
            self.homes.share(copied, self, memo)
        return copied

    def _module(self) -> nn.Module:
        module = self._owner()
        assert module is not None, "no pass runs without its module"
        return module

    @property
    def sums_every_pass(self) -> bool:
        """Whether every backward pass sums all gradients of the layer: a parameter has hooks, or is computed anew."""
        return any(map(needs_gradient_at_once, self.registered().values()))

    def registered(self) -> dict[str, Tensor | None]:
        """The registered parameters by the names of `specs`; None for one that a parametrization computes."""
        return {s.name: registered_parameter(self._module(), *p) for s, p in zip(self.specs, self._paths, strict=True)}

    def needed(self) -> list[bool]:
        """For each parameter, whether it requires a gradient."""
        return [
            requires_grad(self._module(), *self._paths[i]) if p is None else self._parameter(i).requires_grad
            for i, p in enumerate(self.registered().values())
        ]

    def rounded(self, dtype: torch.dtype) -> str:
        """The first parameter that the host narrowed though the file keeps it wider than `dtype`; empty if none."""
        for parameter, spec in zip(self._parameters(), self.specs, strict=True):
            if parameter.dtype.itemsize < spec.dtype.itemsize > dtype.itemsize:
                return spec.name
        return ""

    @property
    def has_step_weights(self) -> bool:
        """Whether the next forward pass uses weights that an earlier one has cast and gathered."""
        return self._step_weights is not None and self._step_weights.parameters.is_of(self._parameters())

    def begin(self) -> None:
        """Makes the `Unwrap` node of the next call. Called before the layers run, so that its backward runs last."""
        self._unwrapped = self._unwrap(self._parameters())

    @torch.no_grad()
    def prefetch(self, guests: Guests | None = None) -> None:
        """Starts the gather for the next call. A collective of all ranks, if ZeRO cuts one of the parameters."""
        if self.gathers and self._prefetched is None:
            parameters = self._unwrapped.parameters if self._unwrapped is not None else self._parameters()
            if not self._has_step_weights_of(parameters, guests):
                self._prefetched = self._gathering(list(map(local_part, parameters)), parameters, guests)

    def _has_step_weights_of(self, parameters: Sequence[Tensor], guests: Guests | None) -> bool:
        step = self._step_weights
        return step is not None and step.guests is guests and step.parameters.is_of(parameters)

    def drop_prepared(self) -> None:
        """Drops the node of `begin` and the prefetched gather, if an exception prevented the call that uses them."""
        self._unwrapped = self._prefetched = None

    def drop_step_weights(self) -> None:
        """Drops the step's weights, at its end."""
        self._step_weights = None

    def drop_collected(self) -> None:
        """Drops the collected gradients of a step."""
        self._collected = None

    def __call__(self, handles: Handles | None = None, guests: Guests | None = None) -> Sequence[Tensor]:
        """The parameters as plain, differentiable tensors of the compute dtype. With `guests` their weights stand
        behind those of this rank's experts.

        Adds to `handles` the weights that autograd must not save, for graphs inside `handles.saved_as_handles()`.
        """
        unwrapped, self._unwrapped = self._unwrapped, None
        # A hook may have replaced a parameter since `begin`, or changed its `requires_grad`.
        if unwrapped is None or not (
            unwrapped.has_same_needs and all(map(self._is_still, self._paths, unwrapped.parameters))
        ):
            unwrapped = self._unwrap(self._parameters())
        queue, forward_pass = current_queue(), unwrapped.forward_pass
        if unwrapped.is_ready:
            return unwrapped.local if queue is None else queue.split(self.unit, unwrapped.local)
        if forward_pass is None:
            weights: Sequence[Tensor] = self.weights(unwrapped, guests)
        else:
            forward_pass.guests = guests
            weights = Narrow.apply(forward_pass, unwrapped, *unwrapped.local)  # type: ignore[no-untyped-call]
        if self._per_use and handles is not None and torch.is_grad_enabled():
            regathered = self._regathered_later(unwrapped, guests)
            handles.add(regathered, weights, self._per_use)
            if forward_pass is not None:
                forward_pass.regathered = regathered
        if queue is not None and forward_pass is not None:
            weights = queue.split(self.unit, weights, forward_pass.drop_regathered)
        return weights

    def weights(self, unwrapped: UnwrappedParameters, guests: Guests | None) -> list[Tensor]:
        """The detached weights in the compute dtype: those of the step, or cast now, and gathered now or before."""
        parameters, step = unwrapped.parameters, self._step_weights
        if step is not None and self._has_step_weights_of(parameters, guests):
            return step.weights
        gathering, self._prefetched = self._prefetched, None
        gathers = self.gathers or guests is not None
        is_ready = gathering is not None and gathering.guests is guests and gathering.parameters.is_of(parameters)
        if gathers and not is_ready:
            gathering = self._gathering(unwrapped.local, parameters, guests)
        weights = self._cast(unwrapped.local) if gathering is None else gathering.finish()
        if self._open_step.keeps(gathers=gathers) and not self._per_use:
            kept = Snapshot(parameters) if gathering is None else gathering.parameters
            self._step_weights = StepWeights(kept, weights, guests)
        return weights

    def _cast(self, local: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts in the compute dtype; no copy where the dtype is the same."""
        return [part.detach().to(spec.dtype) for part, spec in zip(local, self.specs, strict=True)]

    @torch.no_grad()
    def _gathering(self, local: Sequence[Tensor], parameters: Sequence[Tensor], guests: Guests | None) -> Gathering:
        if self.gathers:
            note_action("gather", self.unit)
        return Gathering(self.specs, self._cast(local), Snapshot(parameters), guests)

    def _regathered_later(self, unwrapped: UnwrappedParameters, guests: Guests | None) -> RegatheredWeights:
        """The weights that backward gathers again for this use."""
        local = list(map(local_part, unwrapped.parameters))
        # A recomputed pass runs inside backward: the use before it is not the one that backward needs next.
        previous = None if in_backward() else self._open_step.last_use
        again = None if guests is None or not set(guests.indices) & set(self._per_use) else guests
        begin, site = partial(self._gathering, local, (), again), self.specs[0].site
        regathered = RegatheredWeights(begin, unwrapped.parameters, site, previous)
        if not in_backward():
            self._open_step.last_use = regathered
        return regathered

    def _is_still(self, path: tuple[Sequence[str], str], parameter: Tensor) -> bool:
        return (p := registered_parameter(self._module(), *path)) is parameter or p is None  # None: parametrized

    def _parameters(self) -> list[Tensor]:
        return [self._parameter(i) for i in range(len(self.specs))]

    def _unwrap(self, parameters: list[Tensor]) -> UnwrappedParameters:
        """The parameters of a forward pass, to be narrowed."""
        if all(map(_is_ready, parameters, self.specs)):
            return UnwrappedParameters(parameters, parameters, is_ready=True)
        if beyond_backward():
            require_no_derivative(parameters, self.specs)
        if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in parameters):
            return UnwrappedParameters(parameters, [local_part(parameter) for parameter in parameters])
        forward_pass = ForwardPass(self, parameters, in_several=self._open_step.has_several_passes)
        return UnwrappedParameters(parameters, Unwrap.apply(forward_pass, *parameters), forward_pass)  # type: ignore[no-untyped-call]

    def _parameter(self, index: int) -> Tensor:
        parameter = read_parameter(self._module(), *self._paths[index])
        require_usable(parameter, self.specs[index])
        return parameter

    def begin_sums(
        self, gradients: Sequence[Tensor | None], forward_pass: ForwardPass, device: torch.device
    ) -> tuple[list[Tensor | None], list[Bucket]]:
        """Starts the sums of a backward pass's gradients. Returns the tensors that will hold them, and the buckets.

        Before the last micro-batch it only collects gradients, except where a hook or the graph of a computed
        parameter needs those of this pass, or ZeRO scatters them in every pass.
        """
        needed, defers = forward_pass.needed, not (self._open_step.sums or forward_pass.sums_at_once)
        deferred = [spec.collects and defers for spec in self.specs]
        if self._collected is not None:
            self._collected.require_for(forward_pass.collects_for, forward_pass.guests, self.specs[0].site)
        needs_collecting = tuple(n and spec.collects for n, spec in zip(needed, self.specs, strict=True))
        if any(deferred):
            collected = [g if defer else None for g, defer in zip(gradients, deferred, strict=True)]
            self._collect(collected, needs_collecting, forward_pass, device)
        elif self._open_step.adds_collected and self._collected and self._collected.needed == needs_collecting:
            gradients, self._collected = self._collected.plus(gradients), None
        ready = [None if defer else g for g, defer in zip(gradients, deferred, strict=True)]
        needs_sum = [n and not defer for n, defer in zip(needed, deferred, strict=True)]
        return self._start(ready, needs_sum, device, forward_pass.guests)

    def _collect(
        self, gradients: list[Tensor | None], needed: tuple[bool, ...], forward_pass: ForwardPass, device: torch.device
    ) -> None:
        note_action("collect", self.unit)
        exclusive = [g is not None and g.dtype != spec.dtype for g, spec in zip(gradients, self.specs, strict=True)]
        earlier = self._collected
        if earlier is None:
            parameters, guests = forward_pass.collects_for, forward_pass.guests
            self._collected = CollectedGradients(gradients, needed, parameters, guests, device, exclusive)
        else:
            needed_in_any = tuple(a or b for a, b in zip(earlier.needed, needed, strict=True))
            exclusive = earlier.exclusive_sums(gradients, exclusive)
            gradients, needed = earlier.plus(gradients), needed_in_any
            self._collected = CollectedGradients(
                gradients, needed, earlier.parameters, earlier.guests, device, exclusive
            )
        self._open_step.pending[self] = None

    @property
    def has_collected(self) -> bool:
        """Whether gradients of earlier micro-batches await their sum."""
        return self._collected is not None

    def begin_collected(self) -> tuple[list[Tensor | None], list[Bucket]]:
        """Starts the sums of the collected gradients, outside of any backward pass."""
        assert self._collected is not None
        collected, self._collected = self._collected, None
        parameters = [ref(parameter) for parameter in self._parameters()]
        collected.require_for(parameters, collected.guests, self.specs[0].site)
        return self._start(collected.gradients, collected.needed, collected.device, collected.guests)

    def finish_sums(self, results: list[Tensor | None], buckets: Sequence[Bucket]) -> None:
        """Waits for the sums of `begin_sums` and writes them to `results`."""
        finish(results, buckets)
        self._open_step.drop_finished()

    @torch.no_grad()
    def add_to_parameters(self, results: list[Tensor | None], buckets: Sequence[Bucket]) -> None:
        """Waits for the sums of `begin_collected` and adds them to the parameters' gradients."""
        self.finish_sums(results, buckets)
        for index, gradient in enumerate(results):
            parameter = self._parameter(index)
            layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            summed = wrapped(gradient, self.specs[index], layout)
            if summed is not None:
                accumulate(parameter, summed.to(parameter.dtype))

    def _start(
        self,
        gradients: Sequence[Tensor | None],
        needed: Sequence[bool],
        device: torch.device,
        guests: Guests | None,
    ) -> tuple[list[Tensor | None], list[Bucket]]:
        """Starts the sums for every parameter in `needed`, even without a gradient on this rank: ranks must match.

        Gradients of guests go home first.
        """
        if guests is not None:
            gradients = guests.returned(gradients, needed, partial(self._zeros, device))
        results = list(gradients)
        buckets, scattered = [], list[Bucket]()
        for sum_group in self._sum_groups:
            members = [member for member in sum_group if needed[member.index]]
            if not members:
                continue
            if members[0].zero is not None and not scattered:
                self._open_step.wait_scattered()
            first = self.specs[members[0].index]
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            dtype = torch.promote_types(first.dtype, torch.float32)
            bucket = Bucket(members, f"gradient of {first.name}{more}, {first.site}", dtype, device)
            for member, result in zip(members, bucket.begin(gradients), strict=True):
                results[member.index] = result
            buckets.append(bucket)
            if members[0].zero is not None:
                scattered.append(bucket)
        if scattered:
            self._open_step.scattering = scattered
        if buckets:
            note_action("reduce", self.unit)
        return results, buckets

    def _zeros(self, device: torch.device, index: int, slots: int) -> Tensor:
        """The gradient of a parameter of experts on a rank that has none, for so many slots."""
        spec = self.specs[index]
        dim = None if spec.zero is None else spec.zero.dim
        shape = [size * (spec.zero.ranks if spec.zero and d == dim else 1) for d, size in enumerate(spec.shape)]
        dtype = torch.promote_types(spec.dtype, torch.float32)
        return torch.zeros((slots, *shape[1:]), dtype=dtype, device=device)


def _is_ready(parameter: Tensor, spec: WeightSpec) -> bool:
    """Whether the parameter needs no unwrapping, narrowing or sum."""
    return not isinstance(parameter, DTensor) and (parameter.dtype, spec.groups, spec.scale) == (spec.dtype, (), 1.0)
