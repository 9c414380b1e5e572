"""`job.metrics`: figures of training steps, to JSON lines and to TensorBoard."""

from __future__ import annotations

import importlib.util
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from moec.codegen.plan import Plan
from moec.runtime.errors import is_whole, wrong_argument
from moec.runtime.job.figures import model_flops, number, peak_flops, require_figures
from moec.runtime.job.loads import last_pass_loads
from moec.runtime.job.metric_outputs import JsonLines, Output, TensorBoard
from moec.runtime.model.module import PlanModule
from moec.runtime.ranks.checks import Complaint, MustMatch
from moec.runtime.unwritten import warn_unwritten

if TYPE_CHECKING:
    from moec.runtime.job.job_figures import JobFigures

OutputPath = str | PathLike[str] | None
"""Where an output goes; None leaves it out."""

Record = dict[str, Any]
"""The figures of one step: numbers, and numbers by layer (`load`, `head_load`, `drop_rate`, of placed experts)."""

OWN_FIGURES = {
    "step",
    "skipped",
    "tokens",
    "total_tokens",
    "tokens_per_second",
    "seconds",
    "mfu",
    "memory",
    "collective_seconds",
    "load",
    "head_load",
    "drop_rate",
    "guests",
    "guest_bytes",
    "home_rows",
    "rows",
    "moved",
    "predicted_seconds",
    "predicted_unplaced",
    "step_seconds",
    "move_seconds",
    "undone",
    "resumed",
}
"""Names of the job's own figures; besides `loss`, `grad_norm` and, with an optimizer, `lr`."""

OTHER_METRICS = (
    "ranks differ in whether job.metrics has outputs, or in `every` or `start`: give every rank the same; the first "
    "rank alone writes"
)

NO_TENSORBOARD = Complaint(
    "MOE0717",
    "TensorBoard's writer is in the package tensorboard, which is not installed",
    "pip install tensorboard, or leave `tensorboard=` out",
)


