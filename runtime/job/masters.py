"""The parameters that an optimizer updates: fp32 masters, of which a rank may have a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from moec.codegen.plan import PlanParameter
from moec.passes.cost.optimizer_state import CHUNK
from moec.passes.ir import VECTOR, Matrices
from moec.passes.ir import Shard as Cut
from moec.passes.ir.mesh import group_name
from moec.runtime.errors import JobError


@dataclass(frozen=True, slots=True)
class Master:
    """A parameter, whether it decays, which matrices it has, and the cuts of a rank's part: (group, dim)."""

    parameter: nn.Parameter
    decays: bool = True
    matrices: Matrices = VECTOR
    cuts: tuple[tuple[str, int], ...] = ()

    @property
    def local(self) -> Tensor:
        """This rank's part; writing to it changes the parameter."""
        return local_part(self.parameter)

    def gradient(self, scale: Tensor | None) -> Tensor | None:
        """This rank's part of the gradient, divided by `scale` in place."""
        if self.parameter.grad is None:
            return None
        gradient = local_part(self.parameter.grad)
        return gradient if scale is None else gradient.div_(scale)

    @property
    def rows(self) -> tuple[int, ...]:
        """The dims that are rows of a matrix."""
        return tuple(self.matrices.dims_of_rows())

    @property
    def columns(self) -> tuple[int, ...]:
        """The dims that are columns of a matrix, or that a vector has."""
        return tuple(self.matrices.dims_of_columns(self.parameter.dim()))

    def groups(self, dims: tuple[int, ...]) -> tuple[str, ...]:
        """The groups over which these dims are cut."""
        return tuple(group for group, dim in self.cuts if dim in dims)

    def size(self, dims: tuple[int, ...]) -> int:
        """Elements of these dims in the whole parameter."""
        return math.prod(self.parameter.shape[dim] for dim in dims)

    def zeros_without(self, dims: tuple[int, ...]) -> Tensor:
        """Zeros of the parameter's shape and layout, with size 1 in `dims`: on several ranks a DTensor."""
        shape = [1 if dim in dims else size for dim, size in enumerate(self.local.shape)]
        zeros = self.local.new_zeros(shape)
        parameter: Tensor = self.parameter
        if not isinstance(parameter, DTensor):
            return zeros
        kept = [
            Replicate() if isinstance(placement, Shard) and placement.dim in dims else placement
            for placement in parameter.placements
        ]
        return DTensor.from_local(zeros, parameter.device_mesh, kept, run_check=False)


def master_of(parameter: nn.Parameter, data: PlanParameter, job: str) -> Master:
    """The master that `data` describes; `job` is the prefix of the job's groups."""
    cuts = ((group_of(data, axis, job), p.dim) for axis, p in data.master.placements if isinstance(p, Cut))
    return Master(parameter, data.decays, data.matrices, tuple(cuts))


def group_of(data: PlanParameter, axis: str, job: str) -> str:
    """The name of a parameter's group along `axis`."""
    return job + group_name(axis, None if data.mesh == "dense" else data.mesh)


def groups_of_shards(data: PlanParameter, job: str) -> tuple[str, ...]:
    """The groups over which a parameter is sharded."""
    return tuple(group_of(data, axis, job) for axis in data.master.sharded_axes())


def chunks(masters: Iterable[Master]) -> Iterator[list[Master]]:
    """Masters in their order, up to `CHUNK` elements of this rank's parts together."""
    chunk: list[Master] = []
    elements = 0
    for master in masters:
        size = master.local.numel()
        if chunk and elements + size > CHUNK:
            yield chunk
            chunk, elements = [], 0
        chunk.append(master)
        elements += size
    if chunk:
        yield chunk


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; a plain tensor as it is."""
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local.detach()
    return tensor.detach()


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of an optimizer's `step` returns, which computes gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def require_known(groups: list[dict[str, Any]], known: Container[nn.Parameter]) -> None:
    """Takes the newest group away and raises `JobError` if the optimizer was not made for one of its parameters."""
    if not all(parameter in known for parameter in groups[-1]["params"]):
        groups.pop()
        raise JobError(
            "MOE0700",
            "an optimizer of whole matrices got a parameter that the plan does not have",
            "give the parameters of your own modules to an optimizer of torch",
        )
