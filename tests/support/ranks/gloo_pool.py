"""Worker processes that run functions as the ranks of a gloo job, started once and used again by every test."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from support.preloaded import CONTEXT
from support.ranks.gloo_worker import ENTERED, Failure, Task, pack, serve, unpack

STACK_SECONDS = 0.5
"""How long a hung worker gets to write its stack."""
GRACE_SECONDS = 5.0
"""How long the other ranks get to notice that one has failed."""
ENTRY_SECONDS = 60.0
"""How long ranks get to make the process group. It takes some hundredths of a second; once in some ten thousand jobs it
hung in gloo's connections."""


class RankHungError(AssertionError):
    """Some ranks did not finish in time."""


class RankDiedError(AssertionError):
    """A rank's process ended during its task."""


class _NoGroupError(Exception):
    """The ranks did not make their process group in time, and none of them has begun its task."""


class RankTracebackError(Exception):
    """The cause of an exception that a worker raised: its traceback there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass
class Worker:
    process: Any
    connection: Connection
    stack: Path


class GlooPool:
    """Up to `size` processes; the first n of them are the ranks of a job of world size n."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[Worker] = []
        self._number = 0
        self._folder = tempfile.TemporaryDirectory(prefix="moec-gloo-")

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 120.0,
        initialize: bool = True,
    ) -> list[Any]:
        """`function(*arguments)` on every rank; what each returned, by rank.

        Each call is a new job: RANK, WORLD_SIZE and the like are set, and the default process group is made before and
        destroyed after. With `initialize=False` it is not made, and the environment is all that torchrun would set.
        `function` must be importable from its module. Warnings are errors, the seed is 0 on every rank, torch uses
        one thread.

        An exception is raised again here, that of the rank that failed first, with its traceback as the cause. Raises
        `RankHungError` after `timeout` seconds, and `RankDiedError`; both restart the pool. Where the process group is
        not made in `ENTRY_SECONDS`, new processes get the task, once: nothing of it has run.
        """
        assert 1 <= world_size <= self.size, f"world size {world_size} of a pool of {self.size}"
        try:
            outcomes = self._run_once(world_size, function, arguments, timeout, initialize=initialize)
        except _NoGroupError as error:
            print(f"\nthe ranks begin again: {error}", file=sys.stderr)
            outcomes = self._run_once(world_size, function, arguments, timeout, initialize=initialize)
        _raise_first(outcomes)
        return [outcomes[rank] for rank in range(world_size)]

    def _run_once(
        self,
        world_size: int,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        timeout: float,
        *,
        initialize: bool,
    ) -> dict[int, Any]:
        self._start(world_size)
        # One store a job: in a store used twice, gloo finds the addresses of processes that are gone. A file where that
        # does, because connecting a TCPStore looks up its peer's name, which can take seconds (measured: 5 s, 1 in 20).
        self._number += 1
        file = Path(self._folder.name, f"{self._number}.store") if initialize else None
        store = None if initialize else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port if store else 0
        for rank in range(world_size):
            test = os.environ.get("PYTEST_CURRENT_TEST", "")
            task = Task(rank, world_size, port, timeout, file, test, function, arguments)
            self._workers[rank].connection.send_bytes(pack(task))
        return self._collect(world_size, timeout)

    def close(self) -> None:
        """End the workers, by force if necessary, and wait for them."""
        self._stop(force=False)
        self._folder.cleanup()

    def _start(self, world_size: int) -> None:
        started = len(self._workers)
        while len(self._workers) < world_size:
            here, there = CONTEXT.Pipe()
            stack = Path(self._folder.name, f"{len(self._workers)}.stack")
            process = CONTEXT.Process(target=serve, args=(there, stack), daemon=True)
            process.start()
            there.close()
            self._workers.append(Worker(process, here, stack))
        for worker in self._workers[started:]:
            worker.connection.recv_bytes()  # it has imported torch: no task's time pays for that

    def _stop(self, *, force: bool) -> None:
        for worker in self._workers:
            worker.connection.close()
            if force:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(GRACE_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers = []

    def _collect(self, world_size: int, timeout: float) -> dict[int, Any]:
        outcomes: dict[int, Any] = {}
        entering = set(range(world_size))
        pending = {self._workers[rank].connection: rank for rank in range(world_size)}
        deadline = time.monotonic() + timeout
        entry = time.monotonic() + ENTRY_SECONDS
        while pending:
            until = min(deadline, entry) if entering and not outcomes else deadline
            ready = wait(list(pending), max(0.0, until - time.monotonic()))
            if not ready and until < deadline:
                raise _NoGroupError(self._stop_hung(sorted(entering)))
            if not ready:
                hung = sorted(pending.values())
                stacks = self._stop_hung(hung)
                _raise_first(outcomes, note=f"ranks {hung} then hung:\n{stacks}")
                raise RankHungError(f"ranks {hung} did not finish within {timeout:g} s:\n{stacks}")
            for connection in ready:
                rank = pending[connection]
                try:
                    message = connection.recv_bytes()
                except EOFError:
                    self._bury(rank)
                if message == ENTERED:
                    entering.remove(rank)
                    continue
                del pending[connection]
                outcomes[rank] = unpack(message)
                if isinstance(outcomes[rank], Failure):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return outcomes

    def _stop_hung(self, hung: list[int]) -> str:
        """Stops all workers; where the hung ones stood."""
        for rank in hung:
            os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        stacks = "\n".join(f"rank {rank}:\n{self._workers[rank].stack.read_text()}" for rank in hung)
        self._stop(force=True)
        return stacks

    def _bury(self, rank: int) -> NoReturn:
        process = self._workers[rank].process
        process.join(GRACE_SECONDS)
        code = process.exitcode
        self._stop(force=True)
        raise RankDiedError(f"rank {rank}'s process ended while it worked, with exit code {code}")


def _raise_first(outcomes: dict[int, Any], note: str | None = None) -> None:
    failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
    if not failures:
        return
    first = min(failures, key=lambda rank: failures[rank].when)
    error = failures[first].error
    error.add_note(f"raised on rank {first}")
    for rank in sorted(failures.keys() - {first}):
        error.add_note(f"then, on rank {rank}: {failures[rank].error!r}")
    if note:
        error.add_note(note)
    raise error from RankTracebackError(failures[first].trace)
