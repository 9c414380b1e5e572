"""Two ranks without torchrun, of which one is killed while both save, or none: test_peers.py runs it.

`killed_without_a_launcher.py FOLDER`: in `FOLDER/RANK`, for each of both, rank `RANK` dies when it would write its
shard. The other one prints what waiting for the save raises. In `FOLDER/-1` none dies: each process ends as soon as its
job has waited for the last save, and rank 1 asks the store of rank 0 only twice per second.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from support.ranks.checkpoints import plan_of

import moec
from moec.runtime.checkpoint import peers, writing
from moec.runtime.errors import RankError

TIMEOUT = 600.0
"""Nobody is blamed for being slow on a busy machine: only of a rank that has ended, `SILENCE` is enough."""
SILENCE = 1.0
NONE = -1


def save_with_a_dead_rank(folder: Path, dead: int, deaths: int) -> None:
    """`deaths`: a pipe that ends with the process of rank `dead`."""
    torch.set_num_threads(1)
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
    torch.set_num_threads(1)
    with moec.launch(plan_of({"ranks": 2, "ep": 2}), device="cpu", timeout=TIMEOUT) as job:
        if job.rank == 1:
            peers.FIRST_PAUSE = peers.LONGEST_PAUSE = 0.5
        job.save(folder / "1", job.build(seed=1))


def begin(folder: Path, dead: int) -> dict[int, int]:
    """Both ranks, by the id of the process that each is."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    deaths, alive = os.pipe()
    children = {}
    for rank in range(2):
        child = os.fork()
        if child == 0:
            if rank != dead:
                os.close(alive)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            try:
                if dead == NONE:
                    save_and_end(folder)
                    os._exit(0)
                save_with_a_dead_rank(folder, dead, deaths)
            except RankError as error:
                print(f"{dead} dies, rank {rank}: {error}", flush=True)
            os._exit(1)
        children[child] = rank
    os.close(alive)
    return children


def main() -> None:
    for dead, children in [(dead, begin(Path(sys.argv[1], str(dead)), dead)) for dead in (0, 1, NONE)]:
        for child, rank in children.items():
            _, status = os.waitpid(child, 0)
            print(f"{dead} dies, rank {rank} ends with {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
