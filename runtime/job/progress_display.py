"""The displays of `job.progress`: live on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch import Tensor

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_FRAMES = 0.25
BARS = " ▁▂▃▄▅▆▇█"
Loads = Mapping[int, Tensor]
"""Layer → rows per expert in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Figures of a step. `done` is the fraction of the training, None if unknown."""

    step: int
    total: int | None
    done: float | None
    figures: Mapping[str, float]
    tokens_per_second: float | None
    steps_per_second: float
    mfu: float | None
    seconds_left: float | None
    loads: Loads


class Display:
    """The base class of displays; shows nothing."""

    seconds_between = SECONDS_BETWEEN_LINES
    """Seconds between two writes."""

    def write(self, record: StepFigures) -> None:
        """Shows a step. May raise `OSError` and `ValueError`."""

    def close(self) -> None:
        """Ends the display."""


def make_display() -> Display:
    """The display for this process's stdout; a second one at the same time has lines."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    return LiveDisplay() if is_terminal and not LiveDisplay.runs else PlainDisplay()


class PlainDisplay(Display):
    """Prints a line for each step that it shows."""

    def __init__(self) -> None:
        self.seconds_between = SECONDS_BETWEEN_LINES

    def write(self, record: StepFigures) -> None:
        busiest = "  ".join(f"{layer}: {spread(counts)}" for layer, counts in record.loads.items())
        experts = f"   experts by layer  {busiest}" if busiest else ""
        fraction = "" if record.done is None else f"{record.done:4.0%}   "
        print(f"{fraction}{summary(record)}{experts}", flush=True)


class LiveDisplay(Display):
    """A progress bar over one row of expert loads per layer."""

    runs = False
    """Whether a live display is on the terminal."""

    def __init__(self) -> None:
        self.seconds_between = SECONDS_BETWEEN_FRAMES
        self._live = Live(Text("starting …"), console=Console(highlight=False), refresh_per_second=4)
        self._live.start()
        LiveDisplay.runs = True

    def write(self, record: StepFigures) -> None:
        head = Table.grid(padding=(0, 2))
        if record.done is None:
            head.add_row(escape(summary(record)))
        else:
            bar = ProgressBar(total=1, completed=record.done, width=16)
            head.add_row(bar, f"{record.done:4.0%}", escape(summary(record)))
        rows = Table.grid(padding=(0, 2))
        for layer, counts in record.loads.items():
            rows.add_row(f"experts of layer {layer}", f"[cyan]{bars(counts)}[/]", f"{spread(counts)} of the mean")
        self._live.update(Group(head, rows) if record.loads else head, refresh=True)

    def close(self) -> None:
        LiveDisplay.runs = False
        self._live.stop()


def summary(record: StepFigures) -> str:
    """The step, its losses, its rates and the time left, in one line."""
    of_total = "" if record.total is None else f" of {record.total:,}"
    parts = [f"step {record.step:5,}{of_total}", *(f"{name} {value:.4g}" for name, value in record.figures.items())]
    if record.tokens_per_second is not None:
        parts.append(f"{record.tokens_per_second:7,.0f} tokens/s")
    elif record.steps_per_second:
        parts.append(f"{record.steps_per_second:.3g} steps/s")
    parts += [] if record.mfu is None else [f"MFU {record.mfu:.1%}"]
    parts += [f"{clock(record.seconds_left)} left"] if record.seconds_left is not None and record.done != 1 else []
    return "   ".join(parts)


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:09` or `2 d 3:05`."""
    total = round(seconds)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days} d {hours % 24}:{minutes % 60:02}"
    return f"{hours}:{minutes % 60:02}:{total % 60:02}" if hours else f"{minutes}:{total % 60:02}"


def bars(counts: Tensor) -> str:
    """One bar per expert; half height is the mean."""
    fair = max(1.0, float(counts.sum()) / len(counts))
    return "".join(BARS[min(8, round(4 * count / fair))] for count in counts.tolist())


def spread(counts: Tensor) -> str:
    """The least and the most loaded expert's rows over the mean."""
    fair = max(1.0, float(counts.sum()) / len(counts))
    return f"{int(counts.min()) / fair:.1f}–{int(counts.max()) / fair:.1f}×"
