"""A running job: `with moec.launch(plan) as job`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from moec.codegen.plan import Plan
from moec.codegen.unknown_names import KnownNames
from moec.passes.ir import Shard
from moec.passes.place.sequence_cuts import sequence_pieces
from moec.runtime import other_names
from moec.runtime.backends import select
from moec.runtime.calls import called
from moec.runtime.checkpoint.saves import Saves
from moec.runtime.errors import JobError, wrong_argument
from moec.runtime.job import groups, loads
from moec.runtime.job.accumulate import accumulating
from moec.runtime.job.attended_keys import AttendedKeys
from moec.runtime.job.batches import limits_of
from moec.runtime.job.beside import Beside
from moec.runtime.job.checks import Checks, JobChecks
from moec.runtime.job.clipping import hand_over, take_back, takes_scale, watch_steps
from moec.runtime.job.finite import Finite
from moec.runtime.job.gradients import EPS, gradient_norm, require_max_norm, scale_to
from moec.runtime.job.groups import ALL_RANKS
from moec.runtime.job.job_checkpoints import JobCheckpoints
from moec.runtime.job.join import (
    device_meshes,
    forget_meshes,
    joined,
    new_connection,
    process_groups,
    require_arguments,
    require_world_size,
)
from moec.runtime.job.kernels_ahead import compile_kernels_ahead
from moec.runtime.job.leftover_gradients import warn_after_error
from moec.runtime.job.masters import groups_of_shards, local_part, master_of
from moec.runtime.job.metrics import Metrics, OutputPath
from moec.runtime.job.module import ModelOutput, PlanModule
from moec.runtime.job.optimizer import make_optimizer
from moec.runtime.job.plan_names import parameters_by_name, require_model, require_own, states_by_name
from moec.runtime.job.progress import Progress
from moec.runtime.job.rank import RankHome
from moec.runtime.job.rank_means import watch_for_mean
from moec.runtime.job.replica_optimizers import refuse_replica_optimizers
from moec.runtime.job.replicas import check_replicas
from moec.runtime.job.step import Counter, Loss, Step, run_step
from moec.runtime.job.watch import Watch, watch
from moec.runtime.ops.dense_collectives import all_gather_alike
from moec.runtime.uncaught import speak_once

TIMEOUT = 100.0
"""Seconds: long enough for a slow step, short enough to notice a dead rank (torch's defaults are 10 to 30 minutes)."""


class Job(JobCheckpoints, KnownNames, owner="job", other_names=other_names.JOB):
    """One rank of a plan that runs under torchrun, or the only rank of a plan for one.

    Entering it joins the process group (or uses the existing one) and builds the plan's meshes; the last job that
    leaves a process group destroys it, if a job made it. `rank` of `world_size` processes trains on part `data_rank` of
    `data_size` equal parts of the batch. Several jobs may run in one process: each has its own groups, tiles and watch.
    """

    def __init__(
        self,
        plan: Plan,
        device: str | None = None,
        check_replicas: int = 0,
        timeout: float = TIMEOUT,
        checks: str = "first",
        on_nonfinite: str = "raise",
    ) -> None:
        require_arguments(device, check_replicas, timeout)
        self.plan = plan
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.data_rank = plan.data_rank(self.rank) if self.rank < plan.world_size else 0
        self.data_size = plan.data_size
        self.device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._timeout = timedelta(seconds=timeout)
        self._check_every, self._in_step = check_replicas, False
        self.steps = 0
        """Calls of `step` and blocks of `accumulate` so far that raised no error, with those before the checkpoint that
        was loaded."""
        self.new_steps = 0
        """Of these, the ones since the job began: loading a checkpoint leaves them."""
        self.tokens = 0
        """Tokens of this rank that `step` and `accumulate` have trained on."""
        self.total_tokens = 0
        """Tokens of all ranks that it was trained on, with those before the checkpoint that was loaded."""
        self.new_tokens = 0
        """Tokens of all ranks that `step` and `accumulate` have trained on since the job began."""
        self.attended_keys = AttendedKeys(plan.program, plan.spec)
        """Of this rank's training since the job began."""
        self._running = list[tuple[int, int]]()
        """The tokens of each step that runs, of this rank and of all: one inside another is of another model."""
        self._seen = set[object]()
        self._watch: Watch | None = None
        self._scaled_later = WeakSet[PlanModule]()
        """Models whose gradients `clip_grad_norm_` has handed to an optimizer."""
        self._number, self._meshes = groups.new_job(), dict[str, DeviceMesh]()
        self._checks = Checks(checks, self._place)
        self.finite = Finite(self, on_nonfinite)
        """Keeps what is not finite from the weights; counts the steps that it has left out."""
        self._displays = WeakSet[Progress]()
        self._stack = ExitStack()
        self._saves: Saves | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __enter__(self) -> Self:
        speak_once(self.rank)
        if groups.is_open(self._number):
            raise JobError("MOE0752", "this job has begun already", "leave out the inner `with`")
        with ExitStack() as stack:
            if dist.is_initialized():
                self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            require_world_size(self.plan, self.world_size)
            select(self.device_type)  # raises for an unusable `MOEC_BACKEND`, before any collective
            self.data_rank = self.plan.data_rank(self.rank)
            self._checks = self._checks_of_ranks()
            stack.enter_context(joined(self.rank, self.world_size, self.device_type, self._timeout))
            stack.callback(forget_meshes)
            self._meshes = device_meshes(self.plan.meshes, self.device_type)
            named = process_groups(self._meshes, self.device_type, self._timeout)
            saves_store = None
            if self.world_size > 1:
                # Connections of their own: a thread that waits on a shared one would block the other threads.
                store, saves_store = new_connection(), new_connection()
                seconds = self._timeout.total_seconds()
                self._watch = stack.enter_context(watch(store, self.rank, self.world_size, seconds))
            stack.enter_context(groups.opened(self._number, named, self._watch))
            self._saves = stack.enter_context(Saves(saves_store, self.rank, self.world_size, self._watch))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for display in tuple(self._displays):  # an error keeps the frame of a loop over one
            display.close()
        self._stack.__exit__(kind, error, trace)

    def _checks_of_ranks(self) -> Checks:
        tp_ranks = next(ranks for ranks in self.plan.meshes["dense"].groups("tp") if self.rank in ranks)
        return JobChecks(self._checks.mode, self._number, self.rank, self.world_size, tp_ranks, self._place)

    # ---- what a training script calls --------------------------------------------------------------

    @called("job.build", **other_names.BUILD)
    def build(self, device: str | torch.device | None = None, *, seed: int = 0) -> PlanModule:
        """This rank's part of the model, newly drawn on `device`. Initial values do not depend on the sharding.

        On `"meta"` nothing is allocated; `model.to_empty(device=…)` and a `state_dict` come next. Kernels are compiled
        here, on a device that has them, and not in the first step.
        """
        if not groups.is_open(self._number):
            raise groups.ended() if self._saves is not None else groups.not_begun(self.plan.name)
        target = _device(device or self.device_type)
        compile_kernels_ahead(self.plan, target)
        home = RankHome(
            self.plan, self.rank, self._number, self._meshes, self._checks, device=target, seed=seed,
            count_from=self._count_from, attend=self.attended_keys.add,
        )  # fmt: skip
        limits = limits_of(self.plan.spec, sequence_pieces(self.plan.spec), self.data_size)
        with torch.inference_mode(False):  # the parameters are to be trained
            module = PlanModule(self.plan.spec, self.plan.program, limits, home)
        if self.world_size > 1:
            refuse_replica_optimizers(module)
        return module

    @called("job.optimizer", **other_names.OPTIMIZER)
    def optimizer(self, model: PlanModule) -> Optimizer:
        """The optimizer of the file's `train` block, else AdamW with its defaults, over what the plan does not freeze.

        Raises `JobError` for parameters that the plan does not have.
        """
        require_model(model, self.plan)
        named, datas = parameters_by_name(model, self.plan), self.plan.parameters
        trained = {name: parameter for name, parameter in named.items() if not datas[name].frozen}
        masters = [master_of(parameter, datas[name], self._number) for name, parameter in trained.items()]
        with torch.inference_mode(False):
            optimizer = make_optimizer(self.plan.spec.update, masters, model)
        self.finite.guard(optimizer, model)
        watch_steps(optimizer)
        return optimizer

    @called("job.step", **other_names.STEP)
    def step(
        self,
        model: PlanModule,
        tokens: Tensor,
        labels: Tensor,
        *,
        microbatches: int | None = None,
        loss: Loss | None = None,
        logprob_loss: Loss | None = None,
        count: Counter | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        routes: Tensor | None = None,
        segments: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Forward, backward and gradient sums over this rank's part of the batch; returns the global loss.

        The loss is fp32, 0-d and detached: `backward()` has run. Gradients are in `.grad`, added to those before.
        tokens and labels int64 `[batch, sequence]`. The gradient is that of all ranks' whole batch, for any number of
        `microbatches` (default: the plan's) and any masked labels. With `check_replicas=N` replicas are compared before
        every N-th step or block of `accumulate`.

        A custom loss is one of:
        - `loss(logits, labels, **inputs)`: a sum over tokens, a scalar; logits `[batch, sequence, vocab]` are whole;
        - `logprob_loss(logprobs, labels, **inputs)`: a sum over the labels' log-probabilities fp32 `[batch, sequence]`,
          0 where a label is ignored; logits stay sharded.

        It is divided by `count(labels, **inputs)`, summed over all ranks and micro-batches (default: the valid labels).
        A count that takes `logits` first needs the forward pass, and so one micro-batch. `inputs` are tensors `[batch,
        sequence, …]`, split as tokens are. The model's balance terms are added (`.aux_loss`).

        `routes`, for a plan with `replay`: the experts of each token, int64 `[batch, sequence, mixtures, k]`.
        `segments`, for a model that takes them: which text each token belongs to, int64 `[batch, sequence]`, not
        descending. `padding`, for a model that takes it: bool or int64 `[batch, sequence]`, True or 1 for padding.

        Raises `JobError` on every rank for a loss that is no scalar or not finite, a count that is 0 on all ranks, and
        inputs of other shapes.
        """
        given = {} if inputs is None else inputs
        _require_class(
            "inputs",
            given,
            Mapping,
            "a dict of tensors",
            "`inputs={'weights': weights}`, if the loss has an argument `weights`",
        )
        step = Step(
            tokens, labels, loss=loss, logprob_loss=logprob_loss, count=count, inputs=given,
            microbatches=self.plan.program.microbatches if microbatches is None else microbatches,
            beside=Beside(routes, segments, padding),
        )  # fmt: skip
        with self._one_step(model):
            self._in_step = True
            try:
                return run_step(self, model, step)
            finally:
                self._in_step = False

    @called("job.accumulate", model="labels are those of every micro-batch: `with job.accumulate(model, one, two):`")
    @contextmanager
    def accumulate(
        self,
        model: PlanModule,
        *labels: Tensor,
        tokens: tuple[Tensor, ...] = (),
        padding: tuple[Tensor, ...] = (),
    ) -> Iterator[None]:
        """Inside the block, `model(tokens, labels).loss.backward()` accumulates the gradient of all micro-batches.

        `labels`: the labels of every micro-batch of the block; each loss is divided by all their valid labels.
        `tokens`: their tokens, which count padding; only for a model with a padding id and balance terms. `padding`:
        their padding; only for a model that takes padding and has balance terms.
        Each backward pass sums gradients over the ranks; `job.step(…, microbatches=n)` sums them once, at ZeRO 0 and 1.
        `.aux_loss` is each micro-batch's share of the step's balance terms: add it to a loss of your own as it is, and
        give `model` the labels all the same; `.loss` may stay unused. The block counts as a step; its tokens count at
        its end. A block that raises an error counts neither.

        Raises `JobError` if the labels are not those of its forward passes.
        """
        with self._one_step(model), accumulating(self, model, labels, tokens, padding):
            yield

    @called("job.update_states")
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

    @called("job.check_replicas")
    def check_replicas(self, model: PlanModule) -> None:
        """Raises `JobError` on every rank unless ranks with the same part of a parameter have the same bits.

        States must have the same bits on every rank. A collective: every rank must call it, or none.
        """
        self._require_own(model)
        parts = {name: local_part(parameter) for name, parameter in parameters_by_name(model, self.plan).items()}
        parts |= states_by_name(model, self.plan)
        check_replicas(self.plan, parts, self.world_size, self._number + ALL_RANKS)

    @called("job.clip_grad_norm_", max_norm="1.0 is usual")
    def clip_grad_norm_(self, model: PlanModule, max_norm: float, *, optimizer: Optimizer | None = None) -> Tensor:
        """Scales the gradients to a global norm of at most `max_norm`; returns the norm before, equal on every rank.

        With `optimizer`, its next `step()` scales them while it reads them, with results that are equal up to rounding.
        Until then reading or changing them raises `JobError`; `zero_grad()` drops them. An optimizer that cannot, such
        as SGD, or that lacks some of the parameters, finds them scaled, as does a `step` whose closure clips. Raises
        `JobError` on every rank for a norm that is not finite, unless the job's `on_nonfinite` says otherwise.
        """
        self._require_own(model)
        require_max_norm(max_norm)
        named = parameters_by_name(model, self.plan)
        self._take_back(model)
        sharded = {name: groups_of_shards(self.plan.parameters[name], self._number) for name in named}
        gradients = {name: local_part(p.grad) for name, p in named.items() if p.grad is not None}
        device = next(model.parameters()).device
        norm = gradient_norm(gradients, sharded, device)
        if self.finite.stops_at_norm(model, norm, gradients):
            return norm
        if optimizer is None or not takes_scale(optimizer, named.values()):
            scale_to(max_norm, norm, gradients.values())
            self.finite.saw(model)
            return norm
        self._scaled_later.add(model)
        hand_over(named.values(), ((norm + EPS) / max_norm).clamp(min=1.0))
        return norm

    @called("job.whole_logits")
    def whole_logits(self, output: ModelOutput) -> Tensor:
        """`output.logits` gathered over vocabulary and sequence, `[batch, sequence, vocab]`, differentiable.

        All ranks of a tp group must compute the same with them. A collective: every rank must call it, or none.
        """
        _require_class("output", output, ModelOutput, "what the model returned", "`job.whole_logits(model(tokens))`")
        logits, placement = output.logits, self.plan.result_layout.get("tp")
        if not isinstance(placement, Shard):
            return logits
        whole: Tensor = all_gather_alike(logits, placement.dim, f"{self._number}tp", "whole logits")
        if not self._running:  # `step` and `accumulate` know what their losses are divided by
            watch_for_mean(self._seen, whole, self.data_size)
        return whole

    @called("job.expert_loads")
    def expert_loads(self, model: PlanModule) -> dict[int, Tensor]:
        """Rows per expert in the last forward pass, over all ranks: layer → int64 `[experts]`, on the CPU.

        A collective: every rank must call it, or none.
        """
        self._require_own(model)
        return loads.of_last_pass(self, model, "job.expert_loads").experts

    @called("job.head_loads")
    def head_loads(self, model: PlanModule) -> dict[int, Tensor]:
        """Choices of each group of attention heads (`moa`) in the last forward pass, over all ranks: layer → int64
        `[groups]`, on the CPU.

        A collective: every rank must call it, or none.
        """
        self._require_own(model)
        return loads.of_last_pass(self, model, "job.head_loads").heads

    @called("job.drop_rates")
    def drop_rates(self, model: PlanModule) -> dict[int, float]:
        """Fraction of the last forward pass's choices that a capacity dropped, over all ranks: layer → 0 to 1.

        A collective: every rank must call it, or none.
        """
        self._require_own(model)
        return loads.of_last_pass(self, model, "job.drop_rates").drop_rates(self.plan)

    @called(
        "job.metrics",
        progress="leave it out; the display is a loop: `progress = job.progress(STEPS)`, `for step in progress:`, and "
        "in it `progress.step(loss)`",
    )
    def metrics(
        self, path: OutputPath = None, *, tensorboard: OutputPath = None, every: int = 1, start: int | None = None
    ) -> Metrics:
        """`with job.metrics("run.jsonl") as metrics:` and `metrics.step(…)` after every step write figures of training.

        `path`: a file of JSON lines, appended to. `tensorboard`: a folder. `every=N`: measure every N-th step. `start`:
        steps taken before, by default `job.steps`. Raises `JobError` if ranks differ in arguments, or if the package
        for `tensorboard` is missing.
        """
        return Metrics(self, path, tensorboard, every=every, start=start)

    @called("job.progress")
    def progress(self, steps: int | Iterable[Any] | None = None, *, total: int | None = None) -> Progress:
        """`for step in progress` shows a bar of `progress = job.progress(1000)`; `progress.step(loss)` fills it.

        `steps`: a number of steps, counted from 0; `range(job.steps, 1000)` in a run that goes on; batches to iterate
        over; or None in a `with` block without a loop over it. `total`: how many there are, where `steps` does not say
        so. On the first rank's stdout: step, figures, tokens/s, MFU and the time left; live on a terminal, a line at
        most every ten seconds elsewhere. No collective.
        """
        progress = Progress(self, steps, total)
        self._displays.add(progress)
        return progress

    @property
    def collective_seconds(self) -> float:
        """Seconds that this rank's host has spent in collectives, on CUDA those to start them and to wait for them."""
        return 0.0 if self._watch is None else self._watch.seconds

    # ---- internal ------------------------------------------------------------------------------------

    def count_tokens(self, of_rank: int, of_all: int) -> None:
        """Notes the tokens of the step that runs; they count when it has ended."""
        self._running[-1] = of_rank, of_all

    @property
    def checks(self) -> Checks:
        """How its ranks check inputs together."""
        return self._checks

    @property
    def saves(self) -> Saves:
        """Its saves. Raises `JobError` outside of `with`."""
        if self._saves is None or not groups.is_open(self._number):
            raise groups.ended()
        return self._saves

    @property
    def number(self) -> str:
        """The prefix of its groups' names (`moec.runtime.job.groups`)."""
        return self._number

    @contextmanager
    def _one_step(self, model: PlanModule) -> Iterator[None]:
        """Counts a step, which the block computes; neither it nor its tokens count if it raises.

        Before, compares replicas if it is the step for that, and scales gradients that wait for an optimizer.
        """
        self._require_own(model)
        self.steps += 1
        self.new_steps += 1
        self._running.append((0, 0))
        try:
            if self._check_every and self.steps % self._check_every == 0:
                self.check_replicas(model)
            self._take_back(model)
            warn_after_error(model)
            yield
        except BaseException:
            self.steps -= 1
            self.new_steps -= 1
            self._running.pop()
            raise
        of_rank, of_all = self._running.pop()
        self.tokens += of_rank
        self.new_tokens += of_all
        self.total_tokens += of_all

    def _count_from(self, step: int) -> None:
        self.steps = step
        if not step:
            self.total_tokens = 0

    def _take_back(self, model: PlanModule) -> None:
        """Scales the gradients that were handed to an optimizer whose step did not come."""
        if model in self._scaled_later:
            self._scaled_later.discard(model)
            take_back(model.parameters())

    def _require_own(self, model: PlanModule) -> None:
        """Raises `JobError` for a model that this job did not build."""
        require_own(model, self.plan, self._number)

    def __repr__(self) -> str:
        state = "running" if groups.is_open(self._number) else "ended" if self._saves is not None else "not begun"
        return (
            f"<Job of {self.plan.name}: {state}, rank {self.rank} of {self.world_size} on {self.device_type}, "
            f"{self.steps:,} {'step' if self.steps == 1 else 'steps'}>"
        )

    def _place(self) -> str:
        rank = [f"rank {self.rank}"] if self.world_size > 1 else []
        return ", ".join([*rank, f"step {self.steps}"] if self._in_step else rank)


def _device(device: str | torch.device) -> torch.device:
    """A device of torch. Raises `CallError` for another word."""
    try:
        return torch.device(device)
    except RuntimeError:
        raise wrong_argument(f"torch has no device {device!r}", "'cuda', 'cpu', 'meta', or leave it out") from None


def _require_class(name: str, value: object, kind: type, wanted: str, help: str) -> None:
    """Raises `CallError` unless the argument `name` is of class `kind`, which is what is `wanted`."""
    if not isinstance(value, kind):
        raise wrong_argument(f"{name} must be {wanted}, not an object of class {type(value).__name__}", help)
