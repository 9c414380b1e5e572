"""The progress display of `job.metrics`: live on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch import Tensor

SECONDS_BETWEEN_LINES = 10.0
BARS = " ▁▂▃▄▅▆▇█"
Loads = Mapping[int, Tensor]
"""Layer → rows per expert in a step."""

NOT_SHOWN = {
    "step",
    "tokens",
    "total_tokens",
    "seconds",
    "tokens_per_second",
    "mfu",
    "memory",
    "collective_seconds",
    "load",
    "drop_rate",
    "head_load",
}
"""Figures that the display shows in another form, or not at all."""


def make_display() -> PlainDisplay | LiveDisplay:
    """The display for this process's stdout."""
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()


class PlainDisplay:
    """A line every few seconds, and one for the last record."""

    def __init__(self) -> None:
        self._due = time.monotonic()
        self._last: tuple[Mapping[str, Any], Loads, float | None] | None = None
        """The last record, if it was not printed."""

    def write(self, record: Mapping[str, Any], loads: Loads, done: float | None) -> None:
        self._last = record, loads, done
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + SECONDS_BETWEEN_LINES
            self.close()

    def go_on(self, steps: int) -> None:
        """The next record says its step."""

    def close(self) -> None:
        """Prints the last record if it was not."""
        if self._last is None:
            return
        (record, loads, done), self._last = self._last, None
        busiest = "  ".join(f"{layer}: {spread(counts)}" for layer, counts in loads.items())
        experts = f"   experts by layer  {busiest}" if busiest else ""
        fraction = "" if done is None else f"{done:4.0%}   "
        print(f"{fraction}{summary(record)}{experts}", flush=True)


class LiveDisplay:
    """A progress bar over one row of expert loads per layer."""

    def __init__(self) -> None:
        self._live = Live(Text("starting …"), console=Console(highlight=False), refresh_per_second=4)
        self._live.start()

    def write(self, record: Mapping[str, Any], loads: Loads, done: float | None) -> None:
        head = Table.grid(padding=(0, 2))
        if done is None:
            head.add_row(summary(record))
        else:
            head.add_row(ProgressBar(total=1, completed=done, width=16), f"{done:4.0%}", summary(record))
        rows = Table.grid(padding=(0, 2))
        for layer, counts in loads.items():
            rows.add_row(f"experts of layer {layer}", f"[cyan]{bars(counts)}[/]", f"{spread(counts)} of the mean")
        self._live.update(Group(head, rows))

    def go_on(self, steps: int) -> None:
        """The next record says its step."""

    def close(self) -> None:
        self._live.stop()


def summary(record: Mapping[str, Any]) -> str:
    """The step, its losses and rates in one line."""
    shown = [f"{name} {value:.4g}" for name, value in record.items() if name not in NOT_SHOWN]
    mfu = [f"MFU {record['mfu']:.1%}"] if "mfu" in record else []
    return "   ".join([f"step {record['step']:5,}", *shown, f"{record['tokens_per_second']:7,.0f} tokens/s", *mfu])


def bars(counts: Tensor) -> str:
    """One bar per expert; half height is the mean."""
    fair = max(1.0, float(counts.sum()) / len(counts))
    return "".join(BARS[min(8, round(4 * count / fair))] for count in counts.tolist())


def spread(counts: Tensor) -> str:
    """The least and the most loaded expert's rows over the mean."""
    fair = max(1.0, float(counts.sum()) / len(counts))
    return f"{int(counts.min()) / fair:.1f}–{int(counts.max()) / fair:.1f}×"
