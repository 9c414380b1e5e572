"""Two ranks without torchrun, of which one is killed while both save, or none: test_peers.py runs it.

`killed_without_a_launcher.py FOLDER`: in `FOLDER/RANK`, for each of both, rank `RANK` dies when it would write its
shard. The other one prints what waiting for the save raises. In `FOLDER/-1` none dies: each process ends as soon as its
job has waited for the last save, and rank 1 asks the store of rank 0 only twice per second.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from support.ranks.checkpoints import plan_of
from support.scripts.forked_ranks import forked_ranks

import moec
from moec.runtime.checkpoint import peers, writing
from moec.runtime.errors import RankError

TIMEOUT = 600.0
"""Nobody is blamed for being slow on a busy machine: only of a rank that has ended, `SILENCE` is enough."""
SILENCE = 1.0
NONE = -1


def save_with_a_dead_rank(folder: Path, dead: int, deaths: int) -> None:
    """`deaths`: a pipe that ends with the process of rank `dead`."""
    with moec.launch(plan_of({"ranks": 2, "ep": 2}), device="cpu", timeout=TIMEOUT) as job:
        model = job.build(seed=1)
        job.save(folder / "1", model).wait()
        plain = writing.write_shard

        def deadly(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        def after_the_death(*arguments: Any) -> Any:
            assert os.read(deaths, 1) == b""
            assert job._watch is not None
            job._watch.timeout, job._watch.tick, job._watch._patience = SILENCE, SILENCE / 20, SILENCE
            return plain(*arguments)

        writing.write_shard = deadly if job.rank == dead else after_the_death
        job.save(folder / "2", model).wait()


def save_and_end(folder: Path) -> None:
    with moec.launch(plan_of({"ranks": 2, "ep": 2}), device="cpu", timeout=TIMEOUT) as job:
        if job.rank == 1:
            peers.FIRST_PAUSE = peers.LONGEST_PAUSE = 0.5
        job.save(folder / "1", job.build(seed=1))


def begin(folder: Path, dead: int) -> list[int]:
    """The processes of both ranks."""
    deaths, alive = os.pipe()

    def run(rank: int) -> None:
        if rank != dead:
            os.close(alive)
        try:
            if dead == NONE:
                save_and_end(folder)
            else:
                save_with_a_dead_rank(folder, dead, deaths)
        except RankError as error:
            print(f"{dead} dies, rank {rank}: {error}", flush=True)
            raise

    children = forked_ranks(2, run)
    os.close(alive)
    return children


def main() -> None:
    for dead, children in [(dead, begin(Path(sys.argv[1], str(dead)), dead)) for dead in (0, 1, NONE)]:
        for rank, child in enumerate(children):
            _, status = os.waitpid(child, 0)
            print(f"{dead} dies, rank {rank} ends with {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
