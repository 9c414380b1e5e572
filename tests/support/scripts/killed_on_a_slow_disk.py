"""Ranks of a job that are killed in each sync of a save, on a disk that never finishes it: test_slow_disk.py runs it.

`killed_on_a_slow_disk.py FOLDER` forks one process for each sync; it works in `FOLDER/NUMBER`. The process takes a step
while its saver waits for the disk, and kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from support.ranks.checkpoints import plan_of, train

import moec

SYNCS = ("shard", "index.json", "checkpoint.json", "folder", "folder of the folder")


def save_and_die(folder: Path, number: int) -> None:
    """Checkpoint 1 is durable; the sync of number `number` of checkpoint 2 does not end."""
    plain, waits, count = os.fsync, threading.Event(), 0

    def endless(file: int) -> None:
        nonlocal count
        count += 1
        if count <= number:
            plain(file)
            return
        waits.set()
        time.sleep(600)

    with moec.launch(plan_of({"ranks": 1, "ep": 1}), device="cpu") as job:
        model = job.build(seed=1)
        optimizer = job.optimizer(model)
        train(job, model, optimizer, 0, 1)
        job.save(folder / "1", model, optimizer).wait()
        train(job, model, optimizer, 1, 1)
        os.fsync = endless  # type: ignore[assignment]
        saving = job.save(folder / "2", model, optimizer)
        assert waits.wait(600)
        train(job, model, optimizer, 2, 1)
        assert not saving.done
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    children = {}
    for number in range(len(SYNCS)):
        child = os.fork()
        if child == 0:
            save_and_die(Path(sys.argv[1], str(number)), number)
            os._exit(1)
        children[child] = number
    for child, number in children.items():
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"sync {number} ended otherwise"


if __name__ == "__main__":
    main()
