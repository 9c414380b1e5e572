"""Finds batches that are the same on every rank, where each data-parallel group should have its part of the batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moec.runtime.job.batches import fingerprint
from moec.runtime.job.module import PlanModule
from moec.runtime.script import warn_first

LARGEST = 1 << 20
"""Marks are below, so that the sum of their squares fits an int64 for any number of ranks."""


def mark_of(model: PlanModule, batch: Sequence[Tensor | None], data_size: int) -> int:
    """A hash of this rank's tokens, labels and inputs, from 1 on; 0 where there is nothing to compare.

    Reads values, which on a GPU waits for it: in a model's first step alone.
    """
    if data_size == 1 or "equal batches" in model.seen:
        return 0
    model.seen.add("equal batches")
    return 1 + fingerprint(batch) % (LARGEST - 1)


def warn_of_equal(mark: int, total: int, squares: int, ranks: int, data_size: int) -> None:
    """Warns if all ranks have the `mark`: `total` and `squares` are the sums of the marks and of their squares.

    n times the sum of squares is the square of the sum exactly where n numbers are equal (Cauchy and Schwarz).
    """
    if mark and ranks * squares == total**2:
        warn_first(
            f"every rank gives job.step the same batch, which counts {data_size} times: give each its part, "
            "`ids.chunk(job.data_size)[job.data_rank]`",
        )
