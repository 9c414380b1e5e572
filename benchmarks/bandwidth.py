"""The operators that move more than they compute, route, permute and combine, against a copy on the same device.

Bytes are the least that an operator can move: each number that it needs is read once, each result written once. A copy
reads and writes as many in all. An operator and its copy take turns, and who goes first changes; a share is the median
over rounds of neighbours' ratios. Times are on the wall on CPU (all threads work), of the stream on CUDA, where it is
first held up until all has been launched.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from layer import Clock, machine
from layer_problem import CPU_SHAPES, CUDA_SHAPES, LOADS, Shape, make_problem
from report import parser
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moec.runtime.backends import select

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HELD_CYCLES = 1_000_000
"""About half a millisecond: several times an operator's launches."""

SHAPES = {"cpu": (*CPU_SHAPES, Shape(16384, 1024, 1024, 64, 8)), "cuda": CUDA_SHAPES}


@dataclass(frozen=True, slots=True)
class Row:
    """One operator at one shape: medians over rounds; `share` is of the copy's bandwidth."""

    operator: str
    dtype: str
    shape: str
    megabytes: float
    milliseconds: float
    gigabytes_per_second: float
    copy_gigabytes_per_second: float
    share: float


@dataclass(frozen=True, slots=True)
class Work:
    """A function, and the bytes that it must read and write."""

    operator: str
    run: Callable[[], Any]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.reads, *self.writes))


def works(shape: Shape, dtype: torch.dtype, device: str, load: str) -> Iterator[Work]:
    """The operators of a layer, forward and backward, as a training step calls them."""
    backend, problem = select(device), make_problem(shape, dtype, device, load)
    experts, k, x = shape.experts, shape.k, problem.x[None]
    logits = F.linear(x, problem.gate).float()
    how = ("softmax", False, True)
    probabilities, weights, chosen = backend.route(logits, None, k, *how)
    yield Work("route", lambda: backend.route(logits, None, k, *how), (logits,), (probabilities, weights, chosen))
    given = (logits, probabilities, weights, weights, chosen)
    grad = backend.route_backward(*given, *how)
    yield Work("route backward", lambda: backend.route_backward(*given, *how), given, (grad,))

    rows, counts, positions = backend.permute(x, chosen, experts)
    yield Work("permute", lambda: backend.permute(x, chosen, experts), (x, chosen), (rows, counts, positions))
    yield Work("permute backward", lambda: backend.permute_backward(rows, positions), (rows, positions), (x,))
    summed = (rows, positions, weights)
    yield Work("combine", lambda: backend.combine(*summed), summed, (x,))
    yield Work("combine backward", lambda: backend.combine_backward(x, *summed), (x, *summed), (rows, weights))


def measure(work: Work, dtype: str, shape: Shape, device: str, rounds: int, clock: Clock) -> Row:
    half = work.bytes // 2
    source = torch.zeros(half, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds: dict[str, list[float]] = {"operator": [], "copy": []}
    turns = {"operator": work.run, "copy": lambda: target.copy_(source)}
    order = list(turns)
    for turn in range(rounds + 2):
        order.append(order.pop(0))
        for name in order:
            if device == "cuda":
                torch.cuda._sleep(HELD_CYCLES)
            before = clock.mark()
            turns[name]()
            took = clock.between(before, clock.mark())
            if turn >= 2:
                seconds[name].append(took)
    share = statistics.median(c / o for c, o in zip(seconds["copy"], seconds["operator"], strict=True))
    own, copy = (statistics.median(seconds[name]) for name in ("operator", "copy"))
    speed, of_copy = work.bytes / own / 1e9, 2 * half / copy / 1e9
    return Row(work.operator, dtype, str(shape), work.bytes / 1e6, own * 1e3, speed, of_copy, share)


def show(rows: list[Row], of: dict[str, Any]) -> None:
    title = f"{rows[0].shape}, {rows[0].dtype}: {of['device']}, threads {of['threads']}, load {of['load']:.0f}"
    table = Table(title=title, title_justify="left")
    for name in ("", "moves", "takes", "GB/s", "a copy, GB/s", "of the copy's"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        speeds = (f"{row.gigabytes_per_second:.3g}", f"{row.copy_gigabytes_per_second:.3g}", f"{row.share:.2f}")
        table.add_row(row.operator, f"{row.megabytes:.1f} MB", f"{row.milliseconds:.3g} ms", *speeds)
    Console(width=None if os.isatty(1) else 110).print(table)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=SHAPES, default="cpu")
    options.add_argument("--shapes", nargs="+", type=Shape.parse, help=f"such as {CPU_SHAPES[0]}")
    options.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="of rows; logits are fp32")
    options.add_argument("--load", choices=LOADS, default="uniform", help="how tokens spread over experts")
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    chosen = options.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: nothing was measured")
    torch.set_num_threads(chosen.threads)
    clock = Clock(chosen.device, 2)  # wall time: several threads fill a memory bus
    rows: list[Row] = []
    for shape in chosen.shapes or SHAPES[chosen.device]:
        for dtype in chosen.dtype:
            found = works(shape, DTYPES[dtype], chosen.device, chosen.load)
            own = [measure(work, dtype, shape, chosen.device, chosen.rounds, clock) for work in found]
            show(own, machine(chosen.device, chosen.threads, clock))
            rows += own
    if chosen.json:
        content = {"machine": machine(chosen.device, chosen.threads, clock), "rows": [asdict(row) for row in rows]}
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
