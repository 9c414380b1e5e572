"""One MoE layer on CPU, in turns: with and without experts side by side, and with and without reused memory.

`runtime/backends/torch/torch_threads.py` gives each thread whole experts; `runtime/backends/torch/torch_memory.py`
keeps large blocks. A ratio above 1 is what leaving one out costs: the median over rounds of forward and backward
together, each against the same round with both. `--busy` runs an endless loop on each core meanwhile.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from layer import DTYPES, Clock, Contender, check
from layer_peers import IMPLEMENTATIONS
from layer_problem import CPU_SHAPES, Shape, make_problem, reference
from report import Row, median, parser, report

from moec.runtime.backends.torch import torch_memory, torch_threads

NEVER = math.inf
LEFT_OUT = {
    "with both": (),
    "all threads share each product": ((torch_threads, "ENOUGH"),),
    "large blocks anew each time": ((torch_memory, "LARGE"),),
    "without both": ((torch_threads, "ENOUGH"), (torch_memory, "LARGE")),
}
"""The ways, and the thresholds that each sets out of reach."""


def measure(shape: Shape, dtype: str, rounds: int, threads: int) -> list[Row]:
    """Every way in every round; who goes first changes."""
    problem, clock = make_problem(shape, DTYPES[dtype], "cpu"), Clock("cpu", threads)
    x, exact = problem.x.clone().requires_grad_(), reference(problem)[:2]
    layers = {way: Contender(IMPLEMENTATIONS["cpu"]["moec"](problem)) for way in LEFT_OUT}
    order = list(LEFT_OUT)
    for turn in range(rounds + 1):
        order.append(order.pop(0))
        for way in order:
            with ExitStack() as stack:
                for module, threshold in LEFT_OUT[way]:
                    stack.enter_context(mock.patch.object(module, threshold, NEVER))
                layer = layers[way]
                if turn:
                    layer.step(x, problem.grad, clock)
                else:
                    check(layer, problem, x, exact)
                    layer.forget()
    seconds = {way: [sum(parts) for parts in layers[way].seconds] for way in LEFT_OUT}
    base = seconds.pop("with both")
    name = f"{shape}, {dtype}"
    rows = [Row(f"{name}: with both", 1e3 * median(base), "ms")]
    for way, found in seconds.items():
        ratios = sorted(one / other for one, other in zip(found, base, strict=True))
        quarter = len(ratios) // 4
        spread = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        rows.append(Row(f"{name}: {way} (middle half {spread})", median(ratios), "x"))
    return rows


@contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """An endless loop in each of so many processes."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", type=Shape.parse, default=CPU_SHAPES, help=f"such as {CPU_SHAPES[0]}")
    options.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--busy", action="store_true", help="with an endless loop on each core")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    with busy_cores(os.cpu_count() if chosen.busy else 0):
        rows = [
            row
            for shape in chosen.shapes
            for dtype in chosen.dtype
            for row in measure(shape, dtype, chosen.rounds, chosen.threads)
        ]
    load = os.getloadavg()[0]
    report(f"one layer, {chosen.threads} threads, load {load:.1f}", rows, chosen.json)


if __name__ == "__main__":
    main()
