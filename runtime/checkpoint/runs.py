"""Orders the checkpoints of a folder, and selects those of the last run. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moec.runtime.checkpoint.format.index import Head
from moec.runtime.model.run import Run

ListedCheckpoint = tuple[Path, Head | None]
"""The path of a checkpoint and its head; None if the head is not valid."""


def newest_first(checkpoints: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """The last saved first. One without a valid head comes before the first one whose step is lower than its name."""
    valid = [(path, head) for path, head in checkpoints if head is not None]
    ordered: list[ListedCheckpoint] = [
        *sorted(valid, key=lambda listed: (listed[1].saved, listed[1].step, listed[0]), reverse=True)
    ]
    for path in sorted((path for path, head in checkpoints if head is None), key=lambda path: int(path.name)):
        lower = (i for i, (other, head) in enumerate(ordered) if _step(other, head) < int(path.name))
        ordered.insert(next(lower, len(ordered)), (path, None))
    return ordered


def _step(path: Path, head: Head | None) -> int:
    return int(path.name) if head is None else head.step


def checkpoints_of_last_run(ordered: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """Those of the run that has saved last and of its ancestors, and those without a head. `ordered`: newest first."""
    last = next((Run.of(head) for _, head in ordered if head is not None), None)
    return [(path, head) for path, head in ordered if head is None or last is None or last.has(head)]
