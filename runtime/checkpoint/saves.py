"""All saves of a job: the last one, for which the next one waits, their numbers, and the state of each folder."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from moec.runtime.checkpoint.folders import heads_in
from moec.runtime.checkpoint.format.index import Head
from moec.runtime.checkpoint.peers import Peers
from moec.runtime.checkpoint.signals import SignalNotice, spare_workers
from moec.runtime.checkpoint.writing import Saving, Task, write
from moec.runtime.errors import JobError, RankError
from moec.runtime.model.run import Run
from moec.runtime.ranks.checks import Complaint

if TYPE_CHECKING:
    from moec.runtime.ranks.watch import Watch

LEAVING_SECONDS = 20.0
"""How long a job that ends with an error waits for a save in progress."""


@dataclass(slots=True)
class _Folder:
    """What a job knows of a folder. `step` and `time`: those of the last scheduled save to it, or load from it.

    `entered`: the job has made a scheduled save there since the last load. `seen_by`: `Run.own` of the run that has
    listed the folder last. `stamp`: `Head.saved` of the last checkpoint that the job has seen or saved there.
    """

    time: float
    step: int = 0
    entered: bool = False
    seen_by: set[int] | None = None
    stamp: int | None = None


class Saves:
    """The saves of one job, one at a time. As a context manager it waits for the last one."""

    def __init__(self, store: Store | None, rank: int, world_size: int, watch: Watch | None = None) -> None:
        self.peers = Peers(store, rank, world_size, watch)
        self.signals = SignalNotice()
        spare_workers()
        self._last: Saving | None = None
        self._number = 0
        self._begun = time.monotonic()
        self._folders: dict[Path, _Folder] = {}

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None  # a script that ends as it should
        with self.signals.leaving(error):
            self._wait_for_the_last(error)

    def _wait_for_the_last(self, error: BaseException | None) -> None:
        """Waits for the last save when the job ends, with `error` or without; raises the save's error."""
        if self._last is None:
            return
        if isinstance(error, RankError):
            self.peers.abandon()
        failure = self._last.error(None if error is None else LEAVING_SECONDS)
        if error is None and failure is not None:
            raise failure
        if error is not None:
            self.peers.abandon()

    def wait(self) -> Complaint | None:
        """Waits for the last save; returns its error, unless the script has seen it."""
        failure = self._last.error() if self._last is not None else None
        if failure is not None and not isinstance(failure, JobError):
            raise failure
        self._last = None
        return None if failure is None else Complaint.of(failure, is_on_all_ranks=True)

    def start(self, task: Task) -> Saving:
        """Starts a thread that writes a checkpoint."""
        self._last = Saving(task.target, lambda: write(task, self.peers))
        return self._last

    def last_in(self, folder: Path) -> tuple[int, float]:
        """The step and the time of the last scheduled save to `folder`, or load from it."""
        known = self._known(folder)
        return known.step, known.time

    def note(self, folder: Path, step: int, now: float) -> None:
        """Notes a scheduled save to `folder`, or a load from it, of `step`; `now` is of `time.monotonic`."""
        known = self._known(folder)
        known.step, known.time = step, now

    def enters(self, folder: Path) -> bool:
        """Whether this scheduled save to `folder` is the job's first one there, or the first after a load."""
        known = self._known(folder)
        is_new, known.entered = not known.entered, True
        return is_new

    def enter_again(self) -> None:
        """Forgets which folders the job has saved to: it has loaded a checkpoint, and may go on as another run."""
        for known in self._folders.values():
            known.entered, known.seen_by = False, None

    def run_in(self, folder: Path, run: Run) -> Run:
        """`run`, or a branch of it if `folder` has later checkpoints of `run`, which `keep` would remove.

        Such checkpoints were saved before the job loaded an earlier one, or by another training that began with the
        same. Lists the folder at the first save of a run to it.
        """
        known = self._known(folder)
        if known.seen_by is not run.own and run.goes_on_in(_heads_of(folder)):
            run = run.branch(run.loaded)
        known.seen_by = run.own
        return run

    def stamp(self, folder: Path) -> int:
        """The time in ns since 1970, but later than all checkpoints in `folder`, whose clocks may have been ahead."""
        known = self._known(folder)
        if known.stamp is None:
            known.stamp = max((head.saved for head in _heads_of(folder)), default=0)
        known.stamp = max(time.time_ns(), known.stamp + 1)
        return known.stamp

    def next_number(self) -> int:
        """The number of the next save or load; equal on all ranks."""
        self._number += 1
        return self._number

    def _known(self, folder: Path) -> _Folder:
        return self._folders.setdefault(folder.absolute(), _Folder(self._begun))


def _heads_of(folder: Path) -> list[Head]:
    """The heads of the checkpoints in `folder`; none if it cannot be read, which the save will report."""
    with suppress(JobError):
        return [head for _, head in heads_in(folder) if head is not None]
    return []
