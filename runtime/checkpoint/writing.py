"""The thread that writes one checkpoint beside the steps, and `Saving`, the script's handle of it."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moec.codegen.plan import Plan
from moec.runtime.checkpoint.content import Content
from moec.runtime.checkpoint.description import write_description
from moec.runtime.checkpoint.folders import remove_old
from moec.runtime.checkpoint.format.faults import unexpected
from moec.runtime.checkpoint.format.files import shown, unwritable
from moec.runtime.checkpoint.format.index import EXTRAS, empty_entry, shard_name
from moec.runtime.checkpoint.format.parts import Part
from moec.runtime.checkpoint.format.shards import HostTensor, write_shard
from moec.runtime.checkpoint.format.temporary import Temporary
from moec.runtime.checkpoint.peers import Peers
from moec.runtime.checkpoint.stages_of_checkpoint import joined_entries
from moec.runtime.errors import JobError, RankError
from moec.runtime.ranks.checks import Complaint
from moec.runtime.script import warn


class Saving:
    """A checkpoint that is being written. Dropping it is fine: the job waits and raises its error when it ends."""

    def __init__(self, path: Path, write: Callable[[], str]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._remark = ""
        self.is_reported = False
        """Whether the script has seen the error, if there was one."""
        self._finished = threading.Event()
        # `Thread.start` waits until the thread runs, which would delay the step.
        _thread.start_new_thread(self._run, (write,))

    @property
    def done(self) -> bool:
        """Whether it is written, or has failed."""
        return self._finished.is_set()

    def wait(self) -> Path:
        """Waits until it is written and durable; returns its path. Raises the same `JobError` on every rank."""
        self.error()
        self.is_reported = True
        if self._error is not None:
            raise self._error
        return self.path

    def error(self, timeout: float | None = None) -> BaseException | None:
        """Waits up to `timeout` seconds; the error that the script has not seen yet, if any. Warns of a remark once."""
        self._finished.wait(timeout)
        remark, self._remark = self._remark, ""
        if remark:
            warn(remark)
        return None if self.is_reported else self._error

    def _run(self, write: Callable[[], str]) -> None:
        try:
            self._remark = write()
        except BaseException as error:  # noqa: BLE001  (raised again by `wait`, or when the job ends)
            self._error = error
        finally:
            self._finished.set()


@dataclass(frozen=True, slots=True)
class Task:
    """One save of one rank. `head`: fields of `checkpoint.json`.

    `failure`: why there are no copies; `cause`: the exception that caused it.
    """

    number: int
    plan: Plan
    target: Path
    head: Mapping[str, Any]
    data_ranks: Sequence[int]
    keep: int | None
    content: Content
    copies: Sequence[HostTensor]
    parts: Mapping[str, Part]
    failure: Complaint | None = None
    cause: Exception | None = None


def write(task: Task, peers: Peers) -> str:
    """Writes the checkpoint together with the other ranks. Raises the same `JobError` on every rank.

    Returns a warning for the script on rank 0, empty if there is none.
    """
    words = "begin", "opened", "written", "outcome", "read"
    begin, opened, written, outcome, read = (f"{task.number}/{word}" for word in words)
    causes: list[Exception] = [task.cause] if task.cause is not None else []

    def or_failure(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The message of `act()`, or its failure as a message: the other ranks wait for one."""
        try:
            return act()
        except RankError:
            raise
        except Exception as error:  # noqa: BLE001
            causes.append(error)
            return {"failure": Complaint.of(unexpected(error, f"rank {peers.rank}: {shown(task.target)}: "))}

    peers.send(begin, or_failure(lambda: {"failure": task.failure, "extras": task.content.digests_of_extras()}))
    leader = _Leader(task, peers) if peers.rank == 0 else None
    try:
        if leader is not None:
            peers.broadcast(opened, or_failure(partial(leader.open, begin)))
        message = peers.receive(opened)
        if message["failure"] is None:
            peers.send(
                written, or_failure(lambda: _write_shard(task, peers.rank, Path(message["folder"]), message["writers"]))
            )
            if leader is not None:
                peers.broadcast(outcome, or_failure(partial(leader.close, written)))
            message = peers.receive(outcome)
        peers.send(read, None)
        if leader is not None:
            peers.collect(read)  # the process of rank 0 may hold the store, and may end next
    finally:
        if leader is not None:
            leader.clean()
    if message["failure"] is not None:
        raise Complaint(*message["failure"]).error() from (causes[0] if causes else None)
    return "" if leader is None else leader.remark


