"""The home of a rank's modules: its parts of the parameters, and the groups that sum their gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from moec.codegen.emit import DTYPES
from moec.codegen.plan import Plan, PlanParameter, ZeroCut
from moec.passes.ir import Block, Op, State
from moec.runtime.backends.triton.triton_tiles import ways_on
from moec.runtime.ranks.checks import Checks
from moec.runtime.ranks.groups import ended_error, is_open
from moec.runtime.weights.shards import (
    dtensor_placements,
    initial_shard,
    initial_state,
    require_executable,
    require_gatherable,
    require_order,
)
from moec.runtime.weights.weight_spec import WeightSpec, ZeroPart


class RankHome:
    """The home of the modules of one `build`: on `device`, initialised from `seed`.

    `model.set(step=…)` calls `count_from`; each training pass calls `count_pass`.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        job: str,
        meshes: Mapping[str, DeviceMesh],
        checks: Checks,
        *,
        device: torch.device,
        seed: int,
        count_from: Callable[[int], None] = lambda step: None,
        count_pass: Callable[[Tensor, Tensor | None, Tensor | None], None] = lambda tokens, segments, real: None,
    ) -> None:
        require_executable(plan.parameters)
        require_gatherable(plan.parameters)
        require_order(plan.program)
        self.plan, self.rank, self.groups, self.checks = plan, rank, job, checks
        self.stages, self._place = plan.stages_of(rank), rank % plan.stage_size
        self._meshes, self._device, self.seed = meshes, device, seed
        self.count_from, self.count_pass = count_from, count_pass
        self.data_rank, self.data_size = plan.data_rank(rank), plan.data_size
        self.shares_batch = plan.data_size < plan.world_size

    def __deepcopy__(self, memo: dict[int, Any]) -> RankHome:
        return self

    def parameter(self, name: str) -> nn.Parameter:
        """This rank's part, with initial values: a DTensor if there are several ranks."""
        data = self.plan.parameters[name]
        mesh = self.plan.meshes[data.mesh]
        dtype = self.stored_dtype(data)
        local = initial_shard(name, data, mesh, self._place, seed=self.seed, dtype=dtype, device=self._device)
        if data.mesh not in self._meshes:
            return nn.Parameter(local, requires_grad=not data.frozen)
        parameter = DTensor.from_local(local, *self._layout(data), run_check=False)
        return nn.Parameter(parameter, requires_grad=not data.frozen)

    def stored_dtype(self, data: PlanParameter) -> torch.dtype:
        """The dtype of a parameter between steps: fp32 for the optimizer, the compute dtype where it is frozen."""
        return DTYPES[data.dtype] if data.frozen else torch.float32

    def state(self, state: State) -> Tensor:
        """The whole state: every rank has the same."""
        return initial_state(state, device=self._device)

    def weight(self, name: str, site: str) -> WeightSpec:
        data = self.plan.parameters[name]
        index = data.cells(self.plan.meshes[data.mesh], self._place)
        cut = data.zero_cut
        return WeightSpec(
            name=name,
            shape=tuple(part.stop - part.start for part in index),
            dtype=DTYPES[data.dtype],
            groups=tuple(self.groups + group for group in data.sum_over if cut is None or group != cut.group),
            site=site,
            master=self.stored_dtype(data),
            frozen=data.frozen,
            zero=None if cut is None else self._zero_part(data, cut),
        )

    def _zero_part(self, data: PlanParameter, cut: ZeroCut) -> ZeroPart:
        return ZeroPart(
            group=self.groups + cut.group,
            dim=cut.dim,
            ranks=self.plan.meshes[data.mesh].size(cut.axis),
            per_use=data.gathered == "per use",
            per_pass=data.scattered_per_pass,
        )

    def _layout(self, data: PlanParameter) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        mesh = self._meshes[data.mesh]
        return mesh, dtensor_placements(data.master, mesh)

    def ways(self, block: Block, op: Op) -> str | None:
        return ways_on(self.plan, block, op, self._device)

    def require_running(self) -> None:
        if self.plan.world_size > 1 and not is_open(self.groups):
            raise ended_error()

    def signature(self) -> dict[str, Any]:
        return {"ranks": self.plan.world_size, "rank": self.rank, "parts": self._parts_digest}

    @cached_property
    def _parts_digest(self) -> str:
        """A digest that is equal for plans that shard every parameter the same way."""
        meshes = {name: mesh.axes for name, mesh in self.plan.meshes.items()}
        cut = sorted((name, p.shape, str(p.master), meshes[p.mesh]) for name, p in self.plan.parameters.items())
        return hashlib.sha256(repr(cut).encode()).hexdigest()[:16]

    def complaint_of(self, signature: dict[str, Any]) -> str | None:
        """None for a `state_dict` of a rank with the same parts of every parameter."""
        ranks, rank = signature["ranks"], signature["rank"]
        if ranks == 1:
            return None  # unsharded tensors
        if ranks != self.plan.world_size:
            return f"its plan is for {ranks} ranks, but this plan is for {self.plan.world_size}"
        if signature.get("parts", self._parts_digest) != self._parts_digest:
            return "its plan shards parameters differently"
        for name, data in self.plan.parameters.items():
            mesh = self.plan.meshes[data.mesh]
            if data.cells(mesh, rank % self.plan.stage_size) != data.cells(mesh, self._place):
                return f"it has rank {rank}'s part of {name}, but this is rank {self.rank}"
        return None