class Metrics:
    """Measures every `every`-th training step; other steps cost a few additions.

    Made by `job.metrics`. A measured step waits for the device and takes two small all_reduces, so that every rank must
    call `step`; the first raises if a rank makes another call. The first rank writes. An output that cannot be written
    is named once on stderr, and left out from then on. Without outputs nothing is measured.
    """

    def __init__(
        self,
        job: JobFigures,
        path: OutputPath,
        tensorboard: OutputPath,
        *,
        every: int = 1,
        start: int | None = None,
    ) -> None:
        if not is_whole(every) or every < 1:
            raise wrong_argument(
                f"every must be a number of steps, at least 1, not {every!r}", "leave it out for every step"
            )
        if start is not None and (not is_whole(start) or start < 0):
            message = f"start must be the number of steps taken before, at least 0, not {start!r}"
            raise wrong_argument(message, "leave it out to count on from `job.steps`")
        outputs: dict[str, object] = {"path": path, "tensorboard": tensorboard}
        for name, output in outputs.items():
            if output is not None and not isinstance(output, str | PathLike):
                message = f"`{name}` must be a path, not an object of class {type(output).__name__}"
                raise wrong_argument(message, "`job.metrics('run.jsonl', every=10)`; or `tensorboard='runs/1'`")
        self._job, self._every, self._steps = job, every, job.steps if start is None else start
        self._follows_job, self._loaded_steps = start is None, job.steps - job.new_steps
        self._has_outputs = path is not None or tensorboard is not None
        settings = (int(self._has_outputs), every, self._steps)
        lacks = tensorboard is not None and importlib.util.find_spec("tensorboard") is None
        complaint = NO_TENSORBOARD if lacks else None
        job.checks.require("job.metrics", complaint, MustMatch("MOE0713", OTHER_METRICS, settings))
        self._may_drop = self._has_outputs and _may_drop(job.plan)
        self._outputs: list[Output] = []
        self._tokens = self._since_tokens = 0
        self._since = self._started = time.monotonic()
        self._since_collectives, self._since_job_tokens = job.collective_seconds, job.new_tokens
        self._since_keys = job.attended_keys.totals()
        if job.rank or not self._has_outputs:
            return
        self._flops, self._peak = model_flops(job.plan), peak_flops(job.plan)
        if path is not None:
            self._open(lambda: JsonLines(path, self._steps))
        if tensorboard is not None:
            self._open(lambda: TensorBoard(tensorboard, self._steps))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes every output; leaving the `with` block does."""
        for output in tuple(self._outputs):
            self._try(output, output.close)
        self._outputs = []

    def step(
        self,
        model: PlanModule,
        loss: Tensor | float,
        *,
        grad_norm: Tensor | float | None = None,
        optimizer: Optimizer | None = None,
        tokens: int | None = None,
        **others: Tensor | float,
    ) -> Record | None:
        """Call it after every optimizer step, on every rank. Returns the record on the first rank, if there is one.

        `optimizer` gives the learning rate of its first group. `tokens`: of this step, over all ranks; by default those
        of `job.step` and `job.accumulate`. `others` are figures of your own, written as they are.

        Raises `CallError` for a figure that is not one number, and for one with a name of the job's own.
        """
        require_figures(others | {"loss": loss} | ({} if grad_norm is None else {"grad_norm": grad_norm}))
        _require_names(others, has_lr=optimizer is not None)
        self._resume()
        self._steps += 1
        self._count(tokens)
        if not self._has_outputs or self._steps % self._every:
            return None
        keys = self._job.attended_keys.totals()
        new_keys = [round(total - since) for total, since in zip(keys, self._since_keys, strict=True)]
        last, self._since_keys = last_pass_loads(self._job, model, "metrics.step", also=new_keys), keys
        heads = {layer: _skew(counts) for layer, counts in last.heads.items()}
        loads, drops = last.experts, last.drop_rates(self._job.plan) if self._may_drop else {}
        if self._job.rank:
            return None
        record: Record = {"step": self._steps, "loss": number(loss)}
        record |= {} if grad_norm is None else {"grad_norm": number(grad_norm)}
        record |= {} if optimizer is None else {"lr": number(optimizer.param_groups[0]["lr"])}
        record |= {"skipped": self._job.finite.skipped} if self._job.finite.skips else {}
        record |= self._rates(last.also)
        record |= {name: number(value) for name, value in others.items()}
        record["load"] = {layer: _skew(counts) for layer, counts in loads.items()}
        record |= {"head_load": heads} if heads else {}
        record |= {"drop_rate": drops} if drops else {}
        record |= model.placement_policy.figures(model.layers, loads) if model.placement_policy is not None else {}
        for output in tuple(self._outputs):
            self._try(output, lambda output=output: output.write(record))
        return record

    def _resume(self) -> None:
        """Continues after the steps of a checkpoint that the job has loaded since, unless `start` was given."""
        loaded = self._job.steps - self._job.new_steps
        if not self._follows_job or loaded == self._loaded_steps:
            return
        self._steps += loaded - self._loaded_steps
        self._loaded_steps = loaded
        for output in tuple(self._outputs):
            self._try(output, lambda output=output: output.resume(self._steps))

    def _count(self, tokens: int | None) -> None:
        """Counts a step's tokens, on every rank: `tokens`, or those that the job counted."""
        by_job = self._job.new_tokens - self._since_job_tokens
        counted = by_job if tokens is None else tokens
        self._job.total_tokens += counted - by_job
        self._since_job_tokens = self._job.new_tokens
        self._since_tokens += counted
        self._tokens += counted

    def _rates(self, keys: Sequence[int]) -> Record:
        """Figures of the time since the last record. `keys`: the counts of `AttendedKeys` in that time."""
        now, collectives = time.monotonic(), self._job.collective_seconds
        seconds = max(now - self._since, 1e-9)
        rate = self._since_tokens / seconds
        rates: Record = {"tokens": self._tokens, "total_tokens": self._job.total_tokens}
        rates |= {"tokens_per_second": rate, "seconds": now - self._started}
        if self._peak is not None:
            rates["mfu"] = self._flops.of(self._since_tokens, keys) / seconds / self._peak
        rates |= {"memory": _memory(self._job.device_type), "collective_seconds": collectives - self._since_collectives}
        self._since, self._since_collectives, self._since_tokens = now, collectives, 0
        return rates

    def _open(self, make: Any) -> None:
        try:
            self._outputs.append(make())
        except (OSError, ValueError) as error:
            warn_unwritten(error)

    def _try(self, output: Output, write: Any) -> None:
        try:
            write()
        except (OSError, ValueError) as error:
            self._outputs.remove(output)
            warn_unwritten(error)
            with suppress(OSError, ValueError):
                output.close()


def _require_names(names: Iterable[str], *, has_lr: bool) -> None:
    """Raises `CallError` for a name that a record has already."""
    reserved = OWN_FIGURES | ({"lr"} if has_lr else set())
    if name := next((name for name in names if name in reserved), None):
        message = f"the job writes a figure {name} itself: give yours another name"
        raise wrong_argument(message, f"its own are loss, grad_norm, {', '.join(sorted(reserved))}")


def _skew(counts: Tensor) -> float:
    """Rows of the busiest expert over the mean; 1 without rows."""
    total = float(counts.sum())
    return float(counts.max()) * len(counts) / total if total else 1.0


def _may_drop(plan: Plan) -> bool:
    return any(layer.moe is not None and layer.moe.drops for layer in plan.spec.model.layers)


def _memory(device_type: str) -> int:
    """Peak bytes: on CUDA of torch's allocations, on CPU of the process (its maximum resident set size)."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024
