"""The first rank's progress display: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text as RichText
from torch import Tensor

import moec

SECONDS_BETWEEN_LINES = 10.0
BARS = " ▁▂▃▄▅▆▇█"
Loads = Mapping[int, Tensor]
"""Layer → rows per expert in a step."""


def make_display(job: moec.Job, description: str) -> Display:
    """The display of this rank: a silent one unless the rank is 0."""
    kind = Display if job.rank else LiveDisplay if sys.stdout.isatty() else PlainDisplay
    train = job.plan.spec.train
    return kind(description, train.batch * train.sequence)


class Display:
    """Shows nothing."""

    def __init__(self, description: str, tokens_per_step: int) -> None:
        self.description, self.tokens_per_step = description, tokens_per_step
        self.started = time.monotonic()
        self.recent: deque[float] = deque(maxlen=5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, step: int, progress: float, bits: float, loads: Loads) -> None:
        """`bits` is the step's loss in bits per byte, its balance terms included."""

    def averages(self, step: int, bits: float) -> str:
        self.recent.append(bits)
        mean = sum(self.recent) / len(self.recent)
        rate = (step + 1) * self.tokens_per_step / (time.monotonic() - self.started)
        return f"step {step:5,}   loss {mean:5.3f} bits/byte   {rate:7,.0f} tokens/s"


class PlainDisplay(Display):
    """A line every few seconds."""

    def __enter__(self) -> Self:
        print(f"training on {self.description}", flush=True)
        self.due = self.started
        return self

    def show(self, step: int, progress: float, bits: float, loads: Loads) -> None:
        line = self.averages(step, bits)
        if time.monotonic() >= self.due:
            busiest = "  ".join(f"{layer}: {spread(counts)}" for layer, counts in loads.items())
            print(f"{progress:4.0%}   {line}   experts by layer  {busiest}", flush=True)
            self.due = time.monotonic() + SECONDS_BETWEEN_LINES


class LiveDisplay(Display):
    """A progress bar over one row of expert loads per layer."""

    def __enter__(self) -> Self:
        self.live = Live(RichText("starting …"), console=Console(highlight=False), refresh_per_second=4)
        self.live.console.print(f"training on {self.description}")
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def show(self, step: int, progress: float, bits: float, loads: Loads) -> None:
        head = Table.grid(padding=(0, 2))
        head.add_row(ProgressBar(total=1, completed=progress, width=16), f"{progress:4.0%}", self.averages(step, bits))
        rows = Table.grid(padding=(0, 2))
        for layer, counts in loads.items():
            rows.add_row(f"experts of layer {layer}", f"[cyan]{bars(counts)}[/]", f"{spread(counts)} of its share")
        self.live.update(Group(head, rows))


def bars(counts: Tensor) -> str:
    """One bar per expert; half height is the mean."""
    fair = max(1.0, float(counts.sum()) / len(counts))
    return "".join(BARS[min(8, round(4 * count / fair))] for count in counts.tolist())


def spread(counts: Tensor) -> str:
    """The least and the most loaded expert's rows over the mean."""
    fair = max(1.0, float(counts.sum()) / len(counts))
    return f"{int(counts.min()) / fair:.1f}–{int(counts.max()) / fair:.1f}×"
