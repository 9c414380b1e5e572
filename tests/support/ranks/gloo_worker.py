"""What a worker of the pool does: runs a task as a rank of a gloo job, and sends what it returned or raised."""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.session.leftovers import changed, settings
from torch.distributed.device_mesh import DeviceMesh

from moec.runtime.host.layer import MoeLayer

ENTERED = b"entered"
"""What a worker sends before it runs its task."""


@dataclass
class Task:
    rank: int
    world_size: int
    port: int
    timeout: float
    store: Path | None
    test: str
    """As pytest says which test runs; its workers say the same, for a debugger or for coverage."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass
class Failure:
    when: float
    error: BaseException
    trace: str


def serve(connection: Connection, stack: Path) -> None:
    """A worker's life: tasks in, outcomes out, until the pool closes its end."""
    torch.set_num_threads(1)
    _collect_seldom()
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        connection.send_bytes(b"started")
        while True:
            try:
                packed = connection.recv_bytes()
            except EOFError:
                _leave()
                os._exit(0)  # an interpreter that has compiled takes seconds to tear down
            else:
                # Only now: the next task comes when every rank has finished the last. A rank that closed its
                # connections sooner could fail one that is still making them.
                _leave()
                _let_groups_go()
            outcome = _perform(packed, entered=lambda: connection.send_bytes(ENTERED))
            with suppress(BrokenPipeError):
                connection.send_bytes(outcome)


def _collect_seldom() -> None:
    """FX graphs are millions of small objects, and torch's own never go: with Python's thresholds a fifth of the time
    is garbage collection."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


USUAL = (
    "the labels of job.step are its tokens",
    ".* valid labels of job.step",
    "every rank gives job.step the same batch",
    "the gradients of an earlier job.step are still there",
    "the last step raised an error; gradients",
)
"""Warnings that most tests give: they take any batch, and steps without an optimizer. As in pyproject.toml."""

MOST_THREADS = 40
"""A worker frees the process groups of earlier tasks from so many threads on."""


def _let_groups_go() -> None:
    """Frees the process groups of earlier tasks: they wait in cycles for the garbage collector, or are in meshes that
    torch's caches of layouts keep.

    Each has threads that look for messages a hundred times a second: those of a hundred groups took both cores.
    """
    if sys.platform != "linux" or len(os.listdir("/proc/self/task")) <= MOST_THREADS:
        return
    for each in gc.get_objects():
        if type(each) is DeviceMesh:
            getattr(each, "_pg_registry", {}).clear()  # for torch.compile alone; groups are found by their names
        elif type(each) is MoeLayer:
            each.aux_loss = None  # the graph has nodes of `fully_shard` that refer to the layer: gc sees no such cycle
    gc.collect()


def _perform(packed: bytes, entered: Callable[[], None]) -> bytes:
    try:
        task = unpack(packed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for usual in USUAL:
                warnings.filterwarnings("ignore", usual)
            _enter(task)
            entered()
            before = settings()
            try:
                packed = pack(task.function(*task.arguments))
            finally:
                left = list(changed(before))
            assert not left, f"rank {task.rank} leaves behind: {', '.join(left)}"
            return packed
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the test's to see
        failure = Failure(time.monotonic(), error, traceback.format_exc())
        try:
            unpack(packed := pack(failure))
        except Exception:  # noqa: BLE001 - any exception that does not survive the journey travels as its text
            failure.error = RuntimeError(f"{type(error).__name__}: {error}")
            packed = pack(failure)
        # Immediately, so that ranks that wait for this one fail too.
        _leave()
        return packed


def _enter(task: Task) -> None:
    """Makes this process a rank of a job."""
    os.environ.update(
        RANK=str(task.rank),
        LOCAL_RANK=str(task.rank),
        WORLD_SIZE=str(task.world_size),
        LOCAL_WORLD_SIZE=str(task.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(task.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        PYTEST_CURRENT_TEST=task.test,
    )
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.manual_seed(0)
    if joining := sys.modules.get("moec.runtime.ranks.join"):
        joining._joined.clear()  # this task's store is new, even at the port of an earlier one that other ranks missed
    if task.store:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(task.store), task.world_size),
            rank=task.rank,
            world_size=task.world_size,
            # Longer than the pool waits, so that a hang is the pool's to report.
            timeout=timedelta(seconds=2 * task.timeout),
        )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def pack(value: Any) -> bytes:
    """By value: tensors in shared memory, multiprocessing's way, would have to be kept alive by whoever sends them."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
