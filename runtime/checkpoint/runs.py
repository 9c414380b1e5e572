"""From which checkpoints of a folder a run goes on. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moec.runtime.checkpoint.format.index import Head
from moec.runtime.model.run import Run

Found = tuple[Path, Head | None]
"""A checkpoint, and its head, or None if that is not valid."""


def in_order(found: Sequence[Found]) -> list[Found]:
    """The last saved first. One without a valid head comes before the first whose step is lower than its name."""
    valid = [(path, head) for path, head in found if head is not None]
    ordered: list[Found] = [*sorted(valid, key=lambda each: (each[1].saved, each[1].step, each[0]), reverse=True)]
    for path in sorted((path for path, head in found if head is None), key=lambda path: int(path.name)):
        lower = (i for i, (other, head) in enumerate(ordered) if _step(other, head) < int(path.name))
        ordered.insert(next(lower, len(ordered)), (path, None))
    return ordered


def _step(path: Path, head: Head | None) -> int:
    return int(path.name) if head is None else head.step


def of_the_last_run(ordered: Sequence[Found]) -> list[Found]:
    """Of checkpoints `in_order` those of the run that has saved last, of its ancestors, and those without a head."""
    last = next((Run.of(head) for _, head in ordered if head is not None), None)
    return [(path, head) for path, head in ordered if head is None or last is None or last.has(head)]
