"""Experts side by side on CPU: each thread computes whole experts, instead of all threads each of their products.

Threads that share a product wait for each other at its end, some hundred times in a layer. On two quiet cores that
costs 1 to 8 % of a layer of 2,048 tokens; with another process on each core, sharing takes four to six times as long as
side by side (measured, benchmarks/README.md).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from heapq import heapreplace

import torch

ROWS_OF_WEIGHTS = 16
"""Reading an expert's matrices takes as long as so many more rows would (measured: 32 and 256 rows, both dtypes)."""

EVEN = 1.15
"""Side by side at most so many times the time of an even division, else products are shared."""

ENOUGH = 2**30
"""Multiplications, some ten milliseconds of a core: torch's own threads keep their cores busy for some milliseconds
after they worked. At 1.2e9 of them both ways take as long on quiet cores (measured)."""


def each_expert(
    sizes: Sequence[int], numbers: int, device: torch.device, begin: Callable[[], Callable[[int], None]]
) -> None:
    """Calls what `begin` gives with every expert: on several threads at once where experts divide evenly among them.

    `sizes`: each expert's rows; `numbers`: of its weights; `device`: where both are, for threads are a matter of CPUs
    alone. `begin` is called here, once for each thread, and gives what that one calls; every expert is computed once,
    the first ones first. Raises what the first thread raised that did.
    """
    waiting = deque(range(len(sizes)))
    works = [begin() for _ in range(_threads(sizes, numbers) if device.type == "cpu" else 1)]
    if len(works) == 1:
        _work(works[0], waiting)
        return
    done = [_THREADS.of(len(works)).submit(_work, work, waiting) for work in works]
    wait(done)  # nothing is raised while one of them still writes to what the caller holds
    for future in done:
        future.result()


def _work(compute: Callable[[int], None], waiting: deque[int]) -> None:
    with torch.no_grad():  # an operator computes below autograd: that of its own thread, not of others
        while True:
            try:
                expert = waiting.popleft()
            except IndexError:
                return
            compute(expert)


def _threads(sizes: Sequence[int], numbers: int) -> int:
    """How many are to compute experts."""
    threads = torch.get_num_threads()
    costs = [size + ROWS_OF_WEIGHTS for size in sizes if size]
    total = sum(costs)
    enough = threads <= len(costs) and total * numbers >= ENOUGH
    return threads if enough and _longest(costs, threads) <= EVEN * total / threads else 1


def _longest(costs: Sequence[int], threads: int) -> int:
    """How long the last of the threads works."""
    busy = [0] * threads
    for cost in costs:
        heapreplace(busy, busy[0] + cost)
    return max(busy)


class InTurn:
    """Actions done by turns 0, 1, 2, …, in whatever order they come: a sum does not depend on who is first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = 0
        self._waiting: dict[int, Callable[[], None]] = {}

    def put(self, turn: int, action: Callable[[], None]) -> None:
        """Does it now, or leaves it to whoever brings the turn before it."""
        with self._lock:
            self._waiting[turn] = action
            while self._turn in self._waiting:
                self._waiting.pop(self._turn)()
                self._turn += 1


class _Threads:
    """Pools by how many threads they have, started when they are first needed; a forked child starts its own."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def of(self, number: int) -> ThreadPoolExecutor:
        with self._lock:
            if number not in self._pools:
                self._pools[number] = _start(number)
            return self._pools[number]


def _start(number: int) -> ThreadPoolExecutor:
    """Threads for each of which torch computes alone.

    torch keeps one number for threads it has not met and one for each that it has: asking makes them acquainted.
    """
    here = torch.get_num_threads()
    all_started = threading.Barrier(number + 1)
    pool = ThreadPoolExecutor(number, thread_name_prefix="moec-experts")

    def start() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()
        all_started.wait()

    for _ in range(number):
        pool.submit(start)
    all_started.wait()
    torch.set_num_threads(here)
    return pool


_THREADS = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_THREADS.forget)
