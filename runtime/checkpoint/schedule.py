"""Scheduled checkpoints: at steps that a number divides, every few seconds, or when a signal arrives."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch.optim import Optimizer

from moec.runtime.checkpoint.folders import NUMBER, heads_in
from moec.runtime.checkpoint.format.files import shown
from moec.runtime.checkpoint.options import require_keep, require_schedule
from moec.runtime.checkpoint.saving import save
from moec.runtime.checkpoint.writing import Saving
from moec.runtime.errors import JobError
from moec.runtime.model.module import PlanModule
from moec.runtime.ranks.checks import Complaint
from moec.runtime.script import warn

if TYPE_CHECKING:
    from moec.runtime.checkpoint.job_checkpoints import JobCheckpoints


def save_if_due(
    job: JobCheckpoints,
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
    if saves.enters(Path(folder)):
        first = None if every is None else step if due else (step // every + 1) * every
        complaint = None
        if job.rank == 0:
            model.run = saves.run_in(Path(folder), model.run)
            complaint = _complaint_about_others(Path(folder), model, first, every)
        job.checks.require("job.checkpoint", complaint)
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


def _complaint_about_others(folder: Path, model: PlanModule, first: int | None, every: int | None) -> Complaint | None:
    """On rank 0: warns of other runs' checkpoints; returns why the first save would fail, or None.

    `first`: the step of the first save, after which they come at multiples of `every`.
    """
    try:
        checkpoints = heads_in(folder)
    except JobError as error:
        return Complaint.of(error, is_on_all_ranks=True)
    ways = f"another folder keeps runs apart; `job.resume({str(folder)!r}, …)` before the first step goes on from it"
    steps = {int(path.name) for path, _ in checkpoints if re.fullmatch(NUMBER, path.name)}
    if first in steps:
        message = f"{shown(folder / str(first))}: exists, and the first save of this run would have its name"
        ways = "save into another folder" if model.run.ancestors else ways  # it has gone on from a checkpoint
        return Complaint("MOE0803", message, f"{ways}; or move it away", is_on_all_ranks=True)
    other = next((path for path, head in checkpoints if head is not None and not model.run.has(head)), None)
    if other is not None:
        in_the_way = (n for n in steps if first is not None and every is not None and n > first and n % every == 0)
        taken = min(in_the_way, default=None)
        end = "" if taken is None else f". The save at step {taken} will fail: {shown(folder / str(taken))} exists"
        warn(
            f"{shown(folder)} has checkpoints of another run, the last of them {other.name}: `keep` leaves them, and "
            f"job.resume takes the run that has saved last; {ways}{end}"
        )
    return None


def _end(job: JobCheckpoints, saving: Saving | None, number: int) -> NoReturn:
    """Waits until the last save is durable on every rank, then ends the process by the signal."""
    if saving is not None:
        saving.wait()
    job.checks.require("job.checkpoint", job.saves.wait())
    job.saves.signals.end(number)
