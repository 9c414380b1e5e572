"""Times on the device's clock: of single calls with a cold cache, and of a layer's passes behind a held stream.

The stream is held by a kernel that waits, so that by its end all launches are queued and the device never waits for
Python. Without it, small layers show the launches; both are of interest. On CPU the clock is the wall's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from layer import Clock, Contender
from torch import Tensor

CYCLES = 2e9
"""Of a second of holding, at most: the clock of a Hopper GPU is a little below."""

WARM_UP_MS, MEASURE_MS = 25, 100


def call_ms(run: Callable[[], Any], device: str) -> float:
    """Median milliseconds of a call: by events with a cold cache, or of three calls on the wall."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=WARM_UP_MS, rep=MEASURE_MS, return_mode="median"))
    run()
    taken = []
    for _ in range(3):
        before = time.perf_counter()
        run()
        taken.append(1e3 * (time.perf_counter() - before))
    return statistics.median(taken)


def wall_ms(run: Callable[[], Any], device: str, rounds: int = 40) -> float:
    """Median milliseconds of a call on the wall, until the device is done."""
    taken = []
    for _ in range(rounds if device == "cuda" else 3):
        before = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - before))
    return statistics.median(taken)


def passes_ms(contender: Contender, x: Tensor, grad: Tensor, rounds: int, *, held: bool) -> tuple[float, float]:
    """Median milliseconds of forward and of backward."""
    clock = Clock(x.device.type, 2)
    cycles = 0
    if held and clock.cuda:
        torch.cuda.synchronize()
        before = time.perf_counter()
        _launch(contender, x, grad, clock)
        cycles = int(CYCLES * (2 * (time.perf_counter() - before) + 1e-3))
    taken = []
    for _ in range(rounds):
        if clock.cuda:
            torch.cuda.synchronize()
        if cycles:
            torch.cuda._sleep(cycles)
        marks = _launch(contender, x, grad, clock)
        taken.append((clock.between(marks[0], marks[1]), clock.between(marks[1], marks[2])))
    forward, backward = (1e3 * statistics.median(part) for part in zip(*taken, strict=True))
    return forward, backward


def _launch(contender: Contender, x: Tensor, grad: Tensor, clock: Clock) -> tuple[Any, Any, Any]:
    """Forward and backward without waiting for the device, and a mark before, between and after."""
    x.grad = None
    for parameter in contender.layer.parameters:
        parameter.grad = None
    started = clock.mark()
    out = contender.layer.run(x)
    turned = clock.mark()
    out.backward(grad)
    return started, turned, clock.mark()
