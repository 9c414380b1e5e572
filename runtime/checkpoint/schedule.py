"""A checkpoint at steps that a number divides, every few seconds, or when a signal comes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch.optim import Optimizer

from moec.runtime.checkpoint.options import require_keep, require_schedule
from moec.runtime.checkpoint.saving import save
from moec.runtime.checkpoint.writing import Saving
from moec.runtime.job.module import PlanModule

if TYPE_CHECKING:
    from moec.runtime.job.job import Job


def save_if_due(
    job: Job,
    folder: str | Path,
    model: PlanModule,
    optimizer: Optimizer | None,
    *,
    every: int | None,
    seconds: float | None,
    on_signal: int | None,
    keep: int | None,
    extras: Mapping[str, Any],
) -> Saving | None:
    """Saves to `folder/STEP` if it is time. `Job.checkpoint` describes it."""
    require_schedule(every, seconds, on_signal)
    require_keep(keep)
    saves, step = job.saves, model.settings["step"]
    last_step, last_time = saves.last_in(Path(folder))
    last_step = last_step if last_step <= step else 0  # `model.set(step=…)` has gone back
    due = every is not None and step // every > last_step // every
    is_told = False
    if seconds is not None or on_signal is not None:
        # The clock of rank 0 decides: those of other ranks may differ. A signal may reach any rank.
        late = seconds is not None and job.rank == 0 and time.monotonic() - last_time >= seconds
        told = on_signal is not None and saves.signals.has_arrived(on_signal)
        lates, tells = job.checks.require("job.checkpoint", None, counts=(int(late), int(told)))
        is_told = bool(tells)
        if is_told:
            saves.signals.hold()
        due = due or (bool(lates) and step > last_step) or (is_told and step > last_step)
    if not due:
        saving = None
    else:
        saving = save(job, Path(folder) / str(step), model, optimizer, keep, extras)
        saves.note(Path(folder), step, time.monotonic())
    if is_told and on_signal is not None:
        _end(job, saving, on_signal)
    return saving


def _end(job: Job, saving: Saving | None, number: int) -> NoReturn:
    """Waits until the last save is durable on every rank, then ends the process by the signal."""
    if saving is not None:
        saving.wait()
    job.checks.require("job.checkpoint", job.saves.wait())
    job.saves.signals.end(number)
