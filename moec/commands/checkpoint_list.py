"""`moec checkpoint inspect` of a folder of checkpoints: what is in it, newest first. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from moec.commands.checkpoint_document import ListedCheckpoint
from moec.commands.table import table
from moec.grammar.amounts import amount_of_bytes, count
from moec.runtime.checkpoint.folders import fault_of, heads_in
from moec.runtime.checkpoint.index import HEAD

COLUMNS = "checkpoint", "model", "step", "saved", "size", ""
NUMBERS = 2, 4
"""Columns of numbers."""


def checkpoints_of(folder: Path) -> list[ListedCheckpoint]:
    """The checkpoints in `folder`, newest first; none if `folder` is a checkpoint itself. Compares no digests."""
    if os.path.lexists(folder / HEAD):
        return []
    found: list[ListedCheckpoint] = []
    for path, head in heads_in(folder):
        fault, saved = fault_of(path, head), None
        model, step = (head.model, head.step) if head else (None, None)
        with suppress(OSError):
            saved = datetime.fromtimestamp((path / HEAD).stat().st_mtime).isoformat(" ", "seconds")
        latest = fault is None and not any(other.latest for other in found)
        words = None if fault is None else f"{fault.diagnostics[0].code}: {fault.diagnostics[0].message}"
        found.append(
            ListedCheckpoint(
                name=path.name,
                model=model,
                step=step,
                saved=saved,
                bytes=_bytes_in(path),
                fault=words,
                latest=latest,
            )
        )
    return found


def _bytes_in(folder: Path) -> int:
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
    except OSError:
        return 0


def lines(folder: Path, found: Sequence[ListedCheckpoint]) -> Iterator[str]:
    """The list as a table."""
    yield f"{folder}: {count(len(found), 'checkpoint')}"
    yield ""
    yield from table([COLUMNS, *map(_row, found)], NUMBERS)


def _row(each: ListedCheckpoint) -> tuple[str, ...]:
    state = each.fault or ("complete, latest" if each.latest else "complete")
    step = "?" if each.step is None else f"{each.step:,}"
    return each.name, each.model or "?", step, each.saved or "?", amount_of_bytes(each.bytes), state
