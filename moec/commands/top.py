"""`moec top`: the figures of a run, from the JSON lines that `job.metrics` writes. Needs no torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from moec.commands.console.output import document, emit
from moec.commands.console.table import table, without_empty_columns
from moec.grammar.amounts import amount_of_bytes, si
from moec.grammar.diagnostics import DiagnosticError, diagnose

TAIL = 1 << 20
"""Bytes at the end of the file among which the last line is looked for."""

SECONDS = 1.0
"""Between two looks at the file."""

BY_LAYER = (
    "load", "home_rows", "rows", "head_load", "drop_rate", "guests", "guest_bytes", "moved", "predicted_seconds",
    "predicted_unplaced",
)  # fmt: skip
"""Figures by layer, in the order of the columns."""

MILLISECONDS = ("predicted_seconds", "predicted_unplaced", "step_seconds", "move_seconds")


@document
class RunDocument:
    """The last record of a run."""

    step: int
    figures: dict[str, float | None]
    """Those of the step, by the names that `job.metrics` gives them."""
    layers: dict[str, dict[str, float | None]]
    """Those of each layer, by its number."""


def run(path: Path, style: str, *, once: bool) -> None:
    """Shows the last record of the file; on a terminal again and again, until it is interrupted.

    Raises `DiagnosticError` for a file that cannot be read, or has no record.
    """
    if once or style != "full" or not sys.stdout.isatty():
        record = read(path)
        emit(style, lambda: _lines(record), lambda: record)
        return
    from rich.live import Live
    from rich.text import Text

    with suppress(KeyboardInterrupt), Live(Text("\n".join(_lines(read(path)))), auto_refresh=False) as live:
        while True:
            time.sleep(SECONDS)
            live.update(Text("\n".join(_lines(read(path)))), refresh=True)


def read(path: Path) -> RunDocument:
    """The last record of a file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            *lines, _ = file.read().split(b"\n")  # a line that its writer has not finished is no record
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    for line in reversed(lines):
        if line.strip():
            return _record(path, line)
    raise _unreadable(path, "it has no record yet")


def _record(path: Path, line: bytes) -> RunDocument:
    try:
        data: dict[str, Any] = json.loads(line)
        step, _ = int(data.pop("step")), data["loss"]
        by_layer = {name: value for name, value in data.items() if isinstance(value, dict)}
        figures = {name: value for name, value in data.items() if not isinstance(value, dict)}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _unreadable(path, "its last line is no record of `job.metrics`") from None
    numbers = sorted({number for values in by_layer.values() for number in values}, key=lambda n: (len(n), n))
    layers = {n: {name: values[n] for name, values in by_layer.items() if n in values} for n in numbers}
    return RunDocument(step=step, figures=figures, layers=layers)


def _unreadable(path: Path, words: str) -> DiagnosticError:
    help = "`with job.metrics('run.jsonl') as metrics:` writes such a file, a line for each measured step"
    return DiagnosticError([diagnose("MOE0001", None, f"{path}: {words}", help=help)])


def _lines(record: RunDocument) -> Iterator[str]:
    shown = (f"{name} {_shown(name, value)}" for name, value in record.figures.items() if name != "resumed")
    yield f"step {record.step:,}  " + "  ".join(shown)
    if not record.layers:
        return
    rows = [("layer", *(name.replace("_", " ") for name in BY_LAYER))]
    for number, values in record.layers.items():
        rows.append((number, *(_shown(name, values[name]) if name in values else "-" for name in BY_LAYER)))
    yield ""
    yield from table(without_empty_columns(rows), range(len(rows[0])))


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    if name in MILLISECONDS:
        return f"{value * 1e3:.4g} ms"
    if name in ("memory", "guest_bytes"):
        return amount_of_bytes(value) if value else "0"
    if name == "mfu":
        return f"{value:.1%}"
    return si(value) if abs(value) >= 10_000 else f"{value:.4g}"
