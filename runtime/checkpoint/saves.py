"""All saves of a job: the last one, for which the next waits, their numbers, and what it knows of each folder."""

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
    """What a job knows of a folder. `step` and `time`: of the last scheduled save to it, or load from it.

    `entered`: since the last load, the job has come to a save by a schedule; `seen_by`: `Run.own` of the run that has
    looked there last. `stamp`: of the last checkpoint there that it has seen or saved.
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
        """Waits for the last save when the job ends, with `error` or without; raises what it has failed with."""
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
        """Waits for the last save; its error, unless the script has seen it."""
        failure = self._last.error() if self._last is not None else None
        if failure is not None and not isinstance(failure, JobError):
            raise failure
        self._last = None
        return None if failure is None else Complaint.of(failure, of_all_ranks=True)

    def start(self, task: Task) -> Saving:
        """Writes in a thread."""
        self._last = Saving(task.target, lambda: write(task, self.peers))
        return self._last

    def last_in(self, folder: Path) -> tuple[int, float]:
        """The step of the last scheduled save to `folder`, or load from it, and when it was."""
        known = self._known(folder)
        return known.step, known.time

    def note(self, folder: Path, step: int, now: float) -> None:
        """Notes a scheduled save to `folder`, or a load from it, of `step`; `now` is of `time.monotonic`."""
        known = self._known(folder)
        known.step, known.time = step, now

    def enters(self, folder: Path) -> bool:
        """Whether it is the first time that the job saves to `folder` by a schedule, or the first after a load."""
        known = self._known(folder)
        is_new, known.entered = not known.entered, True
        return is_new

    def enter_again(self) -> None:
        """The job has loaded a checkpoint: it may go on as another run."""
        for known in self._folders.values():
            known.entered, known.seen_by = False, None

    def run_in(self, folder: Path, run: Run) -> Run:
        """`run`, or a branch of it if `folder` has later checkpoints of it, which `keep` would remove.

        They are of before the job has loaded an earlier one, or of another training that has begun with the same. Looks
        when a training comes to the folder.
        """
        known = self._known(folder)
        if known.seen_by is not run.own and run.goes_on_in(_heads_of(folder)):
            run = run.branch(run.loaded)
        known.seen_by = run.own
        return run

    def stamp(self, folder: Path) -> int:
        """Now, in ns since 1970, and later than all checkpoints in `folder`, whatever the clocks of other machines."""
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
    """Of the checkpoints in `folder`; none of one that cannot be read: the save will say so."""
    with suppress(JobError):
        return [head for _, head in heads_in(folder) if head is not None]
    return []
