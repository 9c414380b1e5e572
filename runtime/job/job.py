"""A running job: `with moec.launch(plan) as job`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from moec.codegen.plan import Plan
from moec.codegen.unknown_names import KnownNames
from moec.passes.degrees.sequence_cuts import sequence_pieces
from moec.runtime import other_names
from moec.runtime.action_log import note_action
from moec.runtime.backends import select
from moec.runtime.calls import called
from moec.runtime.errors import JobError, wrong_argument
from moec.runtime.guards.every_guard import look_at
from moec.runtime.guards.guard import LogitsGiven, StepBegins
from moec.runtime.inputs.batches import limits_of
from moec.runtime.inputs.extra_inputs import ExtraInputs
from moec.runtime.job.accumulate import accumulating
from moec.runtime.job.job_figures import JobFigures
from moec.runtime.job.kernels_ahead import compile_kernels_ahead
from moec.runtime.job.step import Counter, Loss, Step, run_step
from moec.runtime.model.model_output import ModelOutput
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_names import parameters_by_name, require_model, require_own, states_by_name
from moec.runtime.ops.dense_collectives import whole_along
from moec.runtime.optimizers.clipping import hand_over, take_back, takes_scale, watch_steps
from moec.runtime.optimizers.optimizer import make_optimizer
from moec.runtime.optimizers.replica_optimizers import refuse_replica_optimizers
from moec.runtime.optimizers.torch_clipping import refuse_stages
from moec.runtime.placement.choices import read_choices
from moec.runtime.placement.place import places_of
from moec.runtime.placement.policy import PlacementPolicy
from moec.runtime.ranks import groups
from moec.runtime.ranks.groups import HOST, PIPELINE
from moec.runtime.ranks.join import (
    require_arguments,
)
from moec.runtime.ranks.replicas import check_replicas
from moec.runtime.script import warn
from moec.runtime.weights.gradients import EPS, gradient_norm, require_max_norm, scale_to
from moec.runtime.weights.masters import groups_of_shards, local_part, master_of
from moec.runtime.weights.rank import RankHome

TIMEOUT = 100.0
"""Seconds: long enough for a slow step, short enough to notice a dead rank (torch's defaults are 10 to 30 minutes)."""


class Job(JobFigures, KnownNames, owner="job", other_names=other_names.JOB):
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
        choices: str | Path | None = None,
    ) -> None:
        require_arguments(device, check_replicas, timeout)
        super().__init__(plan, device, timeout, checks, on_nonfinite)
        self._check_every, self._has_placed = check_replicas, False
        self._choices = None if choices is None else Path(choices)
        self._seen = set[object]()
        self._scaled_later = WeakSet[PlanModule]()
        """Models whose gradients `clip_grad_norm_` has handed to an optimizer."""

    def _require_device(self) -> None:
        select(self.device_type)  # raises for an unusable `MOEC_BACKEND`

    # ---- what a training script calls --------------------------------------------------------------

    @called("job.build", **other_names.BUILD)
    def build(self, device: str | torch.device | None = None, *, seed: int = 0) -> PlanModule:
        """This rank's part of the model, newly drawn on `device`. Initial values do not depend on the sharding.

        On `"meta"` nothing is allocated; `model.to_empty(device=…)` and a `state_dict` come next. Kernels are compiled
        here, on a device that has them, and not in the first step.
        """
        if not self.is_running:
            raise groups.ended_error() if self._has_begun else groups.not_begun_error(self.plan.name)
        target = _device(device or self.device_type)
        compile_kernels_ahead(self.plan, target)
        home = RankHome(
            self.plan, self.rank, self.number, self._meshes, self.checks, device=target, seed=seed,
            count_from=self.count_from, count_pass=self.attended_keys.add,
        )  # fmt: skip
        limits = limits_of(self.plan.spec, sequence_pieces(self.plan.spec), self.data_size)
        with torch.inference_mode(False):  # the parameters are to be trained
            module = PlanModule(self.plan.spec, self.plan.program, limits, home)
        if not places_of(self.plan) and self._choices is not None:
            message = f"{self.plan.name} places no experts, and `choices` is a file of placements"
            raise JobError("MOE0753", message, "leave `choices` out, or state `adapt { placement = … }`")
        if places_of(self.plan):
            self._let_place(module)
        if self.world_size > 1:
            refuse_replica_optimizers(module)
        if self.plan.pipeline > 1:
            refuse_stages(module)
        return module

    @called("job.optimizer", **other_names.OPTIMIZER)
    def optimizer(self, model: PlanModule) -> Optimizer:
        """The optimizer of the file's `train` block, else AdamW with its defaults, over the parameters not frozen.

        Raises `JobError` for parameters that the plan does not have.
        """
        require_model(model, self.plan)
        parameters, plan_parameters = parameters_by_name(model, self.plan), self.plan.parameters
        trained = {name: parameter for name, parameter in parameters.items() if not plan_parameters[name].frozen}
        masters = [master_of(parameter, plan_parameters[name], self.number) for name, parameter in trained.items()]
        with torch.inference_mode(False):
            optimizer = make_optimizer(self.plan.spec.update, masters, model)
        if model.homes is not None:
            model.homes.add(optimizer)
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
        loss_inputs = {} if inputs is None else inputs
        _require_class(
            "inputs",
            loss_inputs,
            Mapping,
            "a dict of tensors",
            "`inputs={'weights': weights}`, if the loss has an argument `weights`",
        )
        step = Step(
            tokens, labels, loss=loss, logprob_loss=logprob_loss, count=count, inputs=loss_inputs,
            microbatches=self.plan.program.microbatches if microbatches is None else microbatches,
            extra=ExtraInputs(routes, segments, padding),
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
        self.checks.require("update of states", model.update_complaint())
        model.update_states()

    @called("job.check_replicas")
    def check_replicas(self, model: PlanModule) -> None:
        """Raises `JobError` on every rank unless ranks with the same part of a parameter have the same bits.

        Ranks with the same state must have the same bits of it. A collective: every rank must call it, or none.
        """
        self._require_own(model)
        parts = {name: local_part(parameter) for name, parameter in parameters_by_name(model, self.plan).items()}
        parts |= states_by_name(model, self.plan)
        check_replicas(self.plan, parts, self.number + HOST)

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
        if model.homes is not None and model.homes.have_moved:  # ranks may differ: state_dict is a collective now
            self.checks.require("job.clip_grad_norm_", None)
        groups.require_no_messages(self.number)
        note_action("clip")
        named = parameters_by_name(model, self.plan)
        self._take_back(model)
        sharded = {name: groups_of_shards(self.plan.parameters[name], self.number) for name in named}
        gradients = {name: local_part(p.grad) for name, p in named.items() if p.grad is not None}
        device = next(model.parameters()).device
        if self.plan.pipeline > 1:  # a parameter of several stages counts on the first of its ranks
            own = self.rank // self.plan.stage_size
            sharded = {n: over for n, over in sharded.items() if self.plan.owners_of_tied.get(n, (own,))[0] == own}
        norm = gradient_norm(gradients, sharded, device, self.number + PIPELINE if self.plan.pipeline > 1 else "")
        if self.finite.skips_norm(model, norm, gradients):
            return norm
        if optimizer is None or not takes_scale(optimizer, named.values()):
            scale_to(max_norm, norm, gradients.values())
            self.finite.remember(model)
            return norm
        self._scaled_later.add(model)
        hand_over(named.values(), ((norm + EPS) / max_norm).clamp(min=1.0))
        return norm

    @called("job.whole_logits")
    def whole_logits(self, output: ModelOutput) -> Tensor:
        """`output.logits` gathered over vocabulary and sequence, `[batch, sequence, vocab]`, differentiable.

        All ranks that share sequences, those of `cp` and `tp`, must compute the same with them. A collective: every
        rank must call it, or none.
        """
        _require_class("output", output, ModelOutput, "what the model returned", "`job.whole_logits(model(tokens))`")
        gathered = whole_along(output.logits, self.plan.result_layout, (1, 2), self.number, "whole logits")
        if gathered is output.logits:
            return gathered
        if not self._running:  # `step` and `accumulate` divide losses themselves
            look_at(LogitsGiven(gathered, self.data_size, seen=self._seen))
        return gathered

    # ---- internal ------------------------------------------------------------------------------------

    @contextmanager
    def _one_step(self, model: PlanModule) -> Iterator[None]:
        """The block is a step. Before it, compares replicas if due, and scales gradients that were handed over."""
        self._require_own(model)
        with self.counted_step():
            if self._check_every and self.steps % self._check_every == 0:
                self.check_replicas(model)
            self._take_back(model)
            look_at(StepBegins(model, seen=model.seen))
            yield

    def _let_place(self, module: PlanModule) -> None:
        """Places the experts of a model between steps; of the first one, by the file of choices."""
        device, choices = torch.device(self.device_type), None
        if self._choices is not None and self._has_placed:
            if self.rank == 0:
                warn(f"{self._choices} has the placements of the first model that job.build made, not of this one")
        elif self._choices is not None:
            choices = read_choices(self._choices, self.plan, self.checks, self.rank, self.number)
        self._has_placed = True
        policy = PlacementPolicy(self.plan, self.rank, self.number, device, lambda: self.steps, choices)
        module.placement_policy, module.homes = (
            policy,
            policy.let_move(module, module.layers, self.checks, len(self._homes) + 1),
        )
        self._homes += [] if module.homes is None else [module.homes]

    def _take_back(self, model: PlanModule) -> None:
        """Scales the gradients that were handed to an optimizer which was not called since."""
        if model in self._scaled_later:
            self._scaled_later.discard(model)
            take_back(model.parameters())

    def _require_own(self, model: PlanModule) -> None:
        """Raises `JobError` for a model that this job did not build."""
        require_own(model, self.plan, self.number)

    def __repr__(self) -> str:
        state = "running" if self.is_running else "ended" if self._has_begun else "not begun"
        return (
            f"<Job of {self.plan.name}: {state}, rank {self.rank} of {self.world_size} on {self.device_type}, "
            f"{self.steps:,} {'step' if self.steps == 1 else 'steps'}>"
        )


def _device(device: str | torch.device) -> torch.device:
    """A device of torch. Raises `CallError` for other names."""
    try:
        return torch.device(device)
    except RuntimeError:
        raise wrong_argument(f"torch has no device {device!r}", "'cuda', 'cpu', 'meta', or leave it out") from None


def _require_class(name: str, value: object, kind: type, requirement: str, help: str) -> None:
    """Raises `CallError` unless the argument `name` is of class `kind`; `requirement` describes it."""
    if not isinstance(value, kind):
        raise wrong_argument(f"{name} must be {requirement}, not an object of class {type(value).__name__}", help)
