"""The parameters that an optimizer updates: fp32 masters, whole or a rank's parts."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moec.codegen.plan import PlanParameter
from moec.passes.cost.optimizers import UPDATE_CHUNK
from moec.passes.ir import VECTOR, Matrices
from moec.passes.ir import Shard as Sharded
from moec.passes.ir.mesh import group_name


@dataclass(frozen=True, slots=True)
class Master:
    """A parameter, whether it decays, its matrices, and the cuts of a rank's part, each a (group, dim)."""

    parameter: nn.Parameter
    decays: bool = True
    matrices: Matrices = VECTOR
    cuts: tuple[tuple[str, int], ...] = ()

    @property
    def local(self) -> Tensor:
        """This rank's part; writing to it changes the parameter."""
        return local_part(self.parameter)

    def take_gradient(self, scale: Tensor | None) -> Tensor | None:
        """Divides this rank's part of the gradient by `scale`, in place, and returns it. Call it once per step."""
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
        return DTensor.from_local(zeros, parameter.device_mesh, placements_without(parameter, dims), run_check=False)


def master_of(parameter: nn.Parameter, data: PlanParameter, job: str) -> Master:
    """The master of `parameter`, which the plan describes by `data`; `job` is the prefix of the job's groups."""
    cuts = ((group_of(data, axis, job), p.dim) for axis, p in data.master.placements if isinstance(p, Sharded))
    return Master(parameter, data.decays, data.matrices, tuple(cuts))


def by_decay(masters: Sequence[Master], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: the masters that decay, and those that do not."""
    return [
        {"params": [m.parameter for m in masters if m.decays == decays], "weight_decay": decay}
        for decays, decay in ((True, weight_decay), (False, 0.0))
    ]


def group_of(data: PlanParameter, axis: str, job: str) -> str:
    """The name of a parameter's group along `axis`."""
    return job + group_name(axis, None if data.mesh == "dense" else data.mesh)


def groups_of_shards(data: PlanParameter, job: str) -> tuple[str, ...]:
    """The groups over which a parameter is sharded."""
    return tuple(group_of(data, axis, job) for axis in data.master.sharded_axes())


def placements_without(parameter: DTensor, dims: Container[int]) -> list[Placement]:
    """The placements of a tensor of size 1 in `dims` that is otherwise sharded as `parameter` is."""
    return [Replicate() if isinstance(p, Shard) and p.dim in dims else p for p in parameter.placements]


Updated = TypeVar("Updated", Master, nn.Parameter)


def chunks(updated: Iterable[Updated]) -> Iterator[list[Updated]]:
    """Masters or parameters in their order, up to `UPDATE_CHUNK` elements of this rank's parts together."""
    chunk: list[Updated] = []
    elements = 0
    for item in updated:
        size = local_part(item.parameter if isinstance(item, Master) else item).numel()
        if chunk and elements + size > UPDATE_CHUNK:
            yield chunk
            chunk, elements = [], 0
        chunk.append(item)
        elements += size
    if chunk:
        yield chunk


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or a plain tensor: detached, with the same memory and version counter."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()
