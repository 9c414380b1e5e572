"""The methods of `Job` that measure training and show its figures."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any
from weakref import WeakSet

from torch import Tensor

from moec.codegen.plan import Plan
from moec.runtime.calls import called
from moec.runtime.checkpoint.job_checkpoints import JobCheckpoints
from moec.runtime.inputs.attended_keys import AttendedKeys
from moec.runtime.job import loads
from moec.runtime.job.finite import Finite
from moec.runtime.job.metrics import Metrics, OutputPath
from moec.runtime.job.progress import Progress
from moec.runtime.model.module import PlanModule
from moec.runtime.model.plan_names import require_own


class JobFigures(JobCheckpoints):
    """The part of `Job` that measures and shows. `finite` counts the steps that were left out."""

    def __init__(self, plan: Plan, device: str | None, timeout: float, checks: str, on_nonfinite: str) -> None:
        super().__init__(plan, device, timeout, checks)
        self.attended_keys = AttendedKeys(plan.program, plan.spec)
        """The counts of this rank's training passes since the job began."""
        self.finite = Finite(self, on_nonfinite)
        """Keeps gradients that are not finite from the weights; counts the steps that it has skipped."""
        self._displays = WeakSet[Progress]()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for display in tuple(self._displays):  # an error keeps the frame of a loop over one
            display.close()
        super().__exit__(kind, error, trace)

    @called("job.expert_loads")
    def expert_loads(self, model: PlanModule) -> dict[int, Tensor]:
        """Rows per expert in the last forward pass, over all ranks: layer → int64 `[experts]`, on the CPU.

        A collective: every rank must call it, or none.
        """
        require_own(model, self.plan, self.number)
        return loads.last_pass_loads(self, model, "job.expert_loads").experts

    @called("job.head_loads")
    def head_loads(self, model: PlanModule) -> dict[int, Tensor]:
        """Choices of each group of attention heads (`moa`) in the last forward pass, over all ranks: layer → int64
        `[groups]`, on the CPU.

        A collective: every rank must call it, or none.
        """
        require_own(model, self.plan, self.number)
        return loads.last_pass_loads(self, model, "job.head_loads").heads

    @called("job.drop_rates")
    def drop_rates(self, model: PlanModule) -> dict[int, float]:
        """Fraction of the last forward pass's choices that a capacity dropped, over all ranks: layer → 0 to 1.

        A collective: every rank must call it, or none.
        """
        require_own(model, self.plan, self.number)
        return loads.last_pass_loads(self, model, "job.drop_rates").drop_rates(self.plan)

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
