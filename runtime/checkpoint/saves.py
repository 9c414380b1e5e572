"""The saves of a job: what the training thread does of them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Store
from torch.optim import Optimizer

from moec.runtime.checkpoint.content import Content, content_of
from moec.runtime.checkpoint.folders import refuse_existing
from moec.runtime.checkpoint.index import digest
from moec.runtime.checkpoint.parts import Part
from moec.runtime.checkpoint.peers import Peers
from moec.runtime.checkpoint.shards import Piece
from moec.runtime.checkpoint.writing import Complaint as AsJson
from moec.runtime.checkpoint.writing import Saving, Task, write
from moec.runtime.errors import JobError, RankError
from moec.runtime.job.checks import Complaint, MustMatch
from moec.runtime.job.module import PlanModule

if TYPE_CHECKING:
    from moec.runtime.job.job import Job

LEAVING_SECONDS = 20.0
"""How long a job that ends with an error waits for a save in progress."""


class Saves:
    """The saves of one job, one at a time. As a context manager it waits for the last one."""

    def __init__(self, store: Store | None, rank: int, world_size: int) -> None:
        self.peers = Peers(store, rank, world_size)
        self._last: Saving | None = None
        self._number = 0
        self._begun = time.monotonic()
        self._last_in: dict[Path, tuple[int, float]] = {}

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._last is None:
            return
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None  # a script that ends as it should
        if isinstance(error, RankError):
            self.peers.abandon()
        failure = self._last.error(None if error is None else LEAVING_SECONDS)
        if error is None and failure is not None:
            raise failure
        if error is not None:
            self.peers.abandon()

    def wait(self) -> Complaint | None:
        """Waits for the last save; its error, unless the script has seen it."""
        failure = self._last.error() if self._last is not None else None
        if failure is not None and not isinstance(failure, JobError):
            raise failure
        self._last = None
        return None if failure is None else Complaint.of(failure)

    def start(self, task: Task) -> Saving:
        """Writes in a thread."""
        self._last = Saving(task.target, lambda: write(task, self.peers))
        return self._last

    def last_in(self, folder: Path) -> tuple[int, float]:
        """The step of the last scheduled save to `folder`, or load from it, and when it was."""
        return self._last_in.get(folder.absolute(), (0, self._begun))

    def note(self, folder: Path, step: int, now: float) -> None:
        """Notes a scheduled save to `folder`, or a load from it, of `step`; `now` is of `time.monotonic`."""
        self._last_in[folder.absolute()] = step, now

    def next_number(self) -> int:
        """The number of the next save or load; equal on all ranks."""
        self._number += 1
        return self._number


def save(
    job: Job,
    path: str | Path,
    model: PlanModule,
    optimizer: Optimizer | None,
    keep: int | None,
    extras: Mapping[str, Any],
) -> Saving:
    """Copies what this rank writes to host memory, and starts writing it. `Job.save` describes it."""
    if keep is not None and keep < 1:
        raise ValueError(f"keep is a number of checkpoints from 1, not {keep}")
    saves, target, plan = job.saves, Path(path).absolute(), job.plan
    complaint = saves.wait()
    content = None
    try:
        if job.rank == 0:
            refuse_existing(target)
        content = content_of(plan, model, optimizer, extras, job.rank, job.steps).with_own_extras()
    except JobError as error:
        complaint = complaint or Complaint.of(error)
    job.checks.require("job.save", complaint, same_calls(str(path), keep, content))
    assert content is not None
    failure: AsJson | None = None
    pieces, parts = list[Piece](), dict[str, Part]()
    try:
        pieces, parts = content.ours()
    except (MemoryError, RuntimeError) as error:
        failure = ["MOE0804", f"rank {job.rank}: {target}: no memory for a copy ({str(error)[:200]})", ""]
    head = {
        "moec": plan.moec,
        "model": plan.name,
        "spec": digest(plan.spec_text.encode()),
        "step": content.settings["step"],
        "world_size": plan.world_size,
        "data_size": plan.data_size,
        "degrees": {name: dict(mesh.axes) for name, mesh in plan.meshes.items()},
        "optimizer": content.optimizer and content.optimizer["kind"],
    }
    data_ranks = [plan.data_rank(rank) for rank in range(plan.world_size)] if job.rank == 0 else ()
    return saves.start(Task(saves.next_number(), target, head, data_ranks, keep, content, pieces, parts, failure))


def same_calls(path: str, keep: int | None, content: Content | None) -> MustMatch:
    """What must match on all ranks: the path, `keep`, and the names of tensors and extras."""
    names = "\0".join([*sorted(content.parts), *sorted(content.extras)]) if content else ""
    words = "ranks give job.save other paths, `keep`, extras, or optimizers with other states"
    return MustMatch("MOE0811", words, (zlib.crc32(path.encode()), keep or 0, zlib.crc32(names.encode())))
