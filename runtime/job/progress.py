"""`job.progress`: a display of training on the first rank's stdout. It communicates nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor
from torch.optim import Optimizer

from moec.passes.cost.model_flops import ModelFlops
from moec.runtime.errors import is_whole, wrong_argument
from moec.runtime.job.figures import model_flops, number, peak_flops, require_figures
from moec.runtime.job.progress_display import Display, Loads, StepFigures, make_display
from moec.runtime.unwritten import warn_unwritten

if TYPE_CHECKING:
    from moec.runtime.job.job_figures import JobFigures


class Progress(Iterable[Any]):
    """A display of steps: iterate over it, or use it in a `with` block; `step` gives it figures.

    `job.progress` makes it. On a terminal it is a bar that lives; elsewhere a line at most every ten seconds, and one
    for the last step. The other ranks show nothing. It ends with the loop, the block or the job, after an error too.
    Figures are read when they are shown: a few times a second on a terminal, every ten seconds elsewhere.
    """

    _index: int | None
    """The number of the loop's step that runs now; None outside of a loop over this."""
    _loads: Loads | None
    _done: float | None
    _pending: bool
    """Whether the last step is not shown yet."""

    def __init__(self, job: JobFigures, steps: int | Iterable[Any] | None, total: int | None) -> None:
        if is_whole(steps) and steps >= 0:
            steps = range(steps)
        elif isinstance(steps, str) or (steps is not None and not isinstance(steps, Iterable)):
            help = "`for step in job.progress(1000):` or `for batch in job.progress(loader):`"
            raise wrong_argument(f"steps must be a number of steps or something to iterate over, not {steps!r}", help)
        if total is not None and (not is_whole(total) or total < 1):
            raise wrong_argument(
                f"total must be a number of steps, at least 1, not {total!r}", "leave it out if unknown"
            )
        self._job, self._items = job, steps
        self._first, self._total = _ends(steps, total)
        self._display: Display | None = None
        self._begin()

    def _begin(self) -> None:
        self._step, self._index = self._first, None
        self._figures, self._loads, self._done = dict[str, Tensor | float](), None, None
        self._pending, self._due = False, 0.0
        self._started = self._since = time.monotonic()
        self._since_tokens, self._since_step = self._job.new_tokens, self._first
        self._since_keys = self._job.attended_keys.totals()

    def __iter__(self) -> Iterator[Any]:
        if self._items is None:
            raise wrong_argument(
                "this job.progress has nothing to iterate over",
                "`for step in job.progress(1000):`, or `with job.progress() as progress:` and `progress.step(…)`",
            )
        self.close()
        self._begin()
        try:
            for index, item in enumerate(self._items, self._first):
                self._index = index
                yield item
                self._index = None
                self._moved_to(index + 1)
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(
        self,
        loss: Tensor | float | None = None,
        *,
        grad_norm: Tensor | float | None = None,
        optimizer: Optimizer | None = None,
        loads: Loads | None = None,
        done: float | None = None,
        **others: Tensor | float,
    ) -> None:
        """Takes the figures of a step, after `optimizer.step()`. Outside of a loop over this it counts the step too.

        `optimizer` gives the learning rate of its first group. `loads`: `job.expert_loads(model)`, a row per layer;
        they stay until the next. `done`: the fraction of the training, 0 to 1, in the place of the loop's. `others`
        are figures of your own. Only rank 0 reads values, and only those that it shows.

        Raises `CallError` for a figure that is not one number, and for another `done`.
        """
        named = {"loss": loss, "grad_norm": grad_norm, **others}
        figures = {name: value for name, value in named.items() if value is not None}
        require_figures(figures)
        if done is not None and not 0 <= done <= 1:
            message = f"done must be the fraction of the training, 0 to 1, not {done!r}"
            raise wrong_argument(message, "`done=step / steps`, or leave it out")
        if optimizer is not None:
            figures["lr"] = optimizer.param_groups[0]["lr"]
        # Copies: the script may zero a running sum before the display reads it.
        self._figures = {
            name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in figures.items()
        }
        self._loads, self._done = self._loads if loads is None else loads, done
        self._moved_to(self._step + 1 if self._index is None else self._index + 1)

    def close(self) -> None:
        """Shows the last step, if it is not shown yet, and ends the display. The end of a loop or block calls this."""
        if self._pending:
            self._write()
        display, self._display = self._display, None
        if display is not None:
            _try(display.close)

    def _moved_to(self, step: int) -> None:
        self._step, self._pending = step, self._job.rank == 0
        if self._pending and time.monotonic() >= self._due:
            self._write()

    def _write(self) -> None:
        self._pending = False
        if self._display is None:
            self._display = make_display()
        display = self._display
        figures = self._measure()
        if not _try(lambda: display.write(figures)):
            self._display = Display()
        self._due = time.monotonic() + display.seconds_between

    def _measure(self) -> StepFigures:
        now, job = time.monotonic(), self._job
        seconds, tokens = max(now - self._since, 1e-9), job.new_tokens - self._since_tokens
        steps = self._step - self._since_step
        rate, peak = tokens / seconds, peak_flops(job.plan)
        self._since, self._since_tokens, self._since_step = now, job.new_tokens, self._step
        totals = job.attended_keys.totals()
        # This rank's counts; other ranks' texts are assumed to be as long.
        keys = [(total - since) * job.data_size for total, since in zip(totals, self._since_keys, strict=True)]
        self._since_keys = totals
        done = self._fraction()
        return StepFigures(
            step=self._step,
            total=self._total,
            done=done,
            figures={name: number(value) for name, value in self._figures.items()},
            tokens_per_second=rate if tokens else None,
            steps_per_second=steps / seconds,
            mfu=self._flops.of(tokens, keys) / seconds / peak if tokens and peak else None,
            seconds_left=self._seconds_left(now, done),
            loads=self._loads or {},
        )

    @cached_property
    def _flops(self) -> ModelFlops:
        return model_flops(self._job.plan)

    def _fraction(self) -> float | None:
        if self._done is not None:
            return self._done
        return min(1.0, self._step / self._total) if self._total else None

    def _seconds_left(self, now: float, done: float | None) -> float | None:
        """The time left at the mean pace since the beginning; None before the first progress."""
        done_at_start = self._first / self._total if self._total and self._done is None else 0.0
        if done is None or done <= done_at_start:
            return None
        return (now - self._started) * (1 - done) / (done - done_at_start)


def _ends(items: object, total: int | None) -> tuple[int, int | None]:
    """The number of steps before the first, and of the last. A range gives both: a resumed run starts at its start."""
    if isinstance(items, range) and items.step == 1 and items.start >= 0:
        return items.start, total or max(items.stop, items.start) or None
    if total is None and isinstance(items, Sized):
        try:
            total = len(items) or None
        except TypeError:  # a DataLoader over an IterableDataset has no length
            return 0, None
    return 0, total


def _try(write: Callable[[], None]) -> bool:
    """Whether `write` succeeded; otherwise prints a warning, and training goes on."""
    try:
        write()
    except (OSError, ValueError) as error:
        warn_unwritten(error)
        return False
    return True
