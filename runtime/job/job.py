"""A running job: `with moec.launch(plan) as job`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from moec.codegen.plan import Plan, PlanParameter
from moec.grammar.spec import AdamW as AdamWSpec
from moec.passes.ir import Shard
from moec.passes.ir.interface import layer_calls
from moec.passes.ir.mesh import group_name
from moec.passes.ir.mixture_values import choices_per_token
from moec.runtime.backends import select
from moec.runtime.backends.triton import triton_tiles
from moec.runtime.errors import JobError, speak_once
from moec.runtime.job import groups
from moec.runtime.job.batches import limits_of
from moec.runtime.job.checks import Checks, JobChecks
from moec.runtime.job.gradients import clip_gradient_norm
from moec.runtime.job.groups import ALL_RANKS
from moec.runtime.job.join import device_meshes, join, process_groups
from moec.runtime.job.module import ModelOutput, PlanModule
from moec.runtime.job.optimizer import make_optimizer
from moec.runtime.job.plan_names import parameters_by_name, require_model, require_own, states_by_name
from moec.runtime.job.rank import RankHome
from moec.runtime.job.replicas import check_replicas
from moec.runtime.job.step import Counter, Loss, Step, run_step
from moec.runtime.job.watch import collective, watch
from moec.runtime.ops.dense_collectives import all_gather_alike

TIMEOUT = 100.0
"""Seconds: long enough for a slow step, short enough to notice a dead rank (torch's defaults are 10 to 30 minutes)."""


class Job:
    """One rank of a plan that runs under torchrun, or the only rank of a plan for one.

    Entering it joins the process group (or uses the existing one) and builds the plan's meshes; leaving it destroys a
    process group that entering made. `rank` of `world_size` processes trains on part `data_rank` of `data_size` equal
    parts of the batch. Several jobs may run in one process: each has its own groups, tiles and watch.
    """

    def __init__(
        self,
        plan: Plan,
        device: str | None = None,
        check_replicas: int = 0,
        timeout: float = TIMEOUT,
        checks: str = "first",
    ) -> None:
        if check_replicas < 0:
            raise ValueError(f"check_replicas is a number of steps, or 0 for never, not {check_replicas}")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout is a number of seconds above 0, not {timeout}")
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"device is 'cpu' or 'cuda' (AMD GPUs too), not {device!r}")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but torch finds no GPU")
        self.plan = plan
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.data_rank = plan.data_rank(self.rank) if self.rank < plan.world_size else 0
        self.data_size = plan.data_size
        self.device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._timeout = timedelta(seconds=timeout)
        self._check_every, self._steps, self._in_step = check_replicas, 0, False
        self._number, self._meshes = groups.new_job(), dict[str, DeviceMesh]()
        self._checks = Checks(checks, self._place)
        self._stack = ExitStack()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __enter__(self) -> Self:
        speak_once(self.rank)
        with ExitStack() as stack:
            if dist.is_initialized():
                self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._require_world_size()
            select(self.device_type)  # raises for an unusable `MOEC_BACKEND`, before any collective
            self.data_rank = self.plan.data_rank(self.rank)
            self._checks = self._checks_of_ranks()
            if not dist.is_initialized():
                join(self.rank, self.world_size, self.device_type, self._timeout)
                stack.callback(dist.destroy_process_group)
            self._meshes = device_meshes(self.plan.meshes, self.device_type)
            named = process_groups(self._meshes, self.device_type, self._timeout)
            watching = None
            if self.world_size > 1:
                # A second connection: a thread that waits on a shared one would block the other thread.
                store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
                seconds = self._timeout.total_seconds()
                watching = stack.enter_context(watch(store, self.rank, self.world_size, seconds))
            stack.enter_context(groups.opened(self._number, named, watching))
            stack.enter_context(triton_tiles.opened(self.plan.tiles))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _checks_of_ranks(self) -> Checks:
        tp_ranks = next(ranks for ranks in self.plan.meshes["dense"].groups("tp") if self.rank in ranks)
        return JobChecks(self._checks.mode, self._number, self.rank, self.world_size, tp_ranks, self._place)

    def _require_world_size(self) -> None:
        ranks = self.plan.world_size
        if self.world_size != ranks:
            raise JobError(
                "MOE0701",
                f"the plan is for {ranks} ranks, but this job has {self.world_size}",
                f"start it with `torchrun --nproc-per-node {ranks} …` (on several nodes, {ranks} processes in all), "
                f"or compile the file for a cluster of {self.world_size}",
            )

    # ---- what a training script calls --------------------------------------------------------------

    def build(self, device: str | torch.device | None = None, *, seed: int = 0) -> PlanModule:
        """This rank's part of the model, newly drawn on `device`. Initial values do not depend on the sharding.

        On `"meta"` nothing is allocated; `model.to_empty(device=…)` and a `state_dict` come next.
        """
        target = torch.device(device or self.device_type)
        home = RankHome(self.plan, self.rank, self._number, self._meshes, self._checks, device=target, seed=seed)
        limits = limits_of(self.plan.spec, self.plan.meshes["dense"].size("tp"), self.data_size)
        return PlanModule(self.plan.program, limits, home)

    def optimizer(self, model: PlanModule) -> AdamW:
        """The optimizer of the file's `train` block, else AdamW with its defaults.

        Raises `JobError` for parameters that the plan does not have.
        """
        require_model(model, self.plan)
        train = self.plan.spec.train
        spec = train.optimizer if train else AdamWSpec()
        by_decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in parameters_by_name(model, self.plan).items():
            by_decay[self.plan.parameters[name].decays].append(parameter)
        return make_optimizer(spec, by_decay[True], by_decay[False], model)

    def step(
        self,
        model: PlanModule,
        tokens: Tensor,
        labels: Tensor,
        *,
        microbatches: int = 1,
        loss: Loss | None = None,
        logprob_loss: Loss | None = None,
        count: Counter | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Forward, backward and gradient sums over this rank's part of the batch; returns the global loss, detached.

        tokens and labels int64 `[batch, sequence]`. The gradient is that of all ranks' whole batch, for any number of
        `microbatches` and any masked labels. With `check_replicas=N` replicas are compared before every N-th step.

        A custom loss is one of:
        - `loss(logits, labels, **inputs)`: a sum over tokens, a scalar; logits `[batch, sequence, vocab]` are whole;
        - `logprob_loss(logprobs, labels, **inputs)`: a sum over the labels' log-probabilities fp32 `[batch, sequence]`,
          0 where a label is ignored; logits stay sharded.

        It is divided by `count(labels, **inputs)`, summed over all ranks and micro-batches (default: the valid labels).
        A count that takes `logits` first needs the forward pass, and so one micro-batch. `inputs` are tensors `[batch,
        sequence, …]`, split as tokens are. The model's balance terms are added (`.aux_loss`).

        Raises `JobError` on every rank for a loss that is no scalar, a count that is 0 on all ranks, and inputs of
        other shapes.
        """
        self._require_own(model)
        self._steps += 1
        if self._check_every and self._steps % self._check_every == 0:
            self.check_replicas(model)
        step = Step(
            tokens, labels, microbatches=microbatches, loss=loss, logprob_loss=logprob_loss, count=count,
            inputs=dict(inputs or {}),
        )  # fmt: skip
        self._in_step = True
        try:
            return run_step(self, model, step)
        finally:
            self._in_step = False

    @contextmanager
    def accumulate(self, model: PlanModule, *labels: Tensor, tokens: tuple[Tensor, ...] = ()) -> Iterator[None]:
        """Inside the block, `model(tokens, labels).loss.backward()` accumulates the gradient of all micro-batches.

        `labels`: the labels of every micro-batch of the block; each loss is divided by all their valid labels.
        `tokens`: their tokens, which count padding; only for a model with a padding id and balance terms.
        Each backward pass sums gradients over the ranks; `job.step(…, microbatches=n)` sums them once.
        """
        self._require_own(model)
        if not labels:
            raise JobError("MOE0713", "job.accumulate wants the labels of every micro-batch of the block")
        if not tokens and model.counts_padding:
            raise JobError(
                "MOE0713",
                "the model has a padding id and balance terms, which count real tokens",
                "pass the tokens of every micro-batch of the block: job.accumulate(…, tokens=(…))",
            )
        if model.draws and any(part.dim() != 2 for part in labels):
            raise JobError(
                "MOE0713",
                "the model draws random numbers, which depend on the numbers of its sequences",
                "pass the labels of each micro-batch by themselves, `[batch, sequence]`",
            )
        flat, ids = (torch.cat([part.reshape(1, -1) for part in parts], 1) for parts in (labels, tokens or labels))
        model.has_accumulated = True
        sequences = sum(part.shape[0] if part.dim() else 1 for part in labels)
        with model.counting(model.count_labels(flat), model.count_tokens(ids), sequences) as used:
            yield
            look = self._checks.looks(model.seen, "accumulate", flat.device)
            used.require_whole(flat, look=look, numbered=model.draws)
            model.update_states()

    def update_states(self, model: PlanModule) -> None:
        """Gives every state of the model, such as the biases of `online`, its new value.

        For loops that call `model(tokens, labels)` and `backward()`: once per step, after the last `backward()`. It
        uses the expert loads, over all ranks, of all training forward passes since the last update. `job.step` and
        `job.accumulate` update states themselves, and discard loads counted before them. Does nothing to a model
        without states. A collective: every rank must call it, or none.

        Raises `JobError` on every rank if no forward pass came since the last update, and inside `job.accumulate`.
        """
        self._require_own(model)
        self._checks.require("update of states", model.update_complaint())
        model.update_states()

    def check_replicas(self, model: PlanModule) -> None:
        """Raises `JobError` on every rank unless ranks with the same part of a parameter have the same bits.

        States must have the same bits on every rank. A collective: every rank must call it, or none.
        """
        self._require_own(model)
        parts = {name: local_part(parameter) for name, parameter in parameters_by_name(model, self.plan).items()}
        parts |= states_by_name(model, self.plan)
        check_replicas(self.plan, parts, self.world_size, self._number + ALL_RANKS)

    def clip_grad_norm_(self, model: PlanModule, max_norm: float) -> Tensor:
        """Scales the gradients to a global norm of at most `max_norm`; returns the norm before, equal on every rank."""
        self._require_own(model)
        named = parameters_by_name(model, self.plan)
        sharded = {name: self._sharded_over(self.plan.parameters[name]) for name in named}
        gradients = {name: local_part(p.grad) for name, p in named.items() if p.grad is not None}
        return clip_gradient_norm(gradients, sharded, max_norm, next(model.parameters()).device)

    def whole_logits(self, output: ModelOutput) -> Tensor:
        """`output.logits` gathered over vocabulary and sequence, `[batch, sequence, vocab]`, differentiable.

        All ranks of a tp group must compute the same with them. A collective: every rank must call it, or none.
        """
        logits, placement = output.logits, self.plan.result_layout.get("tp")
        if not isinstance(placement, Shard):
            return logits
        whole: Tensor = all_gather_alike(logits, placement.dim, f"{self._number}tp", "whole logits")
        return whole

    def expert_loads(self, model: PlanModule) -> dict[int, Tensor]:
        """Rows per expert in the last forward pass, over all ranks: layer → int64 `[experts]`, on the CPU.

        A collective: every rank must call it, or none.
        """
        self._require_own(model)
        layers = sorted(model.expert_counts)
        if not layers:
            return {}
        counts = torch.cat([model.expert_counts[layer] for layer in layers])
        self._sum_over_all(counts, "expert loads")
        sizes = [model.expert_counts[layer].numel() for layer in layers]
        return dict(zip(layers, torch.split(counts.cpu(), sizes), strict=True))

    def drop_rates(self, model: PlanModule) -> dict[int, float]:
        """Fraction of the last forward pass's choices that a capacity dropped, over all ranks: layer → 0 to 1.

        A collective: every rank must call it, or none.
        """
        loads = self.expert_loads(model)
        tokens = torch.as_tensor(model.num_tokens, device=next(model.parameters()).device).clone()
        self._sum_over_all(tokens, "drop rates")
        total = int(tokens) // self.plan.meshes["dense"].size("tp")  # the ranks of a tp group count the same tokens
        program = self.plan.program
        choices = {call.layer: choices_per_token(program.block(call.block)) for call in layer_calls(program)}
        kept = {layer: int(load.sum()) / choices[layer] for layer, load in loads.items()}
        return {layer: 1 - rows / total if total else 0.0 for layer, rows in kept.items()}

    def save(self, path: str, model: PlanModule, optimizer: torch.optim.Optimizer) -> None:
        """Checkpoints are not supported yet."""
        raise JobError("MOE0700", "job.save: checkpoints come in a later version of moec")

    # ---- internal ------------------------------------------------------------------------------------

    @property
    def checks(self) -> Checks:
        """How its ranks check inputs together."""
        return self._checks

    @property
    def number(self) -> str:
        """The prefix of its groups' names (`moec.runtime.job.groups`)."""
        return self._number

    def _require_own(self, model: PlanModule) -> None:
        """Raises `JobError` for a model that this job did not build."""
        require_own(model, self.plan, self._number)

    def _sum_over_all(self, counts: Tensor, what: str) -> None:
        if self.world_size > 1:
            with collective("all_reduce", self._number + ALL_RANKS, what) as peers:
                dist.all_reduce(counts, group=peers)

    def _sharded_over(self, data: PlanParameter) -> tuple[str, ...]:
        mesh = None if data.mesh == "dense" else data.mesh
        return tuple(self._number + group_name(axis, mesh) for axis in data.layout.sharded_axes())

    def _place(self) -> str:
        place = [f"rank {self.rank}"] if self.world_size > 1 else []
        place += [f"step {self._steps}"] if self._in_step else []
        return ", ".join(place)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or a gradient, detached."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()
