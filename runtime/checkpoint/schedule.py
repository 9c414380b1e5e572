"""A checkpoint every few steps or seconds, and the way back to the last one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from moec.runtime.checkpoint.folders import latest, set_aside_incomplete
from moec.runtime.checkpoint.loading import load
from moec.runtime.checkpoint.saves import save
from moec.runtime.checkpoint.writing import Saving
from moec.runtime.job.groups import HOST
from moec.runtime.job.module import PlanModule
from moec.runtime.job.watch import collective

if TYPE_CHECKING:
    from moec.runtime.job.job import Job

NAME_BYTES = 256
"""The longest name of a file on common file systems, and its end."""


def checkpoint(
    job: Job,
    folder: str | Path,
    model: PlanModule,
    optimizer: Optimizer | None,
    *,
    every: int | None,
    seconds: float | None,
    keep: int | None,
    extras: Mapping[str, Any],
) -> Saving | None:
    """Saves to `folder/STEP` if it is time. `Job.checkpoint` describes it."""
    if every is None and seconds is None:
        raise ValueError("say how often: every=N steps, seconds=S, or both")
    if every is not None and every < 1:
        raise ValueError(f"every is a number of steps from 1, not {every}")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds is a number above 0, not {seconds}")
    saves, step = job.saves, model.settings["step"]
    last_step, last_time = saves.last_in(Path(folder))
    last_step = last_step if last_step <= step else 0  # `model.set(step=…)` has gone back
    due = every is not None and step // every > last_step // every
    if seconds is not None:
        # The clock of rank 0 decides: those of other ranks may differ.
        late = job.rank == 0 and time.monotonic() - last_time >= seconds
        (votes,) = job.checks.require("job.checkpoint", None, counts=(int(late),))
        due = due or (bool(votes) and step > last_step)
    if not due:
        return None
    target = Path(folder) / str(step)
    if job.rank == 0:
        set_aside_incomplete(target)
    saving = save(job, target, model, optimizer, keep, extras)
    saves.note(Path(folder), step, time.monotonic())
    return saving


def resume(
    job: Job, folder: str | Path, model: PlanModule, optimizer: Optimizer | None, extras: Mapping[str, Any]
) -> int:
    """Loads the last complete checkpoint. `Job.resume` describes it."""
    name = _latest_of_rank_0(job, Path(folder))
    if name:
        load(job, Path(folder) / name, model, optimizer, extras)
    return model.settings["step"]


def _latest_of_rank_0(job: Job, folder: Path) -> str:
    """The name of the checkpoint that rank 0 finds: another job may save or remove one meanwhile. Empty for none."""
    found = latest(folder) if job.rank == 0 else None
    name = os.fsencode(found.name) if found is not None else b""
    if job.world_size == 1:
        return os.fsdecode(name)
    buffer = torch.zeros(NAME_BYTES, dtype=torch.uint8)
    buffer[: len(name)] = torch.tensor(list(name), dtype=torch.uint8)
    with collective("broadcast", job.number + HOST, "job.resume") as peers:
        dist.broadcast(buffer, 0, group=peers)
    return os.fsdecode(bytes(buffer.tolist()).rstrip(b"\0"))
