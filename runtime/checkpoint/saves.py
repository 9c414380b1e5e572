"""All saves of a job: the last one, for which the next waits, their numbers, and when each folder got one."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from moec.runtime.checkpoint.folders import heads_in
from moec.runtime.checkpoint.peers import Peers
from moec.runtime.checkpoint.signals import SignalNotice, spare_workers
from moec.runtime.checkpoint.writing import Saving, Task, write
from moec.runtime.errors import JobError, RankError
from moec.runtime.job.checks import Complaint

if TYPE_CHECKING:
    from moec.runtime.job.watch import Watch

LEAVING_SECONDS = 20.0
"""How long a job that ends with an error waits for a save in progress."""


class Saves:
    """The saves of one job, one at a time. As a context manager it waits for the last one."""

    def __init__(self, store: Store | None, rank: int, world_size: int, watch: Watch | None = None) -> None:
        self.peers = Peers(store, rank, world_size, watch)
        self.signals = SignalNotice()
        spare_workers()
        self._last: Saving | None = None
        self._number = 0
        self._begun = time.monotonic()
        self._last_in: dict[Path, tuple[int, float]] = {}
        self._entered = set[Path]()
        self._stamps = dict[Path, int]()

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
        return self._last_in.get(folder.absolute(), (0, self._begun))

    def note(self, folder: Path, step: int, now: float) -> None:
        """Notes a scheduled save to `folder`, or a load from it, of `step`; `now` is of `time.monotonic`."""
        self._last_in[folder.absolute()] = step, now

    def enters(self, folder: Path) -> bool:
        """Whether it is the first time that the job saves to `folder` by a schedule, or the first after a load."""
        is_new = folder.absolute() not in self._entered
        self._entered.add(folder.absolute())
        return is_new

    def enter_again(self) -> None:
        """The job has loaded a checkpoint: it may go on as another run."""
        self._entered.clear()

    def stamp(self, folder: Path) -> int:
        """Now, in ns since 1970, and later than all checkpoints in `folder`, whatever the clocks of other machines."""
        last = self._stamps.get(folder)
        if last is None:
            with suppress(JobError):  # of a folder that cannot be read: the save will say so
                last = max((head.saved for _, head in heads_in(folder) if head is not None), default=0)
        self._stamps[folder] = stamp = max(time.time_ns(), (last or 0) + 1)
        return stamp

    def next_number(self) -> int:
        """The number of the next save or load; equal on all ranks."""
        self._number += 1
        return self._number
