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
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moec.runtime.action_log import note_action
from moec.runtime.errors import JobError
from moec.runtime.refused_derivatives import HELP, beyond_backward, has_tangent, in_transform, is_tracked, no_derivative
from moec.runtime.weights.backward_pass import in_backward
from moec.runtime.weights.gathered_again import Again, Handles
from moec.runtime.weights.gathering import Gathering, Stamp, stamp_of
from moec.runtime.weights.gradients import Bucket, Summed, accumulate, by_groups
from moec.runtime.weights.masters import local_part
from moec.runtime.weights.microbatches import Collected, Microbatches
from moec.runtime.weights.names import read_parameter, registered_parameter, split_name
from moec.runtime.weights.weight_nodes import Narrow, Pass, Taken, Unwrap, finish, has_hooks, wrapped
from moec.runtime.weights.weight_spec import WeightSpec


@dataclass(frozen=True, slots=True)
class _Kept:
    """The weights of a step, gathered once for all its micro-batches, and the stamp of what they were gathered from."""

    stamp: Stamp
    weights: list[Tensor]


class Weights:
    """The parameters of one module. A call, once per forward pass, returns its graphs' inputs."""

    def __init__(self, owner: nn.Module, unit: str, specs: Sequence[WeightSpec], microbatches: Microbatches) -> None:
        self.unit = unit
        """The name of these parameters in a schedule (`moec.passes.place.schedule.Unit`)."""
        self.specs = tuple(specs)
        # Weak: autograd's nodes refer to this, the layer to its `aux_loss`, and Python sees no cycle through autograd.
        self._owner = ref(owner)
        self._microbatches = microbatches
        self.home: object = None
        """What backward passes need of it, which refer to this."""
        self._paths = [split_name(spec.name) for spec in specs]
        self._buckets = by_groups(Summed(i, spec.shape, spec.groups, spec.zero) for i, spec in enumerate(specs))
        self.gathers = any(spec.zero is not None for spec in specs)
        """Whether ZeRO cuts one of the parameters."""
        self._per_use = [i for i, spec in enumerate(specs) if spec.zero is not None and spec.zero.per_use]
        self.gathers_per_use = bool(self._per_use)
        """Whether every use gathers the weights again (ZeRO 3)."""
        self._collected: Collected | None = None
        self._begun: Taken | None = None
        self._ahead: Gathering | None = None
        self._kept: _Kept | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        """For the copy of the module, which belongs to no open step."""
        copied = memo[id(self)] = Weights.__new__(Weights)
        copied.__dict__ |= self.__dict__ | {"_collected": None, "_begun": None, "_ahead": None, "_kept": None}
        copied._owner = ref(deepcopy(self._module(), memo))
        copied._microbatches = deepcopy(self._microbatches, memo)
        return copied

    def _module(self) -> nn.Module:
        module = self._owner()
        assert module is not None, "no pass runs without its module"
        return module

    @property
    def is_hooked(self) -> bool:
        """Whether a parameter has hooks: then every backward pass sums all gradients of the layer."""
        return any(map(has_hooks, self._parameters()))

    def needed(self) -> list[bool]:
        """For each parameter, whether it requires a gradient."""
        return [parameter.requires_grad for parameter in self._parameters()]

    def rounded(self, dtype: torch.dtype) -> str:
        """The first parameter that the host narrowed though the file keeps it wider than `dtype`; empty if none."""
        for parameter, spec in zip(self._parameters(), self.specs, strict=True):
            if parameter.dtype.itemsize < spec.dtype.itemsize > dtype.itemsize:
                return spec.name
        return ""

    @property
    def is_kept(self) -> bool:
        """Whether the next forward pass uses weights that an earlier one has gathered."""
        return self._kept is not None and self._kept.stamp == stamp_of(self._parameters())

    def begin(self) -> None:
        """Makes the `Unwrap` node of the next call. Called before the layers run, so that its backward runs last."""
        self._begun = self._take(self._parameters())

    @torch.no_grad()
    def begin_gather(self) -> None:
        """Starts the gather for the next call. A collective of all ranks, if ZeRO cuts one of the parameters."""
        if self.gathers and self._ahead is None:
            parameters = self._begun.parameters if self._begun is not None else self._parameters()
            stamp = stamp_of(parameters)
            if self._kept is None or self._kept.stamp != stamp:
                self._ahead = self._gathering(list(map(local_part, parameters)), stamp)

    def drop_begun(self) -> None:
        """Drops the node of `begin` and the gather, if an exception prevented the call that uses them."""
        self._begun = self._ahead = None

    def drop_kept(self) -> None:
        """Drops the gathered weights at the end of a step."""
        self._kept = None

    def forget(self) -> None:
        """Drops the collected gradients of a step."""
        self._collected = None

    def __call__(self, handles: Handles | None = None) -> Sequence[Tensor]:
        """The parameters as plain, differentiable tensors of the compute dtype.

        `handles` gets the weights that autograd must not save. Only in `handles.in_place()` graphs may use these.
        """
        begun, self._begun = self._begun, None
        # A hook may have replaced a parameter since `begin`.
        if begun is None or not all(map(self._is_still, self._paths, begun.parameters)):
            begun = self._take(self._parameters())
        one_pass = begun.one_pass
        if begun.is_ready:
            return begun.local
        if one_pass is None:
            weights: Sequence[Tensor] = self.weights(begun)
        else:
            weights = Narrow.apply(one_pass, begun, *begun.local)  # type: ignore[no-untyped-call]
        if self._per_use and handles is not None and torch.is_grad_enabled():
            again = self._again(begun)
            handles.add(again, weights, self._per_use)
            if one_pass is not None:
                one_pass.again = again
        return weights

    def weights(self, taken: Taken) -> list[Tensor]:
        """The detached weights in the compute dtype: kept ones, those gathered ahead, or gathered now."""
        if not self.gathers:
            return self._narrow(taken.local)
        stamp, kept = stamp_of(taken.parameters), self._kept
        if kept is not None and kept.stamp == stamp:
            return kept.weights
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.stamp != stamp:
            ahead = self._gathering(taken.local, stamp)
        weights = ahead.finish()
        if self._microbatches.keeps and not self._per_use:
            self._kept = _Kept(stamp, weights)
        return weights

    def _narrow(self, local: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts in the compute dtype; no copy where the dtype is the same."""
        return [part.detach().to(spec.dtype) for part, spec in zip(local, self.specs, strict=True)]

    @torch.no_grad()
    def _gathering(self, local: Sequence[Tensor], stamp: Stamp) -> Gathering:
        note_action("gather", self.unit)
        return Gathering(self.specs, self._narrow(local), stamp)

    def _again(self, taken: Taken) -> Again:
        """What backward gathers again for this use."""
        local = list(map(local_part, taken.parameters))
        # In a recomputed pass the use before it is not the one that backward comes to next.
        before = None if in_backward() else self._microbatches.last_use
        again = Again(
            lambda: self._gathering(local, ()),
            partial(_stamp_now, [ref(parameter) for parameter in taken.parameters]),
            self.specs[0].site,
            before,
        )
        if not in_backward():
            self._microbatches.last_use = again
        return again

    def _is_still(self, path: tuple[Sequence[str], str], parameter: Tensor) -> bool:
        registered = registered_parameter(self._module(), *path)
        return registered is parameter or registered is None  # None if a parametrization computes it

    def _parameters(self) -> list[Tensor]:
        return [self._parameter(i) for i in range(len(self.specs))]

    def _take(self, parameters: list[Tensor]) -> Taken:
        """The parameters of a forward pass, to be narrowed."""
        if all(map(_is_ready, parameters, self.specs)):
            return Taken(parameters, parameters, is_ready=True)
        if beyond_backward():
            self._require_no_derivative(parameters)
        if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in parameters):
            return Taken(parameters, [local_part(parameter) for parameter in parameters])
        one_pass = Pass(self, parameters)
        return Taken(parameters, Unwrap.apply(one_pass, *parameters), one_pass)  # type: ignore[no-untyped-call]

    def _require_no_derivative(self, parameters: Sequence[Tensor]) -> None:
        """Raises `JobError` if a mode that the nodes do not have would differentiate a parameter."""
        for parameter, spec in zip(parameters, self.specs, strict=True):
            if has_tangent(parameter) or (in_transform() and is_tracked(parameter)):
                raise no_derivative(
                    f"{spec.name} ({spec.site}), which is cast, or summed over ranks,",
                    "derivative in forward mode or `torch.func`",
                    f"{HELP}; parameters in the layers' dtype are not cast, and those with `requires_grad_(False)` "
                    "leave the derivatives of inputs",
                )

    def _parameter(self, index: int) -> Tensor:
        parameter, spec = read_parameter(self._module(), *self._paths[index]), self.specs[index]
        shape = parameter._local_tensor.shape if isinstance(parameter, DTensor) else parameter.shape
        if shape != spec.shape:
            raise JobError(
                "MOE0710",
                f"{spec.name} ({spec.site}) was replaced: this rank's part has shape {list(shape)}, "
                f"but the plan wants {list(spec.shape)}",
                "on several ranks parameters are DTensors: use `torch.distributed.tensor.distribute_tensor(whole, "
                "old.device_mesh, old.placements)`",
            )
        if spec.frozen and parameter.requires_grad:
            raise JobError(
                "MOE0713",
                f"{spec.name} ({spec.site}) has `requires_grad`, but the plan freezes it: "
                "no rank would sum its gradient",
                "leave its part out of `frozen` in `train`, and compile the file again",
            )
        # A parametrization or `functional_call` may compute with another dtype: then the parameter is elsewhere.
        if spec.master is not None and parameter.dtype != spec.master and isinstance(parameter, nn.Parameter):
            kept = str(spec.master).removeprefix("torch.")
            use = "this frozen parameter stays" if spec.frozen else "an optimizer updates masters"
            raise JobError(
                "MOE0710",
                f"{spec.name} ({spec.site}) was converted to {parameter.dtype}, but {use} in {spec.master}",
                f"layers compute in the file's `dtype`; leave the parameters {kept}; "
                "`moec.reference(…, dtype=torch.float64)` makes the unsharded model in float64",
            )
        return parameter

    def begin_sums(
        self, gradients: Sequence[Tensor | None], one_pass: Pass, device: torch.device
    ) -> tuple[list[Tensor | None], list[Bucket]]:
        """Starts the sums of a backward pass's gradients. Returns the tensors that will hold them, and the buckets.

        Before the last micro-batch it only collects gradients, unless a parameter's hook needs them, or ZeRO scatters
        them in every pass.
        """
        later = [spec.collects and not self._microbatches.sums and not one_pass.hooked for spec in self.specs]
        collects = tuple(n and spec.collects for n, spec in zip(one_pass.needed, self.specs, strict=True))
        if any(later):
            self._collect([g if wait else None for g, wait in zip(gradients, later, strict=True)], collects, device)
        elif self._collected is not None and self._collected.needed == collects:
            gradients, self._collected = self._collected.plus(gradients), None
        now = [g if not wait else None for g, wait in zip(gradients, later, strict=True)]
        return self._start(now, [n and not wait for n, wait in zip(one_pass.needed, later, strict=True)], device)

    def _collect(self, gradients: list[Tensor | None], needed: tuple[bool, ...], device: torch.device) -> None:
        note_action("collect", self.unit)
        fresh = [g is not None and g.dtype != spec.dtype for g, spec in zip(gradients, self.specs, strict=True)]
        earlier = self._collected
        if earlier is None:
            self._collected = Collected(gradients, needed, device, fresh)
        else:
            both = tuple(one or other for one, other in zip(earlier.needed, needed, strict=True))
            fresh = earlier.fresh_sums(gradients, fresh)
            self._collected = Collected(earlier.plus(gradients), both, device, fresh)
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

    def finish_sums(self, results: list[Tensor | None], buckets: Sequence[Bucket]) -> None:
        """Waits for the sums of `begin_sums` and writes them to `results`."""
        finish(results, buckets)
        self._microbatches.drop_finished()

    @torch.no_grad()
    def add_to_parameters(self, results: list[Tensor | None], buckets: Sequence[Bucket]) -> None:
        """Waits for the sums of `begin_collected` and adds them to the parameters' gradients."""
        self.finish_sums(results, buckets)
        for index, gradient in enumerate(results):
            with torch.enable_grad():
                parameter = self._parameter(index)
            layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            added = wrapped(gradient, self.specs[index], layout)
            if added is None:
                continue
            added = added.to(parameter.dtype)
            if parameter.grad_fn is not None:  # a parametrization computes it
                torch.autograd.backward(parameter, added)
            else:
                accumulate(parameter, added)

    def _start(
        self, gradients: Sequence[Tensor | None], needed: Sequence[bool], device: torch.device
    ) -> tuple[list[Tensor | None], list[Bucket]]:
        """Starts the sums of all parameters that need a gradient, also without one on this rank: ranks must match."""
        results = list(gradients)
        buckets, scattered = [], list[Bucket]()
        for summed in self._buckets:
            members = [member for member in summed if needed[member.index]]
            if not members:
                continue
            if members[0].zero is not None and not scattered:
                self._microbatches.wait_scattered()
            first = self.specs[members[0].index]
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            wide = torch.promote_types(first.dtype, torch.float32)
            bucket = Bucket(members, f"gradient of {first.name}{more}, {first.site}", wide, device)
            for member, place in zip(members, bucket.begin(gradients), strict=True):
                results[member.index] = place
            buckets.append(bucket)
            if members[0].zero is not None:
                scattered.append(bucket)
        if scattered:
            self._microbatches.scattering = scattered
        if buckets:
            note_action("sum", self.unit)
        return results, buckets


def _stamp_now(parameters: Sequence[ref[Tensor]]) -> Stamp:
    """The stamp of those parameters that are still there: a strong reference would make a cycle."""
    return stamp_of([parameter for each in parameters if (parameter := each()) is not None])


def _is_ready(parameter: Tensor, spec: WeightSpec) -> bool:
    """Whether the parameter needs no unwrapping, narrowing or sum."""
    return not isinstance(parameter, DTensor) and (parameter.dtype, spec.groups, spec.scale) == (spec.dtype, (), 1.0)
