"""The base of a job: its plan, its ranks and their groups, and its counts of steps and tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from moec.codegen.plan import Plan
from moec.runtime.errors import JobError
from moec.runtime.ranks import groups
from moec.runtime.ranks.checks import Checks, JobChecks
from moec.runtime.ranks.join import (
    await_groups,
    device_meshes,
    forget_meshes,
    joined,
    new_connection,
    number_in_store,
    process_groups,
    require_world_size,
)
from moec.runtime.ranks.watch import Watch, watch
from moec.runtime.uncaught import show_uncaught_once


class RunningJob:
    """One rank of a plan that runs. Entering it joins the process group and builds the plan's meshes.

    `rank` of `world_size` processes trains on part `data_rank` of `data_size` equal parts of the batch. `checks`: how
    ranks check inputs together. Copies of a model keep their job.
    """

    def __init__(self, plan: Plan, device: str | None, timeout: float, checks: str) -> None:
        self.plan = plan
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.data_rank = plan.data_rank(self.rank) if self.rank < plan.world_size else 0
        self.data_size = plan.data_size
        self.device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.number = groups.new_job()
        """The prefix of its groups' names (`moec.runtime.ranks.groups`)."""
        self.checks = Checks(checks, self._place)
        self.steps = 0
        """Calls of `step` and blocks of `accumulate` so far that raised no error, with those before the checkpoint that
        was loaded."""
        self.new_steps = 0
        """Of these, the ones since the job began: loading a checkpoint leaves them."""
        self.tokens = 0
        """Tokens of this rank that `step` and `accumulate` have trained on."""
        self.total_tokens = 0
        """Tokens of all ranks that the weights were trained on, with those before the checkpoint that was loaded."""
        self.new_tokens = 0
        """Tokens of all ranks that `step` and `accumulate` have trained on since the job began."""
        self._running = list[tuple[int, int]]()
        """The tokens, of this rank and of all, of each step that runs. A step inside another is of another model."""
        self._in_step, self._has_begun = False, False
        self._timeout = timedelta(seconds=timeout)
        self._meshes = dict[str, DeviceMesh]()
        self._watch: Watch | None = None
        self._stack = ExitStack()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __enter__(self) -> Self:
        show_uncaught_once(self.rank)
        if self.is_running:
            raise JobError("MOE0752", "this job has begun already", "leave out the inner `with`")
        with ExitStack() as stack:
            if dist.is_initialized():
                self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            require_world_size(self.plan, self.world_size)
            self._require_device()
            self.data_rank = self.plan.data_rank(self.rank)
            self.checks = JobChecks(
                self.checks.mode, self.number, self.rank, self.world_size, self.plan.reading_ranks(self.rank),
                self.plan.stage_size, self._place,
            )  # fmt: skip
            stack.enter_context(joined(self.rank, self.world_size, self.device_type, self._timeout))
            self._meshes = device_meshes(self.plan.meshes, self.device_type, self.plan.pipeline)
            stack.callback(forget_meshes, self._meshes.values())
            named = process_groups(self.plan, self._meshes, self.device_type, self._timeout)
            if self.world_size > 1:
                seconds, number = self._timeout.total_seconds(), number_in_store(self.rank)
                store = PrefixStore(f"watch_{number}", new_connection())
                self._watch = stack.enter_context(watch(store, self.rank, self.world_size, seconds))
                await_groups(number, self.world_size)
            stack.enter_context(groups.opened(self.number, named, self._watch))
            self._enter_more(stack)
            self._stack, self._has_begun = stack.pop_all(), True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def stages(self) -> tuple[int, ...]:
        """The numbers of this rank's pipeline stages in `plan.program.stages`; (0,) without a pipeline."""
        return self.plan.stages_of(self.rank)

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the last pipeline stage, and so the logits of an evaluation; True without a pipeline."""
        return len(self.plan.program.stages) - 1 in self.stages

    @property
    def is_running(self) -> bool:
        """Whether its groups are open."""
        return groups.is_open(self.number)

    @property
    def collective_seconds(self) -> float:
        """Seconds that this rank's host has spent in collectives, on CUDA those to start them and to wait for them."""
        return 0.0 if self._watch is None else self._watch.seconds

    def count_tokens(self, rank_tokens: int, total_tokens: int) -> None:
        """Sets the tokens of the step that runs; they count when it has ended."""
        self._running[-1] = rank_tokens, total_tokens

    def count_from(self, step: int) -> None:
        """Goes on counting from `step`. 0 begins a new training."""
        self.steps = step
        if not step:
            self.total_tokens = 0

    @contextmanager
    def counted_step(self) -> Iterator[None]:
        """Counts a step, which the block computes; neither it nor its tokens count if it raises."""
        self.steps += 1
        self.new_steps += 1
        self._running.append((0, 0))
        try:
            yield
        except BaseException:
            self.steps -= 1
            self.new_steps -= 1
            self._running.pop()
            raise
        rank_tokens, total_tokens = self._running.pop()
        self.tokens += rank_tokens
        self.new_tokens += total_tokens
        self.total_tokens += total_tokens

    def _require_device(self) -> None:
        """Raises for a device on which the job cannot run, before any collective."""

    def _enter_more(self, stack: ExitStack) -> None:
        """Enters further contexts of a subclass, for as long as the job runs."""

    def _place(self) -> str:
        """The rank and step of an error, for its message."""
        rank = [f"rank {self.rank}"] if self.world_size > 1 else []
        return ", ".join([*rank, f"step {self.steps}"] if self._in_step else rank)
