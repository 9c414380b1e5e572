"""Finds batches that are the same on every rank, where each data-parallel group should have its part of the batch."""

from __future__ import annotations

from moec.runtime.guards.guard import BatchAgreed, Guard
from moec.runtime.ranks.fingerprint import fingerprint
from moec.runtime.script import warn_first

LARGEST = 1 << 20
"""Marks are below, so that the sum of their squares fits an int64 for any number of ranks."""


def mark_of(step: BatchAgreed) -> int:
    """A hash of this rank's tokens, labels and inputs, from 1 on."""
    return 1 + fingerprint(step.inputs) % (LARGEST - 1)


def warn_of_equal(step: BatchAgreed) -> None:
    """Warns if all ranks have the same mark.

    n times the sum of squares is the square of the sum exactly where n numbers are equal (Cauchy and Schwarz).
    """
    total, squares = step.sums
    if step.number and step.world_size * squares == total**2:
        warn_first(
            f"every rank gives job.step the same batch, which counts {step.data_size} times: give each its part, "
            "`ids.chunk(job.data_size)[job.data_rank]`",
        )


GUARD = Guard(
    event=BatchAgreed, look=warn_of_equal, number=mark_of,
    when=lambda step: step.data_size > 1, once="equal batches",
)  # fmt: skip
