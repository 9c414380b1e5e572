"""Parallel experts on CPU: each thread computes whole experts, instead of all threads computing each product together.

Threads that compute one product together wait for each other at its end, some hundred times in a layer. On two quiet
cores that costs 1 to 8 % of a layer of 2,048 tokens; with another process on each core, it takes four to six times as
long as parallel experts (measured, benchmarks/README.md).
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
"""Reading an expert's matrices takes as long as this many rows (measured: 32 and 256 rows, both dtypes)."""

EVEN = 1.15
"""Experts run in parallel if the busiest thread's cost is at most this many times an even division's."""

ENOUGH = 2**31
"""Multiplications, some twenty milliseconds of a core, from which experts run in parallel: torch's threads keep their
cores busy for some milliseconds after a product. At 1.2e9, experts in parallel take 1.08 times as long as products
that all threads share, at 6.8e9 0.99 (bf16) and 0.96 (fp32; two quiet cores, measured)."""


def each_expert(
    sizes: Sequence[int], numbers: int, device: torch.device, begin: Callable[[], Callable[[int], None]]
) -> None:
    """Computes every expert once, in order; on several CPU threads at once if experts divide evenly among them.

    `sizes`: each expert's rows, or each batch's `cost`; an expert is then a batch; `numbers`: elements of an expert's
    weights; `device`: only on CPU there are threads.
    `begin()` makes one worker function per thread, on the calling thread; the worker is called with an expert.
    Re-raises the exception of a thread; of several, that of the first thread in order.
    """
    waiting = deque(range(len(sizes)))
    workers = [begin() for _ in range(_threads(sizes, numbers) if device.type == "cpu" else 1)]
    if len(workers) == 1:
        _compute_all(workers[0], waiting)
        return
    futures = [_THREADS.pool(len(workers)).submit(_compute_all, worker, waiting) for worker in workers]
    wait(futures)  # raise nothing while a thread still writes to the caller's tensors
    for future in futures:
        future.result()


def _compute_all(compute: Callable[[int], None], waiting: deque[int]) -> None:
    with torch.no_grad():  # operators run below autograd in the calling thread; other threads have grad enabled
        while True:
            try:
                expert = waiting.popleft()
            except IndexError:
                return
            compute(expert)


def _threads(sizes: Sequence[int], numbers: int) -> int:
    """The number of threads to compute experts with: torch's number, or 1."""
    threads = torch.get_num_threads()
    costs = [size + ROWS_OF_WEIGHTS for size in sizes if size]
    total = sum(costs)
    enough = threads <= len(costs) and total * numbers >= ENOUGH
    return threads if enough and _longest(costs, threads) <= EVEN * total / threads else 1


def _longest(costs: Sequence[int], threads: int) -> int:
    """The cost of the busiest thread."""
    busy = [0] * threads
    for cost in costs:
        heapreplace(busy, busy[0] + cost)
    return max(busy)


class _Threads:
    """Thread pools by number of threads, started at first use; a forked child starts new ones."""

    def __init__(self) -> None:
        self.drop_pools()

    def drop_pools(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def pool(self, number: int) -> ThreadPoolExecutor:
        with self._lock:
            if number not in self._pools:
                self._pools[number] = _start(number)
            return self._pools[number]


def _start(number: int) -> ThreadPoolExecutor:
    """Starts a pool of threads, each with one torch thread.

    `torch.get_num_threads()` registers the calling thread; without it the setting is not inherited.
    """
    num_threads = torch.get_num_threads()
    all_started = threading.Barrier(number + 1)
    pool = ThreadPoolExecutor(number, thread_name_prefix="moec-experts")

    def start() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()
        all_started.wait()

    for _ in range(number):
        pool.submit(start)
    all_started.wait()
    torch.set_num_threads(num_threads)
    return pool


_THREADS = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_THREADS.drop_pools)
