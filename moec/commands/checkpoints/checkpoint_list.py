"""`moec checkpoint inspect` of a folder of checkpoints: lists them, the last saved first. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from moec.commands.checkpoints.checkpoint_document import ListedCheckpoint
from moec.commands.console.table import table
from moec.grammar.amounts import amount_of_bytes, count
from moec.runtime.checkpoint.folders import fault_of, heads_in
from moec.runtime.checkpoint.format.index import HEAD
from moec.runtime.checkpoint.runs import checkpoints_of_last_run

COLUMNS = "checkpoint", "model", "step", "saved", "size", ""
RUN_DIGITS = 8
NUMBERS = 2, 4
"""Columns of numbers."""


def checkpoints_of(folder: Path) -> list[ListedCheckpoint]:
    """The checkpoints in `folder`, the last saved first; none if it is a checkpoint itself. Compares no digests."""
    if os.path.lexists(folder / HEAD):
        return []
    checkpoints: list[ListedCheckpoint] = []
    heads = heads_in(folder)
    last_run = {path for path, _ in checkpoints_of_last_run(heads)}
    for path, head in heads:
        fault, saved = fault_of(path, head), None
        model, step = (head.model, head.step) if head else (None, None)
        with suppress(OSError):
            saved = datetime.fromtimestamp((path / HEAD).stat().st_mtime).isoformat(" ", "seconds")
        latest = fault is None and path in last_run and not any(listed.latest for listed in checkpoints)
        words = None if fault is None else f"{fault.diagnostics[0].code}: {fault.diagnostics[0].message}"
        checkpoints.append(
            ListedCheckpoint(
                name=path.name,
                model=model,
                run=head.run or None if head else None,
                step=step,
                saved=saved,
                bytes=_bytes_in(path),
                fault=words,
                latest=latest,
            )
        )
    return checkpoints


def _bytes_in(folder: Path) -> int:
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
    except OSError:
        return 0


def lines(folder: Path, checkpoints: Sequence[ListedCheckpoint]) -> Iterator[str]:
    """The list as a table."""
    yield f"{folder}: {count(len(checkpoints), 'checkpoint')}"
    yield ""
    several = len({checkpoint.run for checkpoint in checkpoints}) > 1
    columns = (*COLUMNS[:-1], "run", "") if several else COLUMNS
    yield from table([columns, *(_row(checkpoint, shows_run=several) for checkpoint in checkpoints)], NUMBERS)


def _row(checkpoint: ListedCheckpoint, *, shows_run: bool) -> tuple[str, ...]:
    state = checkpoint.fault or ("complete, latest" if checkpoint.latest else "complete")
    step = "?" if checkpoint.step is None else f"{checkpoint.step:,}"
    run = [(checkpoint.run or "?")[:RUN_DIGITS]] if shows_run else []
    return (
        checkpoint.name,
        checkpoint.model or "?",
        step,
        checkpoint.saved or "?",
        amount_of_bytes(checkpoint.bytes),
        *run,
        state,
    )
