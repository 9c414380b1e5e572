"""A line on stderr with a command's progress, which is removed at the end; only if stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


REFRESHED = 4
"""Redraws of the line per second: each one holds the GIL for some milliseconds."""

NARROW, WIDEST = 90, 100
"""Columns below which there is no room for a bar and the time left, and the most that the line takes."""


class Bar(Protocol):
    """Takes a command's progress."""

    def advance(self, amount: int) -> None:
        """Adds `amount` bytes or steps to what is done."""

    def at(self, step: str, done: int, total: int) -> None:
        """Sets the name of the step that runs now, the number of steps done, and the number of all steps."""


class _NoBar:
    def advance(self, amount: int) -> None:
        return

    def at(self, step: str, done: int, total: int) -> None:
        return


class _RichBar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: int) -> None:
        self._progress.advance(self._task, amount)

    def at(self, step: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=step, completed=done, total=total or None)


@contextmanager
def progress(title: str, total: int | None = None, *, counts_bytes: bool = False) -> Iterator[Bar]:
    """Shows `title`, a bar, the part that is done and the time left. `total` is None while it is unknown."""
    if not sys.stderr.isatty():
        yield _NoBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console(stderr=True)
    console.width = min(console.width, WIDEST)
    title_column = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    done = DownloadColumn() if counts_bytes else TaskProgressColumn()
    shown_columns = [title_column, BarColumn(bar_width=20), done, TimeRemainingColumn(), TextColumn("left")]
    if console.width < NARROW:
        shown_columns = [title_column, done]
    with Progress(*shown_columns, expand=True, console=console, transient=True, refresh_per_second=REFRESHED) as shown:
        yield _RichBar(shown, shown.add_task(title, total=total))
