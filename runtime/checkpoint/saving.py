"""Begins a save: ranks agree, each copies what it writes, and a thread starts."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from moec.runtime.checkpoint.content import Content, content_of
from moec.runtime.checkpoint.description import degrees_of
from moec.runtime.checkpoint.format.faults import unexpected
from moec.runtime.checkpoint.format.files import refuse_existing, shown
from moec.runtime.checkpoint.format.parts import Part
from moec.runtime.checkpoint.format.shards import HostTensor
from moec.runtime.checkpoint.options import require_keep
from moec.runtime.checkpoint.writing import Saving, Task
from moec.runtime.errors import JobError
from moec.runtime.model.module import PlanModule
from moec.runtime.ranks.checks import Complaint, MustMatch

if TYPE_CHECKING:
    from moec.runtime.checkpoint.job_checkpoints import JobCheckpoints


def save(
    job: JobCheckpoints,
    path: str | Path,
    model: PlanModule,
    optimizer: Optimizer | None,
    keep: int | None,
    extras: Mapping[str, Any],
) -> Saving:
    """Copies what this rank writes to host memory, and starts writing it. `Job.save` describes it."""
    require_keep(keep)
    saves, target, plan = job.saves, Path(path).absolute(), job.plan
    job.bring_home("job.save", model)
    complaint = saves.wait() or model.open_step_complaint()
    content, cause = None, None
    try:
        if job.rank == 0:
            refuse_existing(target, "`job.resume(FOLDER, …)` goes on from the last checkpoint in a folder")
        content = content_of(plan, model, optimizer, extras, job.rank, job.steps, job.total_tokens)
    except JobError as error:
        complaint = complaint or Complaint.of(error)
    except Exception as error:  # noqa: BLE001 - the other ranks wait, whatever a `state_dict` raises
        complaint, cause = complaint or Complaint.of(unexpected(error, f"{shown(target)}: ")), error
    try:
        job.checks.require("job.save", complaint, *same_calls(str(path), keep, content))
    except JobError as error:
        raise error from cause
    assert content is not None
    failure: Complaint | None = None
    copies, parts, cause = list[HostTensor](), dict[str, Part](), None
    try:
        copies, parts = content.copies()
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's message
        words = f"rank {job.rank}: {shown(target)}: a copy to host memory failed: "
        failure, cause = Complaint.of(unexpected(error, words)), error
    step, stamp = content.settings["step"], 0
    if job.rank == 0:
        stamp = saves.stamp(target.parent)
        model.run = saves.run_in(target.parent, model.run).with_checkpoint(stamp)
    head = {
        "moec": plan.moec,
        "run": model.run.id,
        "ancestors": model.run.ancestors,
        "saved": stamp,
        "step": step,
        "data_size": plan.data_size,
        "degrees": degrees_of(plan),
        "optimizer": content.optimizer and content.optimizer["kind"],
    }
    data_ranks = [plan.data_rank(rank) for rank in range(plan.world_size)] if job.rank == 0 else ()
    number = saves.next_number()
    return saves.start(Task(number, plan, target, head, data_ranks, keep, content, copies, parts, failure, cause))


OPTIMIZERS = "different optimizers"


def same_calls(path: str, keep: int | None, content: Content | None) -> tuple[MustMatch, ...]:
    """The claims that must match on all ranks: the path, `keep`, and the names of extras and of tensors."""
    extras, tensors = (sorted(content.extras), sorted(content.parts)) if content else ((), ())
    claims = {
        "different paths": checksum(path),
        "different values of `keep`": keep or 0,
        "extras of different names": checksum(*extras),
        f"{OPTIMIZERS}: some have states that others lack": checksum(*tensors),
    }
    return tuple(
        MustMatch("MOE0811", f"ranks called job.save with {words}", (number,), in_stage=words.startswith(OPTIMIZERS))
        for words, number in claims.items()
    )


def checksum(*words: str) -> int:
    """A number by which ranks compare words."""
    return zlib.crc32("\0".join(words).encode())
