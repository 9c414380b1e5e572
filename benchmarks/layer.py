"""One MoE layer, forward and backward: moec beside a dense layer of the same FLOPs and what others offer.

Logits, the k best, rows by expert, SwiGLU experts, weighted sum; router and weights are trained. All implementations
take turns in every round, and who goes first changes, so that what else the machine does slows all alike; a ratio is
the median over rounds of neighbours' ratios. With one thread on CPU, times are those of the processor, which do not
count other processes. Before it is timed, an implementation's output and input gradient must agree with float64's.

Peak memory is the most that one forward and backward hold beyond the weights and the input: on CUDA by the allocator's
own count, on CPU by the profiler's record of every allocation. The weights' gradients are part of it, for all alike.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import allocations
import torch
from layer_chart import chart
from layer_peers import IMPLEMENTATIONS, Layer, NotRun
from layer_problem import ALLOWED, CPU_SHAPES, CUDA_SHAPES, LOADS, Problem, Shape, make_problem, reference, worst_error
from report import parser
from rich.console import Console
from rich.table import Table
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation at one shape: medians over rounds, and the median ratio to the dense layer of its round."""

    impl: str
    dtype: str
    shape: str
    load: str
    forward_ms: float
    backward_ms: float
    peak_mb: float
    ratio_to_dense: float


@dataclass(frozen=True, slots=True)
class Skipped:
    impl: str
    dtype: str
    shape: str
    why: str


class Clock:
    """Time between two marks: of the processor for one thread on CPU, on the wall for more, of the stream on CUDA."""

    def __init__(self, device: str, threads: int) -> None:
        self.cuda = device == "cuda"
        self.read = time.process_time if threads == 1 else time.perf_counter
        self.name = "CUDA events" if self.cuda else self.read.__name__

    def mark(self) -> Any:
        if not self.cuda:
            return self.read()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        if not self.cuda:
            return second - first
        second.synchronize()
        return first.elapsed_time(second) / 1e3


@dataclass(slots=True)
class Contender:
    """A layer, and how long its passes took."""

    layer: Layer
    seconds: list[tuple[float, float]] = field(default_factory=list)

    def step(self, x: Tensor, grad: Tensor, clock: Clock) -> Tensor:
        x.grad = None
        started = clock.mark()
        out = self.layer.run(x)
        turned = clock.mark()
        out.backward(grad)
        ended = clock.mark()
        self.seconds.append((clock.between(started, turned), clock.between(turned, ended)))
        for parameter in self.layer.parameters:
            parameter.grad = None  # freed before the next implementation: memory suffices for one of the largest layers
        return out.detach()

    def forget(self) -> None:
        self.seconds.clear()


def peak_bytes(contender: Contender, x: Tensor, grad: Tensor, clock: Clock) -> float:
    """Peak bytes of one step, beyond the bytes before it."""
    contender.forget()
    x.grad = None
    if clock.cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        contender.step(x, grad, clock)
        return torch.cuda.max_memory_allocated() - before
    return allocations.peak_bytes(lambda: contender.step(x, grad, clock))


class WrongError(Exception):
    """An implementation's results differ from the reference layer's."""


def check(contender: Contender, problem: Problem, x: Tensor, exact: tuple[Tensor, Tensor]) -> None:
    """Raises `WrongError` if the layer's output or input gradient is not that of the reference."""
    out = contender.step(x, problem.grad, Clock(x.device.type, 2))
    assert x.grad is not None
    for what, ours, theirs in zip(("output", "input gradient"), (out, x.grad), exact, strict=True):
        error = worst_error(ours, theirs)
        if not error <= ALLOWED[x.dtype]:
            raise WrongError(f"its {what} is wrong by {error:.1e} of a token's length")


