"""The home of `moec.layer`: a rank of the host's process group, and the process groups that the layer makes."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moec.codegen.plan import Plan, PlanParameter
from moec.grammar.spec import Spec
from moec.passes.ir.mesh import group_name
from moec.runtime.errors import JobError
from moec.runtime.host.experts_of_rank import ExpertsOfRank, refused
from moec.runtime.host.layer import MoeLayer
from moec.runtime.host.layer_state import EXPERTS, first_of_parts
from moec.runtime.ranks import groups
from moec.runtime.ranks.checks import JobChecks
from moec.runtime.ranks.groups import HOST, STAGE
from moec.runtime.weights.rank import RankHome
from moec.runtime.weights.shards import dtensor_placements
from moec.runtime.weights.weight_spec import WeightSpec

Reduction = Literal["mean", "sum"]


def ranks_of(group: ProcessGroup | None) -> tuple[int, ...]:
    """The global ranks of `group` in its order; without `group` those of the default group, or rank 0 alone."""
    if group is None and not dist.is_initialized():
        return (0,)
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        raise ValueError(f"rank {dist.get_rank()} makes a layer over the ranks {ranks}, but is not one of them")
    return tuple(ranks)


class LayerHome(RankHome):
    """One rank of a layer. The host reduces dense gradients; the layer sums and scales experts' gradients.

    A host that averages gradients has the mean of its ranks' losses as its loss. Then experts' gradients are divided by
    the number of ranks, and the gradient of `aux_loss`, which is global already, is multiplied by it.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Sequence[int],
        reduction: Reduction,
        *,
        over_all: bool,
        device: torch.device,
        seed: int,
    ) -> None:
        job, size = groups.new_job(), plan.world_size
        self.ranks, self._over_all = tuple(ranks), over_all
        rank = self.ranks.index(dist.get_rank()) if size > 1 else 0
        checks = JobChecks("first", job, rank, size, (rank,), size, lambda: f"rank {rank}" if size > 1 else "")
        super().__init__(plan, rank, job, {}, checks, device=device, seed=seed)
        self._meshes_of_experts: dict[str, DeviceMesh] = {}
        self.hosts_divisor = size if reduction == "mean" else 1
        self._open_groups(job, f"{plan.spec_text}{seed}{reduction}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled in a layer over several ranks, as by `torch.save(model)`."""
        if self.plan.world_size > 1:
            raise refused()
        return super().__reduce_ex__(protocol)

    def _open_groups(self, job: str, made_of: str) -> None:
        self._groups_by_name: dict[str, ProcessGroup] = {}
        if self.plan.world_size == 1:
            return
        self._groups_by_name[HOST] = _host_group(self.ranks)
        require_same_layer(_digests(self._groups_by_name[HOST], made_of, self.ranks), self.ranks)
        self._groups_by_name[STAGE] = _group(self.ranks)
        for name, mesh in self.plan.meshes.items():
            for axis in (*mesh.wide_axes(), *mesh.joint_axes()):
                members = next(peers for peers in mesh.groups(axis) if self.rank in peers)
                name_of_group = group_name(axis, name if name != "dense" else None)
                self._groups_by_name[name_of_group] = _group(tuple(self.ranks[peer] for peer in members))
        stack = ExitStack()
        stack.enter_context(groups.opened(job, self._groups_by_name, None))
        # Copies of a layer use the same home: its groups stay open until the last copy is gone.
        weakref.finalize(self, stack.close)

    @property
    def expert_group(self) -> str:
        """The group whose ranks have different experts; empty if every rank has all experts."""
        return next((self.groups + name for name in self._groups_by_name if name.startswith("ep[")), "")

    def experts_mesh(self, device: str) -> DeviceMesh:
        """The experts' mesh over the layer's groups, for tensors on devices of this type: a layer may be moved."""
        if device not in self._meshes_of_experts:
            self._meshes_of_experts[device] = self._new_experts_mesh(device)
        return self._meshes_of_experts[device]

    def _new_experts_mesh(self, device: str) -> DeviceMesh:
        name = self.plan.parameters[f"{EXPERTS}up.weight"].mesh
        mesh = self.plan.meshes[name]
        axes = mesh.wide_axes()
        named = [self._groups_by_name[group_name(axis, name if name != "dense" else None)] for axis in axes]
        if len(axes) == 1:
            return DeviceMesh.from_group(named[0], device, mesh_dim_names=axes)
        ranks = torch.tensor(self.ranks, device="cpu").reshape([mesh.size(axis) for axis in axes])
        return DeviceMesh.from_group(named, device, mesh=ranks, mesh_dim_names=axes)

    def as_dtensor(self, name: str, part: Tensor) -> Tensor:
        """This rank's part of a sharded parameter as a DTensor; a replica unchanged."""
        data = self.plan.parameters[name]
        layout = data.master
        if not layout.axes:
            return part
        mesh = self.experts_mesh(part.device.type)
        placements = dtensor_placements(layout, mesh)
        return ExpertsOfRank.of(DTensor.from_local(part, mesh, placements, run_check=False))

    @property
    def local_experts(self) -> Sequence[int]:
        """The experts that this rank has; a `range` if all are of one kind and size."""
        ranges_by_part: list[range] = []
        first_expert = 0
        for data in first_of_parts(self.plan.parameters):
            slice_here, *_ = data.cells(self.plan.meshes[data.mesh], self.rank)
            ranges_by_part.append(range(first_expert + slice_here.start, first_expert + slice_here.stop))
            first_expert += data.shape[0]
        return (
            ranges_by_part[0]
            if len(ranges_by_part) == 1
            else tuple(number for part in ranges_by_part for number in part)
        )

    def stored_dtype(self, data: PlanParameter) -> torch.dtype:
        """fp32: a host's wrappers may require one dtype for all parameters."""
        return torch.float32

    def weight(self, name: str, site: str) -> WeightSpec:
        spec = replace(super().weight(name, site), master=None)
        if name.startswith(EXPERTS):
            return replace(spec, scale=1 / self.hosts_divisor)
        return replace(spec, groups=())

    def require_running(self) -> None:
        """Raises `JobError`, the same on every rank, if the process groups are not those that the layer was made in."""
        if self._over_all and self.plan.world_size == 1 and dist.is_initialized() and dist.get_world_size() > 1:
            raise JobError(
                "MOE0745",
                f"this layer was made without the process group of {dist.get_world_size()} ranks: each rank has all "
                "experts, and nobody would sum their gradients",
                "make the layer after `torch.distributed.init_process_group(…)`, `TrainingArguments(…)` or "
                "`Accelerator()`, which make the group; `moec.reference` makes layers that are never sharded",
            )
        if not all(map(_is_alive, self._groups_by_name.values())):
            raise JobError(
                "MOE0709",
                "the process group of this layer was destroyed",
                "make the layer again in the current process group",
            )


def require_layer(spec: Spec) -> None:
    """Raises `JobError` for a file that describes a model."""
    if spec.has_model:
        raise JobError(
            "MOE0721",
            f"{spec.model.name} is a model, but `moec.layer` wants a file that describes a `layer`",
            'train a model with `moec.launch`, or write its mixture as `layer "name" { dim = …; moe { … } }`',
        )


def make_layer(
    plan: Plan, group: ProcessGroup | None, reduction: Reduction, *, seed: int, device: str | torch.device | None
) -> MoeLayer:
    """The layer of `plan` on this rank of `group`.

    Raises `JobError` for a plan of another number of ranks, and for the plan of a model.
    """
    require_layer(plan.spec)
    ranks = ranks_of(group)
    if plan.world_size != len(ranks):
        help = f"give `moec.layer` the .moe file, which it compiles for {len(ranks)}, or compile it for {len(ranks)}"
        if not dist.is_initialized():
            help = f"make the layer after `torch.distributed.init_process_group`, or {help}"
        raise JobError(
            "MOE0701",
            f"the plan is for {plan.world_size} ranks, but the layer's process group has {len(ranks)}",
            help,
        )
    for name, data in plan.parameters.items():
        if data.gathered != "never":
            message = f"the optimizer state of {name} is {data.master}: the host cuts a layer's parameters"
            raise JobError("MOE0700", message, "compile the .moe file again")
    target = torch.device(device) if device is not None else torch.get_default_device()
    home = LayerHome(plan, ranks, reduction, over_all=group is None, device=target, seed=seed)
    layer = MoeLayer(plan.program, plan.spec, home)
    return layer


_shared: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}
"""Groups by backend and ranks: all layers of a model use the same groups."""


