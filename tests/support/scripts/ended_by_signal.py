"""Jobs in processes of their own that get SIGTERM: test_checkpoint_signals.py runs it.

`ended_by_signal.py FOLDER`: for each of `CASES` a job that trains three steps, of which step 2 is long. Prints a line
of JSON for each: the case, and of each rank its exit status and the steps that it has trained. Checkpoints go to
FOLDER/CASE.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from support.ranks.checkpoints import plan_of, train
from support.scripts.forked_ranks import forked_ranks
from torch.utils.data import DataLoader, Dataset

import moec
from moec.runtime.checkpoint import writing

CASES = {
    "one rank": 2,  # the last rank gets it in step 2
    "all ranks, twice": 2,  # every rank gets it in step 2, and again before the save ends
    "in the wait": 2,  # it comes while leaving the job waits for the save of step 3
    "with a worker": 1,  # it comes to the worker that reads the data too, between two steps
    "after the last call": 1,  # nothing is left to save
    "failure": 1,  # it comes, and then the script raises
    "full disk": 1,  # it comes, and the save fails
}
"""The number of ranks of each case."""
TIMEOUT = 600.0
TICK = 0.2
"""Seconds between two looks of the watch."""
LONG = 0.8


def be_told(after: float = 0.0) -> None:
    """Sends SIGTERM to this process, in `after` seconds."""
    threading.Timer(after, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if not after:
        time.sleep(0.1)


def slow_shard(*arguments: Any) -> Any:
    time.sleep(LONG)
    return plain_shard(*arguments)


def told_before_shard(*arguments: Any) -> Any:
    """By then the script is leaving the job."""
    time.sleep(LONG)
    be_told()
    return plain_shard(*arguments)


def no_shard(*arguments: Any) -> Any:
    raise OSError(28, "No space left on device")


plain_shard, writing.write_shard = writing.write_shard, slow_shard


def run_rank(folder: Path, case: str, trained: Told) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    with moec.launch(plan_of({"ranks": ranks, "ep": ranks}), device="cpu", timeout=TIMEOUT) as job:
        if job._watch is not None:
            job._watch.tick = TICK
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        for step, _ in enumerate(waits(case)):
            train(job, model, optimizer, step, 1)
            trained.append(step)
            if step == 1 and case in ("failure", "full disk", "all ranks, twice"):
                be_told()
            if step == 1 and case == "all ranks, twice":
                be_told(LONG + 0.3)
            if step == 1 and case == "one rank" and job.rank == ranks - 1:
                be_told()
            if step == 1:
                time.sleep(LONG)
            if step == 1 and case == "failure":
                raise LookupError("no more data")
            if case == "full disk":
                writing.write_shard = no_shard
            if case == "in the wait":
                writing.write_shard = told_before_shard
            saves = step == 2 and case == "in the wait"
            job.checkpoint(folder, model, optimizer, every=3 if saves else None, on_signal=signal.SIGTERM)
            if case == "with a worker":
                # Another process sends it, as a scheduler does.
                subprocess.run(["kill", *(str(each.pid) for each in active_children()), str(os.getpid())], check=True)
        if case == "after the last call":
            be_told()
    trained.append(-1)  # the process lives on


class Slow(Dataset[int]):
    """Three numbers, the second after a long time. A program that reads data can be ended."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 1:
            time.sleep(LONG)
        reader = subprocess.Popen(["sleep", "600"])
        reader.terminate()
        return index + signal.SIGTERM + reader.wait()


def waits(case: str) -> Iterable[object]:
    """One for each step; with a worker that reads one item at a time."""
    if case != "with a worker":
        return range(3)
    return DataLoader(Slow(), num_workers=1, prefetch_factor=1, multiprocessing_context="fork")


class Told:
    """A list in another process: numbers that are appended go into a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def append(self, step: int) -> None:
        os.write(self._pipe, b"%d " % step)


def main(folder: Path) -> None:
    for case, ranks in [(case, begin(folder / case, ranks, case)) for case, ranks in CASES.items()]:
        print(json.dumps([case, [ending(*rank) for rank in ranks]]), flush=True)


def begin(folder: Path, ranks: int, case: str) -> list[tuple[int, int]]:
    """Each rank's process, and the pipe into which it writes the steps that it has trained."""
    pipes = [os.pipe() for _ in range(ranks)]
    children = forked_ranks(ranks, lambda rank: run_rank(folder, case, Told(pipes[rank][1])))
    for _, writing_end in pipes:
        os.close(writing_end)
    return [(child, reading) for child, (reading, _) in zip(children, pipes, strict=True)]


def ending(child: int, pipe: int) -> tuple[int, list[int]]:
    """A rank's exit status, and the steps that it has trained."""
    _, status = os.waitpid(child, 0)
    steps = [int(step) for step in os.read(pipe, 1024).split()]
    os.close(pipe)
    return os.waitstatus_to_exitcode(status), steps


if __name__ == "__main__":
    main(Path(sys.argv[1]))
