"""A running job: `with moec.launch(plan) as job`."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous
from torch.optim import AdamW

from moec.codegen.fx import DTYPES
from moec.codegen.plan import ParameterData, Plan
from moec.grammar.spec import AdamW as AdamWSpec
from moec.passes.ir import Layout, Shard
from moec.passes.ir.mesh import group_name
from moec.passes.lower import context_of
from moec.passes.mixture import choices_per_token
from moec.runtime import groups
from moec.runtime.backends import select, triton_tiles
from moec.runtime.conversions import all_gather_alike
from moec.runtime.errors import JobError, speak_once
from moec.runtime.gradients import GradientSum, clip_gradient_norm
from moec.runtime.module import ModelOutput, PlanModule
from moec.runtime.optimizer import make_optimizer
from moec.runtime.replicas import check_replicas
from moec.runtime.shards import initial_shard
from moec.runtime.watch import collective, watch

TIMEOUT = 100.0
"""Seconds: long enough for a slow step, short enough to notice a dead rank (torch's defaults are 10 to 30 minutes)."""


class Job:
    """One rank of a plan that runs under torchrun, or the only rank of a plan for one.

    Entering it joins the process group (or uses the one there is) and builds the plan's meshes; leaving it undoes what
    entering did. `rank`, `world_size`: this process among all; `data_rank`, `data_size`: its share of the batch.
    """

    def __init__(
        self, plan: Plan, device: str | None = None, check_replicas: int = 0, timeout: float = TIMEOUT
    ) -> None:
        if check_replicas < 0:
            raise ValueError(f"check_replicas is a number of steps, or 0 for never, not {check_replicas}")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout is a number of seconds above 0, not {timeout}")
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"device is 'cpu' or 'cuda' (which AMD's are too), not {device!r}")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', and torch finds no GPU here")
        self.plan = plan
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.data_rank = plan.data_rank(self.rank) if self.rank < plan.world_size else 0
        self.data_size = plan.data_size
        self.device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._timeout = timeout
        self._check_every, self._steps, self._in_step = check_replicas, 0, False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        speak_once(self.rank)
        with ExitStack() as stack:
            if dist.is_initialized():
                self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._require_world_size()
            select(self.device_type)  # raises where `MOEC_BACKEND` cannot be had: on every rank, before they meet
            self.data_rank = self.plan.data_rank(self.rank)
            if not dist.is_initialized():
                _join(self.rank, self.world_size, self.device_type, timedelta(seconds=self._timeout))
                stack.callback(dist.destroy_process_group)
            stack.enter_context(groups.use(self._groups()))
            stack.enter_context(triton_tiles.use(self.plan.tiles))
            if self.world_size > 1:
                # A connection of its own: a thread that waits on a shared one would hold up the other.
                store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
                stack.enter_context(watch(store, self.rank, self.world_size, self._timeout))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _require_world_size(self) -> None:
        ranks = self.plan.world_size
        if self.world_size != ranks:
            raise JobError(
                "MOE0701",
                f"the plan is for {ranks}, and this job has {self.world_size}",
                f"start it with `torchrun --nproc-per-node {ranks} …` (on several nodes, {ranks} processes in all), "
                f"or compile the file for a cluster of {self.world_size}",
            )

    def _groups(self) -> dict[str, dist.ProcessGroup]:
        """The plan's groups by name, as torch's DeviceMesh makes them."""
        found = {}
        for name, mesh in self.plan.meshes.items():
            if not mesh.wide_axes():
                continue
            shape = tuple(size for _, size in mesh.axes)
            ranks = torch.arange(mesh.ranks).reshape(shape)
            device_mesh = DeviceMesh(self.device_type, ranks, mesh_dim_names=tuple(axis for axis, _ in mesh.axes))
            for axis in mesh.wide_axes():
                group = group_name(axis, name if name != "dense" else None)
                found[group] = device_mesh.get_group(axis)
                # Else it waits for torch's 30 minutes, whatever the process group it is part of.
                distributed_c10d._set_pg_timeout(timedelta(seconds=self._timeout), found[group])
        return found

    # ---- what a training script calls --------------------------------------------------------------

    def build(self, device: str | torch.device | None = None, *, seed: int = 0) -> PlanModule:
        """This rank's shard of the model, newly initialised. What it starts as does not depend on the sharding."""
        target = torch.device(device or self.device_type)

        def make(name: str) -> nn.Parameter:
            data = self.plan.parameters[name]
            mesh = self.plan.meshes[data.mesh]
            shard = initial_shard(name, data, mesh, self.rank, seed=seed, dtype=DTYPES[data.dtype])
            return nn.Parameter(shard.to(target))

        spec, tp = self.plan.spec, self.plan.meshes["dense"].size("tp")
        module = PlanModule(spec.model, context_of(spec), self.plan.stages[0], make, self._agree, tensor_parallel=tp)
        sums = {name: self.plan.parameters[name].sum_over for name, _ in module.named_parameters()}
        gradient_sum = GradientSum(dict(module.named_parameters()), sums, module.parameter_sites())

        def watch(_: nn.Module, __: object, output: ModelOutput) -> None:
            gradient_sum.watch(output.loss, output.logits)

        module.register_forward_hook(watch)
        return module

    def optimizer(self, model: PlanModule) -> AdamW:
        """The optimizer that the file's `train` block names, with its defaults where it has none."""
        train = self.plan.spec.train
        spec = train.optimizer if train else AdamWSpec()
        decayed: list[nn.Parameter] = []
        undecayed: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            (decayed if self.plan.parameters[name].decays else undecayed).append(parameter)
        return make_optimizer(spec, decayed, undecayed)

    def step(self, model: PlanModule, tokens: Tensor, labels: Tensor) -> Tensor:
        """Forward, backward and gradient sums over this rank's share of the batch; gives the global loss, detached.

        Before every N-th, with `check_replicas=N`, replicas are compared.
        """
        self._steps += 1
        if self._check_every and self._steps % self._check_every == 0:
            self.check_replicas(model)
        self._in_step = True
        try:
            loss = model(tokens, labels).loss
        finally:
            self._in_step = False
        loss.backward()
        detached: Tensor = loss.detach()
        return detached

    def check_replicas(self, model: PlanModule) -> None:
        """Raises `JobError`, alike on every rank, unless ranks with the same part of a parameter have the same bits.

        A collective: every rank must call it, or none.
        """
        check_replicas(self.plan, dict(model.named_parameters()), self.world_size)

    def clip_grad_norm_(self, model: PlanModule, max_norm: float) -> Tensor:
        """Scales the gradients to a global norm of at most `max_norm`; gives the norm before, alike on every rank."""
        sharded = {name: self._sharded_over(self.plan.parameters[name]) for name, _ in model.named_parameters()}
        return clip_gradient_norm(dict(model.named_parameters()), sharded, max_norm)

    def whole_logits(self, output: ModelOutput) -> Tensor:
        """`output.logits` over the whole vocabulary and all tokens of this rank's sequences, detached.

        A collective: every rank must call it, or none.
        """
        logits = output.logits.detach()
        placement = self.plan.logits_layout.get("tp")
        return all_gather_alike(logits, placement.dim, "tp", "whole logits") if isinstance(placement, Shard) else logits

    def expert_loads(self, model: PlanModule) -> dict[int, Tensor]:
        """Rows that each expert got in the last forward pass, over all ranks: layer → int64 `[experts]`, on the CPU.

        A collective: every rank must call it, or none.
        """
        layers = sorted(model.expert_counts)
        if not layers:
            return {}
        counts = torch.cat([model.expert_counts[layer] for layer in layers])
        if self.world_size > 1:
            with collective("all_reduce", "", "expert loads"):
                dist.all_reduce(counts)
        sizes = [model.expert_counts[layer].numel() for layer in layers]
        return dict(zip(layers, torch.split(counts.cpu(), sizes), strict=True))

    def drop_rates(self, model: PlanModule) -> dict[int, float]:
        """The share of the last forward pass's choices that found their expert full, by layer; 0 where none can.

        Over all ranks, as `expert_loads` is, and so a collective too.
        """
        loads = self.expert_loads(model)
        tokens = torch.tensor(model.num_tokens)
        if self.world_size > 1:
            tokens = tokens.to(next(model.parameters()).device)
            with collective("all_reduce", "", "drop rates"):
                dist.all_reduce(tokens)
        total = int(tokens) // self.plan.meshes["dense"].size("tp")  # the ranks of a tp group read the same ones
        kept = {layer: int(load.sum()) / choices_per_token(self.plan.spec, layer) for layer, load in loads.items()}
        return {layer: 1 - rows / total if total else 0.0 for layer, rows in kept.items()}

    def save(self, path: str, model: PlanModule, optimizer: torch.optim.Optimizer) -> None:
        """Checkpoints are not supported yet."""
        raise JobError("MOE0700", "job.save: checkpoints come in a later version of moec")

    def _sharded_over(self, data: ParameterData) -> tuple[str, ...]:
        mesh = None if data.mesh == "dense" else data.mesh
        return tuple(group_name(axis, mesh) for axis in Layout.parse(data.layout).sharded_axes())

    def _agree(self, site: str, complaint: str | None, alike: tuple[int, ...], device: torch.device) -> str | None:
        """One small reduction tells every rank whether any complains; then the lowest such rank's words are theirs.

        The same reduction finds numbers of `alike` that differ between ranks: a complaint of none of them.
        """
        if complaint:
            complaint = self._with_place(complaint)
        if self.world_size == 1:
            return complaint
        bounds = [bound for number in alike for bound in (number, -number)]
        lowest = torch.tensor([self.rank if complaint else self.world_size, *bounds], device=device)
        with collective("all_reduce", "", site):
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        speaker, *bounds = lowest.tolist()
        if speaker == self.world_size:
            least, most = bounds[::2], [-bound for bound in bounds[1::2]]
            if least == most:
                return None
            return f"tokens have shapes from {least} to {most} on the ranks; experts with a capacity want one"
        return _broadcast_text(complaint or "", speaker, device)

    def _with_place(self, complaint: str) -> str:
        place = [f"rank {self.rank}"] if self.world_size > 1 else []
        place += [f"step {self._steps}"] if self._in_step else []
        return f"{', '.join(place)}: {complaint}" if place else complaint


_joined = count()
"""Jobs that this process has started: as many on every rank, for all run the same script."""


def _join(rank: int, world_size: int, device_type: str, timeout: timedelta) -> None:
    backend = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "MASTER_ADDR" not in os.environ:
        assert world_size == 1
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    store, rank, world_size = next(rendezvous("env://", rank, world_size, timeout=timeout))
    # The agent's store still holds the addresses of the last attempt, and of the last job of this process.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt_{attempt}_job_{next(_joined)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _broadcast_text(text: str, source: int, device: torch.device) -> str:
    encoded = list(text.encode()[:MAX_COMPLAINT])
    buffer = torch.zeros(MAX_COMPLAINT, dtype=torch.uint8, device=device)
    buffer[: len(encoded)] = torch.tensor(encoded, dtype=torch.uint8)
    with collective("broadcast", "", "a complaint"):
        dist.broadcast(buffer, source)
    return bytes(buffer.tolist()).rstrip(b"\0").decode(errors="replace")


MAX_COMPLAINT = 1000
"""Bytes of a complaint that travel to the other ranks."""