def _group(ranks: tuple[int, ...]) -> ProcessGroup:
    """A group over `ranks`, of the default backend. Never the host's group: the host orders the collectives on it."""
    return _shared_group("", ranks)


def _host_group(ranks: tuple[int, ...]) -> ProcessGroup:
    """A group over `ranks` that takes CPU tensors."""
    takes_cpu = dist.get_backend() == "gloo" or "cpu:" in str(dist.get_backend_config())
    return _group(ranks) if takes_cpu else _shared_group("gloo", ranks)


def _shared_group(backend: str, ranks: tuple[int, ...]) -> ProcessGroup:
    group = _shared.get((backend, ranks))
    if group is None or not _is_alive(group):
        for key in [key for key, shared in _shared.items() if not _is_alive(shared)]:
            del _shared[key]  # made in a default group that was destroyed
        # Only members make a group. All ranks make groups in the same order, so no two groups wait for each other.
        group = dist.new_group(list(ranks), backend=backend or None, use_local_synchronization=True)
        _shared[backend, ranks] = group
    return group


def _is_alive(group: ProcessGroup) -> bool:
    return dist.is_initialized() and group in distributed_c10d._world.pg_map


def _digests(group: ProcessGroup, made_of: str, ranks: Sequence[int]) -> list[int]:
    """A hash of each rank's file, seed and reduction. A collective."""
    local_digest = int.from_bytes(hashlib.sha256(made_of.encode()).digest()[:8], "big") >> 2
    digests = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in ranks]
    dist.all_gather(digests, torch.tensor(local_digest, device="cpu"), group=group)
    return [int(digest) for digest in digests]


def require_same_layer(digests: Sequence[int], ranks: Sequence[int]) -> None:
    """Raises `JobError` unless all ranks make the same layer."""
    different_rank = next((rank for rank, digest in zip(ranks, digests, strict=True) if digest != digests[0]), None)
    if different_rank is not None:
        raise JobError(
            "MOE0720",
            f"rank {ranks[0]} and rank {different_rank} make different layers: their files, seeds or reductions differ",
            "make the layers of a model in the same order on every rank, from the same files, with the same seeds",
        )