def measure(
    shape: Shape, dtype: str, load: str, device: str, impls: Sequence[str], rounds: int, clock: Clock
) -> tuple[list[Row], list[Skipped]]:
    """All implementations at one shape. The slowest are timed in fewer rounds, never in fewer than three.

    Whatever ends one of the others' is the reason why it has no figure, and nothing more.
    """
    if device == "cuda":
        torch.cuda.empty_cache()
    problem = make_problem(shape, DTYPES[dtype], device, load)
    x = problem.x.clone().requires_grad_()
    exact = reference(problem)[:2]
    contenders: dict[str, Contender] = {}
    skipped = []
    for impl in impls:
        try:
            contenders[impl] = Contender(IMPLEMENTATIONS[device][impl](problem))
            if impl != "dense":
                check(contenders[impl], problem, x, exact)
        except Exception as error:
            if impl in ("moec", "dense"):
                raise
            contenders.pop(impl, None)
            skipped.append(Skipped(impl, dtype, str(shape), why(error)))
    for contender in contenders.values():
        contender.step(x, problem.grad, clock)
    cost = {impl: sum(contender.seconds[-1]) for impl, contender in contenders.items()}
    for contender in contenders.values():
        contender.forget()
    dense, ratios = contenders["dense"], {impl: [] for impl in contenders}
    order = list(contenders)
    for turn in range(rounds):
        order.append(order.pop(0))
        ran = [i for i in order if turn < 3 or cost[i] < 5 * cost["dense"]]
        for impl in ran:
            contenders[impl].step(x, problem.grad, clock)
        for impl in ran:
            ratios[impl].append(sum(contenders[impl].seconds[-1]) / sum(dense.seconds[-1]))
    rows = []
    for impl, contender in contenders.items():
        forward, backward = (1e3 * statistics.median(part) for part in zip(*contender.seconds, strict=True))
        peak = peak_bytes(contender, x, problem.grad, clock) / MEGABYTE
        ratio = statistics.median(ratios[impl])
        rows.append(Row(impl, dtype, str(shape), load, forward, backward, peak, ratio))
        contender.forget()
    return rows, skipped


def why(error: Exception) -> str:
    """The row as one line."""
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, (NotRun, WrongError)) else f"{type(error).__name__}: {text}"


def machine(device: str, threads: int, clock: Clock) -> dict[str, Any]:
    packages = ("torch", "triton", "transformers", "deepspeed", "liger-kernel", "scattermoe")
    versions: Mapping[str, str] = {d.name: d.version for d in metadata.distributions() if d.name in packages}
    found = {"device": device, "cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    load = os.getloadavg()[0]
    return {**found, "threads": threads, "clock": clock.name, "load": load, "python": platform.python_version()} | {
        "versions": dict(sorted(versions.items()))
    }


def show(rows: Sequence[Row], skipped: Sequence[Skipped], of: Mapping[str, Any]) -> None:
    """One shape's table."""
    console = Console(width=None if os.isatty(1) else 110)
    how = f"threads {of['threads']}, {of['clock']}, load {of['load']:.0f}"
    title = f"{rows[0].shape}, {rows[0].dtype}: {of['device']}, {how}"
    table = Table(title=title, title_justify="left")
    for name in ("", "forward", "backward", "sum / dense", "peak", "TFLOP/s"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        speed = 3 * Shape.parse(row.shape).flops / (row.forward_ms + row.backward_ms) / 1e9
        times = (f"{row.forward_ms:.1f} ms", f"{row.backward_ms:.1f} ms", f"{row.ratio_to_dense:.2f}")
        table.add_row(row.impl, *times, f"{row.peak_mb:.0f} MB", f"{speed:.2g}")
    console.print(table)
    for one in skipped:
        console.print(f"{one.impl}: not run, {one.why}", highlight=False)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--shapes", nargs="+", type=Shape.parse, help=f"such as {CPU_SHAPES[0]}")
    options.add_argument("--dtype", nargs="+", choices=DTYPES, help="both on CPU, bf16 on CUDA")
    options.add_argument("--load", choices=LOADS, default="uniform", help="how tokens spread over experts")
    options.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS["cuda"], help="only these, and dense")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--svg", type=Path, metavar="FILE", help="draw the ratios")
    chosen = options.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: nothing was measured")
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    clock = Clock(chosen.device, chosen.threads)
    impls = [i for i in IMPLEMENTATIONS[chosen.device] if not chosen.impl or i == "dense" or i in chosen.impl]
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for shape in chosen.shapes or (CPU_SHAPES if chosen.device == "cpu" else CUDA_SHAPES):
        for dtype in chosen.dtype or (list(DTYPES) if chosen.device == "cpu" else ["bf16"]):
            measured = measure(shape, dtype, chosen.load, chosen.device, impls, chosen.rounds, clock)
            show(*measured, machine(chosen.device, chosen.threads, clock))
            rows += measured[0]
            skipped += measured[1]
    if chosen.json:
        of = machine(chosen.device, chosen.threads, clock)
        content = {"machine": of, "rows": [asdict(row) for row in rows], "not_run": [asdict(one) for one in skipped]}
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")
    if chosen.svg:
        chosen.svg.write_text(chart([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