def _write_shard(task: Task, rank: int, folder: Path, writers: Mapping[str, list[int]]) -> dict[str, Any]:
    """Writes this rank's shard; returns what rank 0 needs for the index."""
    copies, trees = list(task.copies), {}
    chunks = {name: (part.chunk_number, part.dtype, part.shape, part.cuts) for name, part in task.parts.items()}
    for name, ranks in writers.items():
        if rank not in ranks:
            continue
        extra, copy = task.content.extras[name], ranks.index(rank)
        trees[name] = copy, extra.tree
        for numbered in extra.tensors:
            stored_copy = numbered._replace(name=f"{EXTRAS}{name}/{copy}/{numbered.name}")
            copies.append(stored_copy)
            chunks[stored_copy.name] = 0, stored_copy.dtype, stored_copy.shape, (1,) * len(stored_copy.shape)
    path = folder / shard_name(rank)
    try:
        written = write_shard(path, copies)
    except OSError as error:
        return {"failure": Complaint.of(unwritable(path, error, f"rank {rank}: "))}
    with_digests = {name: (*chunk, written.digests[name]) for name, chunk in chunks.items()}
    return {
        "failure": None, "bytes": written.num_bytes, "header": written.header, "chunks": with_digests, "trees": trees,
        "optimizer": None if rank % task.plan.stage_size else task.content.optimizer,
    }  # fmt: skip


class _Leader:
    """The work of rank 0 alone: it makes the folder, writes the index, and gives the folder its name."""

    def __init__(self, task: Task, peers: Peers) -> None:
        self._task, self._peers = task, peers
        self._temporary: Temporary | None = None
        self._writers: dict[str, list[int]] = {}
        self.remark = ""
        """A warning for the script about a save that has not failed."""

    def open(self, key: str) -> dict[str, Any]:
        """Makes the temporary folder, and decides which ranks write which extra. `key`: of the ranks' messages."""
        begins = self._peers.collect(key)
        failure = next((begin["failure"] for begin in begins if begin["failure"]), None)
        if failure is not None:
            return {"failure": failure}
        try:
            digests = [begin["extras"] for begin in begins]
            self._writers = {name: writers_of(name, digests, self._task.data_ranks) for name in digests[0]}
            self._temporary = Temporary(self._task.target)
        except JobError as error:
            return {"failure": Complaint.of(error)}
        return {"failure": None, "folder": str(self._temporary.path), "writers": self._writers}

    def close(self, key: str) -> dict[str, Any]:
        """Writes the index, gives the folder its name, and removes old checkpoints. `key`: of the ranks' messages."""
        reports = self._peers.collect(key)
        failure = next((report["failure"] for report in reports if report["failure"]), None)
        if failure is not None:
            return {"failure": failure}
        assert self._temporary is not None
        folder, task = self._temporary.path, self._task
        try:
            shards = [(report["bytes"], report["header"]) for report in reports]
            write_description(folder, task.target, task.plan, shards, task.head, self._index(reports))
            self._temporary.publish()
            self._temporary = None
            if task.keep is not None and (left := remove_old(task.target, task.keep)):
                self.remark = f"{shown(task.target)} is written, but `keep` could not remove {left}"
        except OSError as error:
            return {"failure": Complaint.of(unwritable(task.target, error))}
        except JobError as error:
            return {"failure": Complaint.of(error)}
        return {"failure": None}

    def clean(self) -> None:
        """Removes the temporary folder of a save that failed."""
        if self._temporary is not None:
            self._temporary.discard()

    def _index(self, reports: Sequence[Any]) -> dict[str, Any]:
        tensors: dict[str, dict[str, Any]] = {}
        for rank, report in enumerate(reports):
            for name, (number, dtype, shape, cuts, digests) in report["chunks"].items():
                entry = tensors.setdefault(name, empty_entry(dtype, shape, cuts))
                assert entry["files"][number] is None, f"{name}: two ranks wrote chunk {number}"
                entry["files"][number], entry["digests"][number] = rank, digests
        for name, entry in tensors.items():
            assert None not in entry["files"], f"{name}: no rank wrote chunk {entry['files'].index(None)}"
        content = self._task.content
        optimizer = joined_entries([r["optimizer"] for r in reports if r["optimizer"]], [*self._task.plan.parameters])
        extras = {
            name: {"loads": content.extras[name].loads, "copies": [reports[r]["trees"][name][1] for r in ranks]}
            for name, ranks in self._writers.items()
        }
        return {
            "tensors": tensors, "data_ranks": self._task.data_ranks, "settings": content.settings,
            "job_steps": content.job_steps, "job_tokens": content.job_tokens, "optimizer": optimizer,
            "extras": extras,
        }  # fmt: skip


def writers_of(name: str, digests: Sequence[Mapping[str, str]], data_ranks: Sequence[int]) -> list[int]:
    """The ranks that write extra `name`: one if all ranks have the same, else one of each data rank.

    Raises `JobError` MOE0808 if ranks with the same data rank differ.
    """
    if len({rank_digests[name] for rank_digests in digests}) == 1:
        return [0]
    first: dict[int, int] = {}
    for rank, data_rank in enumerate(data_ranks):
        other = first.setdefault(data_rank, rank)
        if digests[rank][name] != digests[other][name]:
            raise JobError(
                "MOE0808",
                f"{name} differs between ranks {other} and {rank}, which both have `job.data_rank` {data_rank}",
                "an extra is the same on all ranks, or a function of `job.data_rank`",
            )
    return [first[data_rank] for data_rank in sorted(first)]
